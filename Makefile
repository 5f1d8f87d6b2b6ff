# make serve       serve the default model on port 8000
# make test        run the tests, but for those that are marked slow; ONLY=MARKER: of these those that have this marker too
# make test-changed
#                  run what a change since SINCE (HEAD: what is not committed) can reach, and the smoke tests
# make test-slow   run the slow tests, but for those that are marked exhaustive; make test-exhaustive runs these
# make wheel       a wheel for others, with all instruction sets, in dist/; TARGET=aarch64-linux: for another kind of
#                  machine, one of those that `python kernels/cpu/build.py --help` lists
# make wheels      wheels for all kinds of machines: x86-64 and Arm Linux, macOS
# make release     all of them, checked as what is published: metadata, licenses, changes, an install without a compiler
# make docs        the documentation as a site, in build/site; a link or an anchor that leads nowhere is an error
# make audit       look for known vulnerabilities in the oldest and newest packages that pyproject.toml allows
# make venv        only make the environment that they run in
# Variables: PYTHON=python3.12  CONFIG=configs/qwen3.yaml  ARGS="--port 9000"  TESTS=tests/engine  EXTRAS=cuda
#            VENV=.venv-other  CONSTRAINTS=versions.txt (what pip install --constraint takes)

PYTHON ?= python3
CONFIG ?= configs/smollm2.yaml
EXTRAS ?=
TESTS ?=
ONLY ?=
SINCE ?= HEAD
# Environment of the tests, but for those that compare times.
WITH ?=
# What a run of tests leaves for `python -m benchmarks.test_times`.
REPORT ?= build/tests/$@$(VENV:.venv%=%)$(if $(ONLY),-$(ONLY)).xml
ARGS ?=
CONSTRAINTS ?=

VENV := .venv
BIN := $(VENV)/bin
comma := ,
# Every set of extras has a stamp of its own: what pip was last asked to install for it.
suffix := $(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS))).stamp
serve_stamp := $(VENV)/serve$(suffix)
dev_stamp := $(VENV)/dev$(suffix)
constraint := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
# What pip would compile of packages that are never imported takes as long as it takes to unpack them all.
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --no-compile $(constraint) --editable
library := kernels/cpu/libllmjax_cpu.so

# pip and the C++ compiler side by side.
MAKEFLAGS += --jobs=2

# A process a core, each with whole files, so that fixtures and programs of a file are made once.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --max-worker-restart 2 --dist loadfile

# Every process that starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve wheel wheels release venv test test-changed test-slow test-exhaustive check docs audit bench clean python
.DELETE_ON_ERROR:

serve: $(serve_stamp) $(library)
	exec $(BIN)/python -m serve --config $(CONFIG) $(ARGS)

venv: $(dev_stamp) $(library)

# The slowest tests are told last, whether or not one failed.
run_tests = status=0; $(WITH) $(PYTEST) --junitxml=$(REPORT) $1 || status=$$?; \
	$(BIN)/python -m benchmarks.test_times $(REPORT) || true; exit $$status

# In the order of their names: files with the most tests first would leave a few long tests for the end, on one core.
test: $(dev_stamp) $(library)
	$(call run_tests,--no-loadscope-reorder -m 'not slow$(if $(ONLY), and $(ONLY))' $(TESTS) $(ARGS))

test-changed: $(dev_stamp) $(library)
	$(call run_tests,--no-loadscope-reorder -m 'not slow' --since $(SINCE) $(TESTS) $(ARGS))

test-slow: level := slow and not exhaustive
test-exhaustive: level := exhaustive
# Status 5: TESTS holds none of them.
test-slow test-exhaustive: $(dev_stamp) $(library)
	$(WITH) $(PYTEST) --junitxml=$(REPORT) -m '$(level) and not alone' $(TESTS) $(ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m '$(level) and alone' $(TESTS) $(ARGS) || test $$? -eq 5

# The files of the chat page are made again and compared by tests/web/test_built.py, where Node is.
check: $(dev_stamp)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.pages --check
	$(BIN)/python -m pytest tests/web/test_built.py

docs: $(dev_stamp)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

audit: $(dev_stamp)
	$(BIN)/pip install --disable-pip-version-check --quiet uv
	$(BIN)/python .ci/audit.py

# Zig's compiler comes as a package and brings every system's libraries, so that neither a compiler of this machine's nor a
# container of an old system is needed; the wheel is made from the archive of sources, as where there is nothing else.
TARGET ?= $(patsubst arm64,aarch64,$(shell uname -m))-$(patsubst Darwin,macos,$(patsubst Linux,linux,$(shell uname -s)))
wheel: $(dev_stamp)
	rm -rf build/wheel
	LLMJAX_KERNEL_TARGET=$(TARGET) $(BIN)/python -m build --outdir build/wheel
	$(BIN)/python .ci/check_wheel.py build/wheel/*.whl
	mkdir -p dist && mv build/wheel/* dist/

# Of which each empties build/wheel first.
wheels: $(dev_stamp)
	$(MAKE) wheel TARGET=x86_64-linux
	$(MAKE) wheel TARGET=aarch64-linux
	$(MAKE) wheel TARGET=aarch64-macos

release: $(dev_stamp)
	rm -rf dist
	$(MAKE) wheels
	$(BIN)/pip install --disable-pip-version-check --quiet twine
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/release.py dist

bench: $(serve_stamp) $(library)
	$(BIN)/llmjax bench latency --config $(CONFIG) $(ARGS)
	$(BIN)/llmjax bench throughput --config $(CONFIG) $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(serve_stamp): pyproject.toml | $(BIN)/pip
	$(PIP_INSTALL) '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch '$@'

$(dev_stamp): pyproject.toml | $(BIN)/pip
	$(PIP_INSTALL) '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	@touch '$@'

# The kernels, with no more than Python's own library: when pip gets to this package, it waits for them and takes them.
$(library): $(wildcard kernels/cpu/build.py kernels/cpu/src/* kernels/cpu/src/*/*) | python
	@$(PYTHON) kernels/cpu/build.py --optional
	@touch -c '$@'

# Debian keeps what venv needs to install pip in a package of its own (python3-venv); without it pip is fetched.
$(BIN)/pip: | python
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(BIN)/python .ci/get_pip.py; }

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmjax needs Python 3.11 or later: make PYTHON=…")'
