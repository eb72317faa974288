PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test lint clean

demo: $(VENV)/run.stamp
	$(BIN)/python tools/demo.py --out out/demo

test: $(VENV)/test.stamp lint
	$(BIN)/pytest

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

$(VENV)/run.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(INSTALL) '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* out build dist
