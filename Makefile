# `make demo` and `make test` are the two commands; each builds what it needs into .venv once. `make docs` builds docs/.

.DELETE_ON_ERROR:
.PHONY: demo test lint types docs clean FORCE
.DEFAULT_GOAL := demo

# Interpreters in order of preference; PYTHON=/path/to/python goes first.
CANDIDATES = $(PYTHON) python3.12 python3.13 python3.14 python3 \
	$(sort $(wildcard $(HOME)/.pyenv/versions/*/bin/python3))

# Being on the PATH is not enough: a shim may not run, and venv is a separate package on some systems.
USABLE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

VENV_PYTHON := .venv/bin/python
INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

# A .venv that was copied or moved here, or whose interpreter is gone, still points elsewhere: make it anew.
ifneq ($(shell $(VENV_PYTHON) -c '' 2>/dev/null && cat .venv/home 2>/dev/null),$(CURDIR))
.venv/home: FORCE
endif

demo: .venv/installed-demo
	.venv/bin/jaxcoll demo

test: .venv/installed-test
	$(VENV_PYTHON) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

lint: .venv/installed-test
	.venv/bin/ruff check .

types: .venv/installed-test
	.venv/bin/pyright --pythonpath $(VENV_PYTHON)

docs: .venv/installed-test
	.venv/bin/mkdocs build --strict --quiet --site-dir build/docs

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis

.venv/home:
	@rm -rf .venv; \
	for python in $(CANDIDATES); do \
		if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			echo "Creating .venv with $$("$$python" -V) ($$python)"; \
			"$$python" -m venv .venv || exit 1; \
			pwd -P >.venv/home; \
			exit 0; \
		fi; \
	done; \
	echo "No Python >= 3.12 with the venv module runs here: install one (for example the packages python3.12" \
		"and python3.12-venv), or name one with 'make PYTHON=/path/to/python3'." >&2; \
	exit 2

.venv/installed-demo: .venv/home pyproject.toml
	@echo "Installing jaxcoll into .venv (a minute or two, only this once)"
	@$(INSTALL) --editable .
	@touch $@

.venv/installed-test: .venv/home pyproject.toml
	@echo "Installing jaxcoll with its test tools into .venv (some minutes, only this once)"
	@$(INSTALL) --editable '.[dev,aot]'
	@touch $@ .venv/installed-demo

FORCE:
