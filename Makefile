# `make demo` and `make test` are all that a fresh clone needs: Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin

# Threads that spin while they wait make everything several times slower on a machine that is busy.
export OMP_WAIT_POLICY ?= PASSIVE

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/tested.txt
# One thread for each of as many processes as there are cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) --profile quick

.PHONY: help demo test test-all whole slow mutants oracle wheel-check latest oldest new-method kernels compiled compiled-all arrays compile-all measure goldens peers wild lint typed laws pages wheel docs docs-serve docs-check docs-builders clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s%s\n", $$1, $$2 }' Makefile

demo: .venv/installed  ## what each method keeps of a text that hides a number; writes report.html
	$(BIN)/evictionary demo --depths 0.1,0.5,0.9 --ratios 0.5,0.75 --output report.html

# It needs no browser, no model and no GPU; docs/testing.md says what runs where.
test: lint .venv/installed  ## the laws and the tests of the machinery, in minutes
	$(PYTEST) spec_tests tests --profile student
	$(INTERPRETED) spec_tests/keydiff/test_keydiff.py spec_tests/shared/test_selection.py --impl optimized --dtype float16

# And what is slow, each part by itself too; docs/testing.md says what the parts are and how long they take.
test-all: test whole typed mutants oracle wheel-check new-method kernels slow  ## test, whole, typed, mutants, oracle, wheel-check, new-method, kernels and slow

# Whole commands, each in a process of its own: judges, classes, attacks on the grader.
whole: .venv/installed  ## whole commands: judges, classes, attacks on the grader
	$(PYTEST) -m "whole and not slow and not browser and not compiled"

slow: .venv/installed  ## what takes long: every slow test, the memory of the kernels, float32
	$(PYTEST) -m "slow and not browser and not compiled and not arrays" -k "not every_mutant"
	$(PYTEST) --profile thorough spec_tests/shared/test_selection.py spec_tests/shared/test_cache.py --impl reference --impl optimized
	$(INTERPRETED) spec_tests --impl optimized --dtype float32
	$(INTERPRETED) $(MATHEMATICS) --impl evictionary.optimized.teaching --strict
	$(INTERPRETED) spec_tests/memory --impl optimized --dtype float16

mutants: .venv/installed  ## every planted mistake against its laws
	$(PYTEST) -m slow tests/judge/test_mutants.py -k every_mutant

# Every mistake made in the implementation and in the reference at once; one that no law sees fails. ORACLE="--only keydiff.score"
oracle: .venv/installed  ## every planted mistake, made in the reference too
	OMP_NUM_THREADS=1 $(BIN)/python -m evictionary.spec_tests.proof.oracle $(ORACLE)

# The wheel in environments of its own, in an empty folder and inside another project.
wheel-check: .venv/installed  ## the wheel in environments of its own
	$(BIN)/python tests/wheel.py

# The newest release of every dependency, with no pinned version, and the oldest that pyproject.toml allows, each in an environment of
# its own (build/newest, build/oldest). ENDS="--pin transformers==5.19.0 --only cache"
latest: .venv/installed  ## the newest release of every dependency, tried
	$(BIN)/python tests/ends.py newest $(ENDS)

oldest: .venv/installed  ## the oldest releases that pyproject.toml allows, tried
	$(BIN)/python tests/ends.py oldest $(ENDS)

new-method: .venv/installed  ## the recipe for a new method, in a copy of the tree
	$(BIN)/python tests/new_method.py

