# make check | test | test-all | ...: each target does all of its own set-up in .venv.
#   check      lint, types and the quick tests that need no host, in less than 90 seconds: before each commit
#   golden     renew tests/golden/messages from the tests that need no host; ARGS=... of others; read it in the diff
#   test       these, each promise of the README and each way to a host, on real hosts, in 10 minutes: before each merge
#   test-all   every test: before a release
#   stress     `make test`, ROUNDS times, beside eight busy processes: a test that fails by chance fails here
#   durations  `make test-all`, and its measured durations into CONTRIBUTING.md
#   coverage   which part of distmagic/ `make test` and `make test-all` execute
#   demo       the quickstart, headless; installs only what notebooks need
#   bench      what it costs, against other tools
#   lint       ruff, mypy, the manual's language, and the subjects of commits
#   chaos      pairs of faults, ROUNDS of them from SEED on: a line a round, and those that failed in the end
#   sky        SkyPilot's own program launches clusters on the lab's Slurm: exported tasks, and cells that say --on sky
#   docs       the site, in build/docs/html: manual, course, API and search; a warning is an error
#   picture    the README's picture, of a real run in a real JupyterLab, in assets/
#   screenshots  that and a picture of each scene of the view, light and dark, wide and narrow, in build/screenshots
#
#   PYTHON=python3.12   the Python (3.10 or later) that .venv is made with
#   JOBS=1              tests at the same time (0: in pytest's own process); if not said 3, of check 4
#   NO_APT=1            never install a system package, only say what is missing
#   CI=true             a missing system package is a failure, not a skip
#   ARGS="-k ssh"       more arguments for pytest
#   ONLY=start,load     sections of the bench; all if not said
#   SEED=1 ROUNDS=300   of chaos, where the same seed is the same pair; ROUNDS of stress, too
#   SKY_PYTHON=P        the Python 3.10 that SkyPilot's nodes want
#   README=1            put the bench's table into distmagic/help/benchmarks.md, four of its rows into README.md

PYTHON ?= python3
# The version that the tests are made for. A plain request, so that pip takes the build that its configuration prefers.
TORCH ?= torch==2.13.0
JOBS ?= 3
ARGS ?=
ONLY ?=
README ?=
SEED ?= 1
SKY_PYTHON ?= python3.10
ROUNDS ?=

venv := .venv
bin := $(abspath $(venv))/bin
install := -m pip --quiet --quiet --disable-pip-version-check --no-input install --no-compile
export PATH := $(bin):$(PATH)
# Tests start hundreds of Pythons. Where byte code is not kept, each of them compiles the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help check golden test test-all stress durations coverage chaos sky demo docs bench picture screenshots lint clean setup
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(venv)/.ready

# What the demonstration needs comes first and by itself. Byte code is made where a file is first imported: pip would make it
# of each of 17,000 files, which takes longer than the rest of the set-up.
$(venv)/.notebooks: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "distmagic needs Python 3.10 or later; this is " + sys.version.split()[0] + ". Say which with: make PYTHON=python3.11")'
	@sh .ci/make-venv $(PYTHON) $(venv)
	@echo "installing $(TORCH) into $(venv): the largest part, some minutes where it isn't cached"
	@$(bin)/python $(install) '$(TORCH)'
	@echo "installing distmagic and what its notebooks need into $(venv)"
	@$(bin)/python $(install) '$(TORCH)' --editable '.[notebooks]'
	@touch $@

$(venv)/.ready: $(venv)/.notebooks
	@echo "installing what the tests need into $(venv)"
	@$(bin)/python $(install) '$(TORCH)' --editable '.[dev]'
	@touch $@

pytest = $(bin)/python -m pytest --numprocesses=$(JOBS) --dist=loadgroup
quick := --hypothesis-profile=quick -m quick

test: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(pytest) $(quick) $(ARGS)

test-all: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(pytest) $(ARGS)

