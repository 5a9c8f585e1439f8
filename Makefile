# Every target installs what it needs into .venv with pip. It needs Python 3.11 or newer and make.
# Another interpreter: make demo PYTHON=/path/to/python3.12

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
DEMO := samples/out/agreement.pdf samples/out/scan.pdf

.DEFAULT_GOAL := help
.PHONY: help demo up test check format chaos corpus bench settings clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(DEMO) ## Ingest two sample documents; start and stop everything that this needs
	$(BIN)/rag-service run $(DEMO)

up: $(VENV)/runtime ## Start the whole service: API, workers, Flower, servers
	$(BIN)/rag-service up

test: $(VENV)/dev ## Run the unit, integration and acceptance tests
	$(BIN)/pytest -n 4 --dist loadfile tests/unit tests/integration tests/acceptance

check: $(VENV)/dev ## Check style, types and the imports between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev ## Format the code as `make check` expects it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: $(VENV)/dev ## Run the tests that kill processes and stop servers (long)
	$(BIN)/pytest tests/chaos -s --timeout=1800

corpus: $(VENV)/dev ## Run real files through the pipeline and print what was right and wrong (long)
	$(BIN)/pytest tests/corpus -s --timeout=7200

bench: $(VENV)/dev ## Measure every figure of the docs (long)
	set -e; for file in $(wildcard benchmarks/[a-z]*.py); do \
		$(BIN)/python -m "benchmarks.$$(basename "$$file" .py)"; done

settings: $(VENV)/runtime ## Write docs/settings.md
	$(BIN)/rag-service settings > docs/settings.md

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) samples/out build dist *.egg-info

# One run of the script writes both files, so the second depends on the first.
samples/out/agreement.pdf: samples/make_samples.py samples/texts.py $(VENV)/runtime
	$(BIN)/python -m samples.make_samples samples/out
samples/out/scan.pdf: samples/out/agreement.pdf ;

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed (Debian: python3-venv);" \
		"name it with PYTHON=..."; exit 1; }
	"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/runtime
