# Two commands: `make demo` runs it, `make test` tests it. Both build .venv on first use and reuse it afterwards.
# PYTHON chooses the interpreter; TORCH=2.15.0 and TRITON=3.9.0 choose versions (default: what is at hand, else the newest).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHOSEN := -$(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)$(TORCH:%=-torch-%)$(TRITON:%=-triton-%)
DEMO := $(VENV)/.demo$(CHOSEN)
DEV := $(VENV)/.dev$(CHOSEN)
HF := $(VENV)/transformers
# vLLM pins another torch, so its environment is another one; name a folder that has it, or where it is to be built.
SERVING ?= .venv-serving
OLDEST_HF := transformers==4.56.0
NUMPY := $(shell grep '^numpy==' constraints.txt)
WORKERS ?= 2
PYTEST_ARGS ?=
# Each pass compiles the tests it collects, and a process what it imports, unless it may keep that.
unexport PYTHONDONTWRITEBYTECODE

# Parallel workers get one torch thread each: more oversubscribe the cores and make the suite slower, not faster.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not serial and not gpu" -n $(WORKERS) --dist loadgroup \
	--doctest-modules tests src/stream_attention/ops src/stream_attention/core src/stream_attention/distributed \
	src/stream_attention/masks src/stream_attention/utils src/stream_attention_tools/baseline.py \
	src/stream_attention/dispatch/plan.py src/stream_attention/serving/limits.py src/flash_attention
# Only files that have the word: to collect them all takes longer than these tests (conftest.py sees that none is missed).
SERIAL := $(BIN)/python -m pytest -m "serial and not gpu" $$(grep -rlw serial --include='test_*.py' tests)
# triton.jit chooses between compiler and interpreter when it decorates, so interpreted kernels need their own process.
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) \
	tests/backends/triton/test_forward_interpreted.py tests/backends/triton/test_backward_interpreted.py \
	tests/backends/triton/test_append_interpreted.py tests/backends/triton/test_decode_interpreted.py \
	tests/backends/triton/test_write_kv_interpreted.py \
	tests/backends/triton/test_few_interpreted.py tests/backends/triton/test_quantize_fp8_interpreted.py \
	tests/backends/triton/test_forward_fp8_interpreted.py tests/ops/test_fp8_interpreted.py \
	tests/backends/triton/test_paged_interpreted.py tests/backends/triton/test_masks_interpreted.py \
	tests/gpu/test_tile_list_interpreted.py tests/serving/test_vllm_interpreted.py \
	tests/ops/test_launch_cache_interpreted.py tests/gpu/test_tail_interpreted.py \
	tests/ops/test_merge_interpreted.py tests/test_interpreter.py \
	tests/learn/test_02_triton_basics.py tests/learn/test_06_flash_forward.py tests/learn/test_07_causal.py \
	tests/learn/test_08_backward.py tests/learn/test_10_decode.py

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(DEMO) ## run the demonstration on this machine's CPU
	$(BIN)/python examples/demo.py

.PHONY: test
test: $(DEV) ## run every CPU test: in parallel, interpreted, time and memory alone; GATES=all compiles every kernel
	@set -o pipefail; mkdir -p out; failed=0; \
	$(PARALLEL) $(PYTEST_ARGS) 2>&1 | tee out/test-parallel.log || failed=1; \
	$(INTERPRETED) $(PYTEST_ARGS) 2>&1 | tee out/test-interpreted.log || failed=1; \
	$(SERIAL) $(PYTEST_ARGS) 2>&1 | tee out/test-serial.log || failed=1; \
	echo; for pass in parallel interpreted serial; do echo "$$pass: $$(grep -E '(passed|failed|error|ran).* in [0-9.]+s' out/test-$$pass.log | tail -n 1)"; done; \
	exit $$failed

.PHONY: gates
gates: $(DEV) ## compile every kernel with the installed Triton, check the machine code, and record that it passed
	$(BIN)/python tests/backends/gates.py -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

.PHONY: gates-all
gates-all: $(DEV) ## the same with Triton 3.6, 3.7, 3.8 and 3.9 (4 GB under .venv)
	$(BIN)/python tests/backends/gates.py --all -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

.PHONY: check
check: $(DEV) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(DEV) ## apply formatting and the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: cuda
cuda: ## build the CUDA companion into cuda/build (CMake 3.18+, nvcc)
	cmake -S cuda -B cuda/build
	cmake --build cuda/build --parallel

.PHONY: test-gpu
test-gpu: ## run the GPU tests side by side with PYTHON's own torch and triton; installs nothing
	$(PYTHON) tools/gpu_tests.py -- $(PYTEST_ARGS)