# Mathematics at each push. The laws of memory, which call everything many times, float32, and the kernels to read are judged at
# night, in `make slow`; tests/kernels/test_graphs.py calls each kernel to read at each push.
MATHEMATICS := $(filter-out spec_tests/memory/test_memory.py,$(wildcard spec_tests/*/test_*.py))

kernels: .venv/installed  ## the mathematics of the kernels in Triton's interpreter
	$(INTERPRETED) $(MATHEMATICS) --impl optimized --dtype float16
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/test_kernels.py tests/kernels/test_graphs.py

# The kernels as Triton compiles them, executed on a CPU (docs/compiled.md): wrong kernels, then a fixed list of launches.
# bfloat16, because the interpreter has none. `make compiled-all` asks every law in three dtypes, and of the kernels to read: 80 minutes.
COMPILED := PYTHONPATH=$(CURDIR)/build/compiled $(PYTEST)
EXECUTED := $(COMPILED) --profile quick --device compiled
TUNED := --impl optimized --dtype float32,float16,bfloat16
TO_READ := --impl evictionary.optimized.teaching --dtype float32
# The kernels that only long rows and long prompts reach.
LONG := -k "a_long_row_keeps_its_best or scores_all_of_a_long_prompt"
compiled: build/compiled  ## compiled kernels, executed on a CPU: wrong ones, and their memory
	$(COMPILED) -m "compiled and not slow" tests/compiled tests/classroom/test_verify_reach.py
	$(EXECUTED) spec_tests/memory -k compiled_code --impl optimized --dtype bfloat16
	$(EXECUTED) spec_tests/shared/test_selection.py spec_tests/tova $(LONG) --impl optimized --dtype float32

compiled-all: build/compiled  ## every law of the compiled kernels
	$(COMPILED) -m compiled tests/compiled
	$(EXECUTED) spec_tests $(TUNED)
	$(EXECUTED) spec_tests $(TO_READ)

build/compiled: requirements/compiled.txt | .venv/installed
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --require-hashes --target $@ -r requirements/compiled.txt
	touch $@

# KeyDiff in JAX and in MLX, judged (docs/reference/plug_in.md). hypothesis reads the source of what is not in a site-packages.
arrays: build/arrays  ## KeyDiff in JAX and in MLX, judged
	PYTHONPATH=$(CURDIR)/build/arrays/site-packages $(PYTEST) -m arrays tests/arrays

build/arrays: requirements/arrays.txt | .venv/installed
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target $@/site-packages -r requirements/arrays.txt
	touch $@

# Every kernel in every configuration for four GPUs, without one: minutes. The older Triton is common on machines with GPUs; it is
# unpacked beside the installed one, and its kernels must keep the same rules. The figures go to the table of docs/kernels.md.
OLDER_TRITON := 3.6.0
COMPILE := $(BIN)/python -m evictionary.optimized.kernels.compiling --store docs/kernels.json
compile-all: .venv/installed build/triton-$(OLDER_TRITON)  ## every configuration of every kernel, compiled for each target
	$(COMPILE) --every
	PYTHONPATH=build/triton-$(OLDER_TRITON) $(COMPILE) --target sm_90

build/triton-$(OLDER_TRITON): | .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(OLDER_TRITON)

# The laws measured: every planted mistake against every law, every correct variant over 200 seeds. It takes long.
measure: .venv/installed  ## every mistake and every right variant against the laws again: hours
	$(BIN)/python -m evictionary.spec_tests.proof.matrix
	$(BIN)/python -m evictionary.spec_tests.proof.matrix --controls 200

# Laws, mistakes, right variants, verdicts and files of the wheel, beside those stored before a rewriting.
goldens: .venv/installed  ## what a refactoring must not change, compared
	$(BIN)/python -m tests.goldens

# The pages that are made from the code and the stored measurements; a test says when one of them is out of date.
pages: .venv/installed  ## write the pages that are made from stored results
	$(BIN)/python -m docs_build.figures
	$(BIN)/python -m docs_build.study

# The kept tokens beside those of kvpress, which gets an environment of its own: an optional check.
peers: .venv/installed  ## the kept tokens beside those of kvpress
	$(BIN)/python -m benchmarks.peers

# Public implementations, brought from their public places and judged, and the page of what was found; WILD="--only tova".
wild: .venv/installed  ## public implementations, fetched and judged
	$(BIN)/python -m conformance.wild $(WILD)

# The laws alone, for one implementation: make laws IMPL=my_kernels
IMPL ?= reference
laws: .venv/installed  ## the laws alone: make laws IMPL=my_kernels
	$(BIN)/python -m pytest spec_tests --impl $(IMPL)

wheel: .venv/installed  ## the wheel, in build/wheel
	rm -rf build/lib  # files that are gone from the tree would stay in the wheel
	$(BIN)/python -m build --wheel --outdir build/wheel .

# The site, strictly: build/site/index.html opens from the folder.
docs: .venv/installed  ## the site, strictly, with every lesson run; its search is asked what readers ask
	$(BIN)/python -m docs_build.written
	$(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m docs_build.finished build/site
	$(BIN)/python -m tests.site.site_search build/site

docs-serve: .venv/installed  ## the site while you write it
	$(BIN)/python -m docs_build.written
	$(BIN)/python -m mkdocs serve

# The builders beside MkDocs are in no extra: `pip install properdocs zensical`. Each that is installed has to make the same pages.
docs-builders: .venv/installed  ## the site by each builder that is installed
	$(BIN)/python -m tests.site.site_builders

# Every page and every figure in a real browser, and how long the pages are.
docs-check:  ## every page and figure in a browser
	@command -v chromium > /dev/null || { echo 'docs-check needs a browser: `apt-get install chromium`, or another way to a `chromium` on the PATH'; exit 1; }
	$(MAKE) docs
	$(PYTEST) -m browser
	$(BIN)/python -m tests.site.site_browser build/site
	$(BIN)/python -m tests.site.site_length build/site

lint: .venv/installed  ## ruff and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

typed: .venv/installed  ## mypy
	$(BIN)/python -m mypy -p evictionary

# Installed once; again only after a change of what is to be installed.
.venv/installed: pyproject.toml requirements/tested.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Evictionary needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv --clear .venv
	@echo "installing what requirements/tested.txt names: minutes at the first time"
	rm -rf evictionary.egg-info  # which a built wheel leaves: the ranges of an earlier pyproject.toml would be read there
	@$(PIP) torch && $(PIP) --editable '.[dev]' || { echo 'the installation failed: it needs a package index that pip reaches, now or from its cache; $(subst --quiet ,,$(PIP)) --editable ".[dev]" says more'; exit 1; }
	touch $@

clean:  ## remove everything that was built
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
