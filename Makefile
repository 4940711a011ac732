.PHONY: compatibility quality style test types
quality:
	ruff check .
	ruff format --check .
style:
	ruff check --fix .
	ruff format .
test:
	pytest
types:
	python .ci/check_types.py
compatibility:
	python .ci/compatibility.py
