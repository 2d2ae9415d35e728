# A newcomer's commands: `make demo` and `make test`. Each sets up what it needs in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1

.PHONY: demo test check protos clean

demo: $(VENV)/.demo
	$(BIN)/meshserve demo

test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy runtime sharding kernels deploy benchmarks
	cd protos && ../$(BIN)/buf lint
	$(BIN)/pytest -q tests/test_layout.py tests/test_protos.py

# Writes protos/*_pb2*; commit the result. `make check` fails if it was forgotten.
protos: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src \
	    meshserve/protos/inference.proto

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist
