# make demo | make test | make test-long: every set-up step is done on first use.
# Tests start many processes, so they keep bytecode, whatever the environment says.
# make planted-faults: takes lines that guarantee something out of a copy, one by one; a test has to die of each.
# make lint: ruff, and the contract of who imports whom (both in pyproject.toml).
# make lib: rebuild the compiled ops only.
# make docs: the site, in build/site, in an environment of its own; a warning is an error.
# make wheel: dist/apexfx-*-manylinux_*.whl with the CPU ops, tried in an environment of its own.
# make bench: every benchmark in its short form, compared with the committed results.
# make check-cuda: compile every .cu (nvcc, no device needed), and compare its kernels with csrc/cuda/kernels.json.
# make gpu-check: build, test, sanitize and measure on a machine with a CUDA device (python3 with torch and pytest).
# make test TORCH=2.14.1, or any other of these: the same under that torch, in an environment of its own, .venv-2.14.1. Both load one
# library of compiled ops, whichever has built it: it is of torch's stable ABI alone (docs/build.md).
PY    ?= python3
TORCH ?= 2.13.0
$(if $(findstring =,$(TORCH)),$(error TORCH is "$(TORCH)"; expected a version alone, as in TORCH=2.14.1))
VENV  := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-$(TORCH))
BIN   := $(VENV)/bin
SRC   := $(wildcard csrc/*.h csrc/*.py csrc/cpu/* csrc/cuda/*) setup.py pyproject.toml

all: $(VENV)/.built

demo: $(VENV)/.built
	$(BIN)/python -m apexfx demo

test: $(VENV)/.tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist worksteal --durations=10 tests

test-long: $(VENV)/.tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "long or not long" tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/world tests/train_step \
		--outline-everything

planted-faults: $(VENV)/.tests
	$(BIN)/python -m tests.planted_faults

lint: | $(BIN)/python
	$(BIN)/python -m pip install -q "pip>=25.1"
	$(BIN)/python -m pip install -q --group lint
	$(BIN)/python -m ruff check
	$(BIN)/lint-imports --no-cache

lib: $(VENV)/.built
	$(BIN)/python csrc/compile_ops.py

wheel: $(VENV)/.torch
	$(BIN)/python -m pip install -q "pip>=25.1"
	$(BIN)/python -m pip install -q --group wheel
	rm -rf build/lib build/bdist.* build/wheel dist
	APEXFX_CUDA=0 APEXFX_STRICT=1 $(BIN)/python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude "libtorch*.so" -w dist build/wheel/apexfx-*.whl
	$(PY) -m venv build/wheel/environment
	build/wheel/environment/bin/python -m pip install -q "torch==$(TORCH)" dist/apexfx-*.whl
	build/wheel/environment/bin/python -I tests/check_wheel.py

docs:
	$(PY) -m venv build/docs
	build/docs/bin/python -m pip install -q "pip>=25.1"
	build/docs/bin/python -m pip install -q --group docs
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

bench: $(VENV)/.tests
	$(BIN)/python benchmarks/run_all.py

check-cuda: $(VENV)/.torch
	$(BIN)/python csrc/compile_ops.py check-cuda

gpu-check:
	$(PY) tests/gpu/check.py

$(BIN)/python:
	$(PY) -m venv $(VENV) || { $(PY) -m venv --without-pip $(VENV) && $(PY) -m pip --python $@ install -q pip; }

$(VENV)/.torch: | $(BIN)/python
	@echo "make: installs torch $(TORCH) in $(VENV): some 200 MB for a CPU, 3 GB with CUDA, minutes of download"
	$(BIN)/python -m pip install "setuptools>=77.0.3" wheel "torch==$(TORCH)"
	@touch $@

$(VENV)/.built: $(VENV)/.torch $(SRC)
	@echo "make: compiles the ops on all processors: half a minute on two; with nvcc and a torch of CUDA, minutes"
	$(BIN)/python setup.py -q build_ext --inplace
	@echo "make: installs apexfx and what its demo needs, scikit-learn among it: seconds beyond its download"
	APEXFX_EXT=0 $(BIN)/python -m pip install -q --no-build-isolation -e ".[demo]"
	@touch $@
	@echo "make: done. $(BIN)/python examples/first_step.py trains three steps and prints their graph; make demo takes a minute"

$(VENV)/.tests: $(VENV)/.built
	@echo "make: installs what the tests need, pytest and transformers among it: up to a minute"
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[test]"
	@touch $@

clean:
	rm -rf .venv .venv-* build dist out *.egg-info apexfx/*.so

.PHONY: all demo test test-long planted-faults lint lib wheel docs bench check-cuda gpu-check clean