# Each release in a folder of its own, with what it asks for, which is found before that of .venv; the newest is looked up.
.PHONY: test-hf
test-hf: $(DEV) ## run the tests of transformers' models with its oldest supported release and with its newest
	@failed=0; for release in $(OLDEST_HF) transformers; do \
		rm -rf $(HF); \
		$(BIN)/python -m pip install -q --disable-pip-version-check --target $(HF) $$release $(NUMPY); \
		echo "$$(basename $(HF)/transformers-*.dist-info .dist-info):"; \
		PYTHONPATH="$(CURDIR)/$(HF)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist loadgroup \
			tests/integration tests/compat/test_transformers_checks.py $(PYTEST_ARGS) || failed=1; \
	done; exit $$failed

.PHONY: test-serving
test-serving: $(SERVING)/.built ## run the tests of serving engines with vLLM on a CPU, in an environment of its own (3 GB)
	VLLM_TARGET_DEVICE=cpu $(SERVING)/bin/python -m pytest tests/serving \
		--serving-out benchmarks/results/cpu/serving_vllm.json $(PYTEST_ARGS)

$(SERVING)/.built: pyproject.toml tools/environment.py
	$(PYTHON) tools/environment.py serving --venv $(SERVING)
	@touch $@

.PHONY: sanitize
sanitize: ## watch the memory accesses of a sample of Hopper kernels, on a GPU with CUDA's compute-sanitizer
	PYTHONPATH=src:tests/backends/triton:tests/backends/hopper compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(PYTHON) tests/backends/hopper/sanitized.py
	PYTHONPATH=src:tests/backends/triton:tests/backends/hopper compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(PYTHON) tests/backends/hopper/sanitized.py --backward

.PHONY: bench-cpu
bench-cpu: $(DEV) ## measure this machine's CPU, some minutes, and keep the figures in out/cpu.json
	@mkdir -p out
	$(BIN)/python -m stream_attention.cli.benchmark --device cpu --suite cpu --out out/cpu.json

.PHONY: docs
docs: $(DEV) ## build the documentation site into out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

.PHONY: pictures
pictures: $(DEV) ## draw the pictures of docs/pictures anew from the results files
	$(BIN)/python -m tools.pictures

.PHONY: venv
venv: $(DEV) ## build .venv for development, if it is missing or out of date

.PHONY: lock
lock: $(DEV) ## resolve constraints.txt anew: every dependency but torch and Triton; UPGRADE=1 takes the newest versions
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --extra dev --no-build --no-annotate \
		$(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" -o constraints.txt pyproject.toml

.PHONY: prebuilt
prebuilt: $(DEV) ## compile the common Hopper kernels for a wheel to carry; they must have passed the gates
	$(BIN)/python tests/backends/gates.py --check
	$(BIN)/python -m tools.prebuild --workers $(WORKERS)

.PHONY: wheel
wheel: prebuilt ## build the wheel into dist, with machine code for Hopper
	@rm -rf dist build; mkdir -p out
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist > out/wheel.log 2>&1 || { cat out/wheel.log; exit 1; }
	@echo "In another environment: pip install $$(ls dist/*.whl)"

.PHONY: fresh
fresh: ## make demo and make test as a stranger has them: a clean clone, Debian's Python, nothing inherited; 30 minutes
	$(PYTHON) tools/fresh.py public

.PHONY: fresh-all
fresh-all: ## the same with a local CPU wheel of torch, the newest torch and the oldest supported one
	$(PYTHON) tools/fresh.py

# `demo` is what the demonstration needs, `dev` all the rest. A stamp names the Python and the versions that were asked for;
# others are installed over what is there, and the old stamps go first: an installation may be interrupted.
$(DEMO): pyproject.toml constraints.txt tools/environment.py
	@command -v "$(PYTHON)" > /dev/null || { echo "There is no '$(PYTHON)' here. Name one that is: make PYTHON=python3 ..." >&2; exit 1; }
	@rm -f $(VENV)/.demo* $(VENV)/.dev*
	$(PYTHON) tools/environment.py demo --venv $(VENV) $(TORCH:%=--torch %) $(TRITON:%=--triton %)
	@touch $@

$(DEV): $(DEMO)
	$(PYTHON) tools/environment.py dev --venv $(VENV) $(TORCH:%=--torch %) $(TRITON:%=--triton %)
	@touch $@

.PHONY: clean
clean: ## remove what the commands wrote, .venv included
	rm -rf $(VENV) $(SERVING) build dist out cuda/build .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests tools learn -name __pycache__ -type d -prune -exec rm -rf {} +
