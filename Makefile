PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test lint bench clean

demo: $(STAMP)
	$(BIN)/speccompile demo $(ARGS)

test: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations=15 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy speccompile

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare $(ARGS)

# The environment stays: making it again costs a download of torch. Remove .venv by hand for that.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# pip is asked for, not python: it is the last thing venv writes, so a venv cut short is made again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[demo,dev]'
	touch $@
