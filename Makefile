# `make train` trains a small vision + audio + text model on 4 ranks; `make test` runs all tests. Both install once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: venv train test ablate lint types clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

train ablate: export OMP_NUM_THREADS ?= 1

train: venv
	$(BIN)/torchrun --nproc-per-node 4 examples/train_omni.py --ranks-per-node 2 $(ARGS)

ablate: venv
	$(BIN)/torchrun --nproc-per-node 2 examples/ablate.py $(ARGS)

# Two at a time; files whose tests start ranks are not divided (tests/conftest.py).
test: venv
	$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked against the built wheel: an editable install hides orch.comm from mypy.
types: venv
	rm -rf build/types && mkdir -p build/types
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/types .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/types/site build/types/*.whl
	cd build/types && MYPYPATH=site ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p orch

clean:
	rm -rf $(VENV) build *.egg-info
