# `make quickstart` trains a first model; `make test` runs the tests. Both make .venv when it is
# missing. They need python3 (3.11 to 3.14), make (GNU's, 3.81 or newer) and git; a compiler is used
# where there is one.

VENV ?= .venv
PYTHON ?= python3
PYTEST ?=
ARGS ?=
# Where pip looks for PyTorch besides: `make TORCH_INDEX=URL`; with `TORCH_INDEX=` nowhere. PyPI's
# torch for ARM Linux brings gigabytes of CUDA along, so where no NVIDIA GPU is, its makers' builds
# for CPUs are preferred, unless pip was told where to look. Elsewhere it is the user's choice.
ifeq ($(shell uname -sm)$(wildcard /dev/nvidia* /dev/nvhost*),Linux aarch64)
CPU_INDEX := https://download.pytorch.org/whl/cpu
endif

BIN := $(VENV)/bin
INSTALLED_RUN := $(VENV)/.installed-run
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
# The site and a release need no torch: each has a small environment of its own.
SITE_VENV ?= .venv-site
INSTALLED_SITE := $(SITE_VENV)/.installed
RELEASE_VENV ?= .venv-release
INSTALLED_RELEASE := $(RELEASE_VENV)/.installed

.PHONY: quickstart test test-more test-all trials trials-nodes lint format docs site release-check install clean help

help:
	@echo "make quickstart   train a small model on the Python standard library's source;"
	@echo "                  ARGS='--train.steps 50' passes arguments on"
	@echo "make test         run the tests; PYTEST='-k shards -x' passes arguments on"
	@echo "make test-more    the tests that CI runs beside them"
	@echo "make test-all     all tests, the long tier too: more compilation, every layout"
	@echo "make trials       strike whole runs with one fault of each class; ARGS='--full' with all"
	@echo "make trials-nodes the same on four nodes, in network namespaces; ARGS='--trials 50'"
	@echo "make lint         ruff, format check and mypy"
	@echo "make format       let ruff rewrite what it can"
	@echo "make docs         write the reference pages from the schema and the help texts"
	@echo "make site         build the site from docs/ into build/site; warnings are errors"
	@echo "make release-check  take the steps of a release on this machine; nothing leaves it"

quickstart: $(INSTALLED_RUN)
	$(BIN)/pentameter train quickstart $(ARGS)

# Two workers take files in the order of tests/conftest.py, the long ones first.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

# What CI runs beside them; no test of this tier among those asked for is no failure.
test-more: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "more and not slow" $(PYTEST) \
	|| [ $$? -eq 5 ]

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "" $(PYTEST)

trials: $(INSTALLED)
	$(BIN)/python -m trials.faults $(or $(ARGS),--trials 1)

trials-nodes: $(INSTALLED)
	$(BIN)/python -m trials.nodes $(ARGS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	COLUMNS=128 $(BIN)/python tests/kit/reference_pages.py

site: $(INSTALLED_SITE)
	$(SITE_VENV)/bin/zensical build --strict --clean

# The version and its section in CHANGELOG.md, wheel, sdist and image, tried; commit, tag and push.
release-check: $(INSTALLED_RELEASE)
	PATH="$(abspath $(RELEASE_VENV)/bin):$$PATH" python .ci/release_check.py

install: $(INSTALLED)

comma := ,
define install
@index="$(TORCH_INDEX)"; \
if [ "$(origin TORCH_INDEX)" = undefined ] && [ -n "$(CPU_INDEX)" ] && \
  ! $(BIN)/python -m pip config list | grep -q -e index -e find-links; then \
  index="$(CPU_INDEX)"; \
fi; \
set -x; $(BIN)/python -m pip install --quiet -c constraints.txt \
  $${index:+--extra-index-url "$$index"} -e ".[$(1)]"
endef

# A stamp younger than these files says that everything in them is installed: the second call of
# a target starts at once. The stamp is written last, so a broken installation is tried again.
# What trains, writes and serves needs few packages, and no test's package may stop a first run.
$(INSTALLED_RUN): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,serve)
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,test)
	@touch $@ $(INSTALLED_RUN)

$(INSTALLED_DEV): pyproject.toml constraints.txt $(INSTALLED)
	$(call install,test$(comma)dev)
	@touch $@

# $(call install_group,NAME,FOLDER): any pip, as `--group` is younger than that of Python 3.11.
define install_group
$(PYTHON) -m venv $(2)
$(2)/bin/python -c "import tomllib; groups = tomllib.load(open('pyproject.toml', 'rb')); \
print(*groups['dependency-groups']['$(1)'], sep='\n')" > $(2)/requirements.txt
$(2)/bin/python -m pip install --quiet -r $(2)/requirements.txt
endef

$(INSTALLED_SITE): pyproject.toml
	$(call install_group,docs,$(SITE_VENV))
	@touch $@

$(INSTALLED_RELEASE): pyproject.toml
	$(call install_group,release,$(RELEASE_VENV))
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "pentameter needs Python 3.11 to 3.14, and '$(PYTHON)' is not on the PATH." >&2; \
	  echo "Install it, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) .ci/python_for_torch.py
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: install the venv module (Debian, Ubuntu: python3-venv)." >&2; \
	  exit 1; }
	@echo "Installing pentameter and what it needs into $(VENV) (PyTorch is large; once only) ..."

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
