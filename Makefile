# `make demo` and `make test` are all that a fresh clone needs: Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin

# Threads that spin while they wait make everything several times slower on a machine that is busy.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test compile-all measure peers lint laws docs docs-serve docs-check clean

demo: .venv/installed
	$(BIN)/evictionary demo --output report.html

test: lint .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --profile quick \
		spec_tests --impl optimized.kernels --dtype float32,float16

# Every kernel in every configuration for four GPUs, without one: minutes.
compile-all: .venv/installed
	$(BIN)/python -m evictionary.optimized.kernels.compiling --every

# The laws measured: every planted mistake against every law, every correct variant over 200 seeds. It takes long.
measure: .venv/installed
	$(BIN)/python -m spec_tests.harness.matrix
	$(BIN)/python -m spec_tests.harness.matrix --controls 200

# The kept tokens beside those of kvpress, which gets an environment of its own: an optional check.
peers: .venv/installed
	$(BIN)/python -m benchmarks.peers

# The laws alone, for one implementation: make laws IMPL=my_kernels
IMPL ?= reference
laws: .venv/installed
	$(BIN)/python -m pytest spec_tests --impl $(IMPL)

# The site, strictly: build/site/index.html opens from the folder. docs-check looks at every page in a real browser, Debian's chromium.
docs: .venv/installed
	$(BIN)/python -m mkdocs build --strict

docs-serve: .venv/installed
	$(BIN)/python -m mkdocs serve

docs-check: docs
	$(BIN)/python tests/site_browser.py build/site

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy reads the folders under the names by which they are imported.
	mkdir -p build/typed/evictionary
	ln -sfn $(CURDIR)/reference $(CURDIR)/optimized $(CURDIR)/spec_tests $(CURDIR)/evictionary/* build/typed/evictionary/
	cd build/typed && ../../$(BIN)/mypy -p evictionary --config-file ../../pyproject.toml

# Installed once; again only after a change of what is to be installed.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
