# Lachesis: `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3.11
REQUIREMENTS ?= requirements/cpu.txt
BIN := .venv/bin
PACKAGES := actors bench configs deploy learner transport
export HF_HUB_OFFLINE := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup demo test lint format clean

setup: .venv/.complete

.venv/.complete: $(REQUIREMENTS) setup.cfg
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) was not found; install Python 3.11 or name one with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps -r $(REQUIREMENTS) || { echo "setup: an install failed (above). If pip found no torch==2.13.0+cpu, add PyTorch's own CPU wheel index with pip's environment variable PIP_EXTRA_INDEX_URL and try again." >&2; exit 1; }
	rm -rf .venv/wheel && $(BIN)/python -W ignore -c "import setuptools; setuptools.setup()" --quiet editable_wheel --dist-dir .venv/wheel
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --force-reinstall .venv/wheel/*.whl
	rm -rf .venv/packages && mkdir .venv/packages && for p in $(PACKAGES); do ln -s ../../$$p .venv/packages/lachesis_$$p; done && ln -s ../../lachesis.py .venv/packages/
	touch $@

demo: setup
	$(BIN)/lachesis launch configs/demo.yaml

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -m lachesis $(foreach p,$(PACKAGES),-p lachesis_$(p))

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint
	$(BIN)/python -m pytest -m "not slow"
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
