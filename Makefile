# Every target sets up .venv in this checkout by itself: minutes the first time, nothing the next.
# Needs Python 3.11 or later and make. To choose the interpreter: make PYTHON=/path/to/python3.11 demo

CLUSTER ?= deployments/laptop.yaml
WORKERS ?= 2
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)
RUN := .venv/bin/python
READY := .venv/.ready
# A checkout that was moved or copied has an environment that points elsewhere.
MOVED := $(shell [ "$$(cat $(READY) 2>/dev/null)" = "$(CURDIR)" ] || echo moved)

.PHONY: demo test test-long bench up down lint moved

demo: $(READY)
	@$(RUN) -m flows.demo

test: $(READY)
	@$(RUN) -m pytest -n $(WORKERS) --dist loadgroup

test-long: $(READY)
	@$(RUN) -m pytest -n $(WORKERS) --dist loadgroup -m long

bench: $(READY)
	@$(RUN) -m pytest -m benchmark -s

up: $(READY)
	@$(RUN) -m flows.cli up --cluster "$(CLUSTER)"

down: $(READY)
	@$(RUN) -m flows.cli down --cluster "$(CLUSTER)"

lint: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

$(READY): pyproject.toml constraints.txt $(MOVED)
	@[ -n "$(PYTHON)" ] || { echo "Slotwise needs Python 3.11 or later, and python3 is \
	$$(python3 --version 2>&1); install one, or say where it is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Slotwise needs Python 3.11 \
	or later; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@echo "setting up .venv (2 GB, a few minutes) ..."
	@"$(PYTHON)" -m venv .venv
	@$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test,s3test,lint]'
	@echo "$(CURDIR)" > $(READY)
