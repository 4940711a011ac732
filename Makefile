.PHONY: compatibility core quality style test types
quality:
	ruff check .
	ruff format --check .
style:
	ruff check --fix .
	ruff format .
types:
	python .ci/check_types.py
test:
	pytest
core:
	pytest -m core
compatibility:
	python .ci/compatibility.py
