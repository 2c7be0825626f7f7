# make serve | test | check | bench | clean: each sets up what it needs in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# MLX's back end: built in on macOS; on Linux CUDA where there is an NVIDIA driver, else the CPU.
# Override with `make BACKEND=cpu ...`.
ifeq ($(shell uname -s),Darwin)
BACKEND ?=
else
BACKEND ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
endif
comma  := ,
EXTRA   = $(if $(BACKEND),$(BACKEND)$(comma))

ARGS ?=

.PHONY: serve test check format bench demo clean

serve: $(VENV)/.serve  ## the built-in demo model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	exec $(BIN)/python -m mlxsrv $(ARGS)

test: check  ## lint, types, then every test (ARGS="-k stream")
	$(BIN)/python -m pytest -q $(ARGS)

check: $(VENV)/.test  ## ruff, format, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench  ## the hot paths, then every ratio against mlx_lm.server (ARGS=--quick for a look)
	$(BIN)/python -m benchmarks.sse
	$(BIN)/python -m benchmarks.text
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.ratios $(ARGS)

# MLX's CPU wheel for Linux multiplies with the reference BLAS, ten times slower than OpenBLAS.
OPENBLAS = $(if $(filter cpu,$(BACKEND)),$(shell ldconfig -p | grep -o 'libopenblas\.so\.0' | head -1))

demo: $(VENV)/.serve  ## train the built-in demo model anew: a quarter of an hour on two cores
	@test '$(BACKEND)' != cpu || test -n '$(OPENBLAS)' || \
	  { echo 'make demo: install OpenBLAS first (Debian: apt install libopenblas0-pthread)'; exit 1; }
	$(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS) OPENBLAS_NUM_THREADS=1) $(BIN)/python -m mlxsrv.models.demo.train $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxsrv needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.$(if $(BACKEND),[$(BACKEND)])'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[$(EXTRA)test]'
	touch $@ $(VENV)/.serve

$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[$(EXTRA)test,bench]'
	touch $@ $(VENV)/.serve $(VENV)/.test
