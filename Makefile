# make ask Q="..."   answer one question; offline unless REVIEW_MODEL is set
# make test          run all tests
# make check         format, lint, types, tests
# make lock          compile the lock files anew
.PHONY: ask test check lock
.SILENT:

VENV := .venv
PYTHON := $(VENV)/bin/python

ask: export override Q := $(or $(value Q),Why is CI failing on pull request 415?)
ask: export override REVIEW_MODEL := $(or $(value REVIEW_MODEL),offline)
ask: $(VENV)/ready
	$(PYTHON) graph.py "$$Q"

test: $(VENV)/ready
	$(PYTHON) -m pytest -n auto --dist loadfile

check: $(VENV)/ready-dev
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy .
	$(MAKE) test

LOCK := $(PYTHON) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --upgrade --custom-compile-command "make lock"
lock: $(VENV)/ready-dev
	$(LOCK) --output-file requirements-lock.txt requirements.in
	$(LOCK) --output-file requirements-dev-lock.txt requirements-dev.in

# A python on the PATH may be a shim that does not start, too old, or without venv: the first that really works is taken.
$(VENV)/ready: requirements-lock.txt
	for python in python3.12 python3.13 python3.11 python3 python; do \
	  if $$python -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "make: Python 3.11, 3.12 or 3.13 with venv is needed, and none is on the PATH" >&2; exit 2; fi; \
	echo "installing into $(VENV), once ..." >&2; \
	[ -x $(PYTHON) ] || $$found -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-lock.txt
	touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev-lock.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev-lock.txt
	touch $@
