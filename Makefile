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

# One pair of supported versions: make test-versions TORCH=2.12 TRANSFORMERS=5.19
TORCH ?= 2.11
TRANSFORMERS ?= 5.17
VERSION_TESTS := tests/utils/test_torch_private.py tests/utils/test_transformers_version.py \
	tests/utils/test_tensor_parallel.py tests/graph_capture/test_experts.py tests/graph_capture/test_recurrence.py \
	tests/ops/test_in_cpp.py tests/ops/test_attention_op.py tests/ops/test_expert_linear.py \
	tests/ops/packed_weights/test_rounded_experts.py tests/ops/test_recurrences.py tests/ops/triton/test_triton_sm90.py \
	"tests/end_to_end/test_family_texts.py::test_compiled_by_inductor_it_is_the_same_text[gemma2]" \
	"tests/end_to_end/test_family_texts.py::test_compiled_by_inductor_it_is_the_same_text[mixtral]" \
	"tests/end_to_end/test_family_texts.py::test_compiled_by_inductor_it_is_the_same_text[qwen3_next]"
PAIR := build/versions/torch-$(TORCH)-transformers-$(TRANSFORMERS)

# As many processes as cores: with one more, two hyperthreads take 5 to 20 percent longer.
JOBS ?= $$(nproc)
PYTEST = OMP_WAIT_POLICY=PASSIVE $(1)/python -m pytest -n $(JOBS) --maxprocesses 5 --dist worksteal \
	--durations=15

# The suite skips parts of these without headless Chromium.
BROWSER_TESTS := tests/serve/test_page.py tests/report/render/test_report_page.py tests/docs/test_site.py \
	tests/end_to_end/test_screenshots.py tests/bench/test_bench_page.py

# Python compiles what it imports. pip would compile all modules of torch and transformers, of which few are used.
INSTALL := install --no-compile

CLIENTS := build/clients
CLIENT_PACKAGES := dspy instructor langchain-openai litellm llama-index-llms-openai-like openai pydantic-ai-slim[openai] pytest

WHEEL := build/wheel

RAY := build/ray

.PHONY: demo test test-deep test-browser test-clients test-ray test-versions test-wheel lint docs bench gpu-check clean

demo: $(STAMP)
	$(BIN)/speccompile demo $(if $(HEAD),--head $(HEAD)) $(ARGS)

# All tests but those marked deep.
test: $(STAMP)
	$(call PYTEST,$(BIN)) -m "not deep" $(ARGS)

# More combinations of what other tests have, and what takes minutes; the list is in tests/conftest.py.
test-deep: $(STAMP)
	$(call PYTEST,$(BIN)) -m deep $(ARGS)

# Needs the programs chromium and chromedriver (Debian: chromium, chromium-driver).
test-browser: $(STAMP)
	$(BIN)/python -m pytest --no-skips $(BROWSER_TESTS) $(ARGS)

# Replicas under Ray Serve. Ray stays out of the environment of the suite, which has tests of what is said without it.
test-ray: $(STAMP) $(RAY)/.stamp
	PYTHONPATH=$(abspath $(RAY)) $(BIN)/python -m pytest --no-skips tests/serve/replicas/test_ray_serve.py $(ARGS)

# Client libraries against the server, each with its defaults, in an environment of their own.
test-clients: $(STAMP) $(CLIENTS)/.stamp
	SERVER_PYTHON=$(abspath $(BIN)/python) PYTHONPATH=tests $(CLIENTS)/bin/python -m pytest --noconftest \
		-p support.served_model -p support.no_skips --no-skips tests/serve/clients/check_*.py $(ARGS)

# The wheel without the checkout, in an environment of its own.
test-wheel:
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip wheel -q --no-deps -w $(WHEEL)/dist .
	$(WHEEL)/bin/pip $(INSTALL) -q -c constraints.txt "$$(echo $(WHEEL)/dist/*.whl)[demo]"
	cd $(WHEEL) && bin/speccompile demo --tiers 0,3 --new-tokens 8 $(ARGS)

# What versions differ in: names of arguments and modules, C++, three families compiled, kernels. ARGS replaces these.
test-versions: $(PAIR)/.stamp
	$(call PYTEST,$(PAIR)/bin) $(or $(ARGS),$(VERSION_TESTS))

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy speccompile

# -E reads all pages: of pages that have not changed since a build that failed, Sphinx repeats no warning.
docs: $(STAMP)
	$(BIN)/sphinx-build -E -W --keep-going -q docs build/docs
	@echo open build/docs/index.html

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare $(ARGS)

# Without a GPU it is a rehearsal on the CPU. GPU_PYTHON=python3 runs it from the source tree with an interpreter that
# has torch already, without an environment. Results: build/gpu-check, or ARGS='--output FOLDER'.
gpu-check: $(GPU_READY)
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# torch is a build for CUDA on most indexes, about 3 GB: pip keeps no copy of it.
$(PAIR)/.stamp: pyproject.toml
	test -x $(PAIR)/bin/pip || $(PYTHON) -m venv $(PAIR)
	$(PAIR)/bin/pip $(INSTALL) --no-cache-dir 'torch==$(TORCH).*' 'transformers==$(TRANSFORMERS).*' triton -e . \
		accelerate hypothesis pytest pytest-xdist
	touch $@

$(CLIENTS)/.stamp: Makefile
	test -x $(CLIENTS)/bin/pip || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip $(INSTALL) -q $(CLIENT_PACKAGES)
	touch $@

$(RAY)/.stamp: pyproject.toml constraints.txt
	rm -rf $(RAY)
	$(BIN)/pip $(INSTALL) -q -c constraints.txt --target $(RAY) 'ray[serve]'
	touch $@

# The environment stays: making it again costs a download of torch. Remove .venv by hand for that.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# pip is asked for, not python: it is the last thing venv writes, so a venv cut short is made again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[demo,dev,docs]'
	touch $@
