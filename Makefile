# Every target sets itself up: it needs Python 3.10 or newer and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# dev,peers: also the tools that some tests compare with, or else skip
EXTRAS ?= dev

.PHONY: eval test check install dev clean

eval: install  ## measure the embedded student and its teacher on two processes
	$(BIN)/tune run --nproc_per_node 2 ppl_eval --config tiny_teacher_ppl_eval
	$(BIN)/tune run --nproc_per_node 2 ppl_eval --config tiny_ppl_eval
	@echo
	@$(BIN)/ppl-eval compare out/tiny_teacher_ppl_eval out/tiny_ppl_eval

test: dev  ## all tests
	$(BIN)/python -m pytest

check: dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

install: $(VENV)/.installed
dev: $(VENV)/.installed-$(EXTRAS)

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-$(EXTRAS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) out build dist