stress: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(bin)/python -m tests.tiers.stress $(or $(ROUNDS),5) $(pytest) $(quick) $(ARGS)

durations: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(pytest) --junitxml=build/durations.xml $(ARGS)
	@$(bin)/python -m tests.tiers.durations build/durations.xml

# Of the processes of pytest alone: what runs on hosts is not measured.
coverage: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(pytest) --quiet --quiet --cov=distmagic --cov-report=term $(quick) | grep '^TOTAL\|passed\|failed'
	@$(pytest) --quiet --quiet --cov=distmagic --cov-report=term | grep '^TOTAL\|passed\|failed'

check: JOBS := 4
check: lint
	@$(pytest) --hypothesis-profile=quick -p no:logging -m 'not needs and not slow' tests/unit tests/transports $(ARGS)

golden: JOBS := 6
golden: $(venv)/.ready
	@$(bin)/python -m pytest --numprocesses=$(JOBS) --dist=worksteal -p no:logging --renew-golden $(or $(ARGS),-m 'not needs' tests/unit tests/transports)

chaos: $(venv)/.ready
	@$(bin)/python -m tests.system
	@DISTMAGIC_CHAOS_SEED=$(SEED) DISTMAGIC_CHAOS_ROUNDS=$(or $(ROUNDS),100) $(bin)/python -m pytest --quiet --numprocesses=0 --tb=short tests/e2e/test_pairs.py -k promises $(ARGS)

sky: $(venv)/.ready build/sky/.ready
	@$(bin)/python -m tests.system sky
	@$(bin)/python -m tests.sky

build/sky/.ready: pyproject.toml | $(venv)/.ready
	@$(bin)/python -m tests.sky.packages $(SKY_PYTHON)
	@touch $@

demo: $(venv)/.notebooks
	@mkdir -p build
	@echo "running notebooks/00_quickstart.ipynb: two throw-away SSH hosts, two ranks each"
	@# The kernel's own log at ERROR: newer ones warn at each start that nbconvert talks to them over plain TCP.
	@CUDA_VISIBLE_DEVICES= $(bin)/jupyter nbconvert --log-level=WARN --ExecutePreprocessor.extra_arguments=--IPKernelApp.log_level=ERROR --to notebook --execute --output-dir build notebooks/00_quickstart.ipynb
	@$(bin)/python notebooks/summary.py build/00_quickstart.ipynb

docs: $(venv)/.ready build/docs/venv/.ready
	@$(docs) docs/prepare.py build/docs/pages
	@$(docs) -m sphinx --quiet --fail-on-warning --keep-going --builder html --conf-dir docs build/docs/pages build/docs/html
	@echo "the site: $(abspath build/docs/html)/index.html"

docs := PYTHONPATH=. build/docs/venv/bin/python

# Sphinx and its theme; torch, IPython and all that the API imports come from $(venv).
build/docs/venv/.ready: pyproject.toml | $(venv)/.ready
	@sh .ci/make-venv $(bin)/python build/docs/venv
	@$(bin)/python -c 'import site; print(site.getsitepackages()[0])' > build/docs/venv/main.pth
	@build/docs/venv/bin/python $(install) $$(PYTHONPATH=. $(bin)/python docs/prepare.py requirements)
	@mv build/docs/venv/main.pth $$(build/docs/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
	@touch $@

bench: $(venv)/.ready
	@$(bin)/python -m tests.system
	@$(bin)/python -m tests.bench $(if $(ONLY),--only $(ONLY)) $(if $(README),--readme)

picture: $(venv)/.ready
	@$(bin)/python -m tests.browser.picture

screenshots: picture
	@$(bin)/python -m tests.browser.screenshots

lint: $(venv)/.ready
	@$(bin)/ruff check
	@$(bin)/ruff format --check
	@$(bin)/mypy
	@$(bin)/python -m tests.prose
	@sh .ci/subjects

clean:
	rm -rf $(venv) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find distmagic notebooks tests -name __pycache__ -type d -prune -exec rm -rf {} +
