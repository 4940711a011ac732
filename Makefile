.PHONY: compatibility core mutants nightly quality style test types
quality:
	ruff check .
	ruff format --check .
	python .ci/check_ceilings.py
style:
	ruff check --fix .
	ruff format .
types:
	python .ci/check_types.py
# worksteal: each process begins with half of the files, in order, so that what a file or `tests.backbones` makes once is
# made in one of them; who is done first takes from the other
test:
	pytest -n 2 --dist worksteal
# what `make test` leaves out: further cases, families, caches, tokenizers, several processes
nightly:
	pytest -n 2 --dist worksteal -m "nightly and not slow"
core:
	pytest -m core
# hours, and not in continuous integration; runs the tests once for what each covers, and goes on from mutants.jsonl: `make mutants MUTANTS='--only loop.py --jobs 2'`
mutants:
	python tests/mutants/run.py $(MUTANTS)
compatibility:
	python .ci/compatibility.py
