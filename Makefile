# `make quickstart` trains a first model; `make test` runs the tests. Both make .venv when it is
# missing. They need python3 (3.11 or newer), make and git; a compiler is used where there is one.

VENV ?= .venv
PYTHON ?= python3
PYTEST ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
# The site needs no torch: it has a small environment of its own.
SITE_VENV ?= .venv-site
INSTALLED_SITE := $(SITE_VENV)/.installed

.PHONY: quickstart test test-all lint format docs site install clean help

help:
	@echo "make quickstart   train a small model on the Python standard library's source"
	@echo "make test         run the tests; PYTEST='-k shards -x' passes arguments on"
	@echo "make test-all     the same with the long tier: more compilation, every layout"
	@echo "make lint         ruff, format check and mypy"
	@echo "make format       let ruff rewrite what it can"
	@echo "make docs         write the reference pages from the schema and the help texts"
	@echo "make site         build the site from docs/ into build/site; warnings are errors"

quickstart: $(INSTALLED)
	$(BIN)/pentameter train quickstart

# Two workers take files in the order of tests/conftest.py, the long ones first.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "" $(PYTEST)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python -c "from pathlib import Path; from pentameter.config.write import reference_page; \
	Path('docs/configuration.md').write_text(reference_page(), encoding='utf-8')"
	COLUMNS=128 $(BIN)/python -c "from pathlib import Path; \
	from pentameter.cli.commands_page import commands_page; \
	Path('docs/commands.md').write_text(commands_page(), encoding='utf-8')"

site: $(INSTALLED_SITE)
	$(SITE_VENV)/bin/zensical build --strict --clean

install: $(INSTALLED)

# A stamp younger than these files says that everything in them is installed: the second call of
# a target starts at once. The stamp is written last, so a broken installation is tried again.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,dev]"
	@touch $@

$(INSTALLED_SITE): pyproject.toml  # any pip: `--group` is younger than that of Python 3.11
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -c "import tomllib; groups = tomllib.load(open('pyproject.toml', 'rb')); \
	print(*groups['dependency-groups']['docs'], sep='\n')" > $(SITE_VENV)/requirements.txt
	$(SITE_VENV)/bin/python -m pip install --quiet -r $(SITE_VENV)/requirements.txt
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "pentameter needs Python 3.11 or newer, and '$(PYTHON)' is not on the PATH." >&2; \
	  echo "Install it, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pentameter needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: install the venv module (Debian, Ubuntu: python3-venv)." >&2; \
	  exit 1; }
	@echo "Installing pentameter and what it needs into $(VENV) (PyTorch is large; once only) ..."

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
