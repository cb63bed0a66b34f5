PYTHON ?= python3
ARGS ?=
# The draft head of the demo; none of another model than SmolLM2: make demo HEAD= ARGS='--model ...'
HEAD ?= heads/smollm2-135m-instruct

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

ifeq ($(origin GPU_PYTHON), undefined)
GPU_PYTHON := $(BIN)/python
GPU_READY := $(STAMP)
endif

.PHONY: demo test lint docs bench gpu-check clean

demo: $(STAMP)
	$(BIN)/speccompile demo $(if $(HEAD),--head $(HEAD)) $(ARGS)

# One process more than cores: each waits a quarter of its time, for other processes and for the disk.
test: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $$(( $$(nproc) + 1 )) --maxprocesses 5 --dist worksteal \
		--durations=15 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy speccompile

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs
	@echo open build/docs/index.html

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare $(ARGS)

# Without a GPU it is a rehearsal on the CPU. GPU_PYTHON=python3 runs it from the source tree with an interpreter that
# has torch already, without an environment. Results: build/gpu-check, or ARGS='--output FOLDER'.
gpu-check: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# The environment stays: making it again costs a download of torch. Remove .venv by hand for that.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# pip is asked for, not python: it is the last thing venv writes, so a venv cut short is made again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[demo,dev,docs]'
	touch $@
