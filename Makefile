.PHONY: compatibility core quality style test
quality:
	ruff check .
	ruff format --check .
style:
	ruff check --fix .
	ruff format .
test:
	pytest
core:
	pytest -m core
compatibility:
	python .ci/compatibility.py
