# The commands that matter: `make serve`, `make bench` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 3000
# Processes that tests run in: a number, or `auto` for one more than there are cores.
WORKERS ?= auto
KERNELS := $(wildcard tgi_cli/kernels/cpp/*)

# What is installed, and how large it is; pip lists the files.
define announce
@echo "Installing tgi and its dependencies into $(VENV): 1.2 GB with PyTorch for CPUs."
$(if $(PIP_EXTRA_INDEX_URL)$(PIP_INDEX_URL),,$(announce-torch))
endef

define announce-torch
@echo "On Linux, PyPI's PyTorch is the build for CUDA: several gigabytes. Without an"
@echo "NVIDIA GPU, stop this and take the build for CPUs, of 0.8 GB:"
@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)"
endef

# Pip would compile the kernels for every CPU without a word: see what it takes for this one.
define install
TGI_BUILD_KERNELS=0 $(BIN)/pip install --disable-pip-version-check -e "$(1)"
@$(BIN)/tgi warmup || echo "Going on without them."
endef

.PHONY: serve bench test lint completions reference proto clean

serve: $(VENV)/.installed
	$(BIN)/tgi serve --port $(PORT)

bench: $(VENV)/.installed-bench
	$(BIN)/tgi bench

# mypy runs beside the tests; its report follows theirs.
test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build; $(BIN)/mypy >build/mypy.txt 2>&1 & mypy=$$!; \
	trap "kill $$mypy 2>/dev/null; exit 130" INT TERM; \
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 \
		--dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$mypy; types=$$?; cat build/mypy.txt; exit $$((tests ? tests : types))

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The scripts that make a shell complete `tgi`'s commands and flags.
completions: $(VENV)/.installed
	$(BIN)/python -m tgi_cli.cli.completions completions

# The tables of docs/configuration.md.
reference: $(VENV)/.installed
	$(BIN)/python -m tgi_cli.cli.reference docs/configuration.md

# The Python side of the model server's wires: its router's, and TGI's. Generated code asks for
# a protobuf at least as new as its generator's, so the generator is the oldest that serves.
proto:
	$(PYTHON) -m venv build/proto
	build/proto/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.80.0
	build/proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. tgi_cli/rpc/*.proto tgi_cli/tgi_grpc/*.proto

clean:
	rm -rf $(VENV) build

# Older pips install for minutes without a word.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tgi needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	-@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"

$(VENV)/.installed: pyproject.toml $(KERNELS) | $(VENV)/bin/python
	$(announce)
	$(call install,.)
	@touch $@

$(VENV)/.installed-bench: pyproject.toml $(KERNELS) | $(VENV)/bin/python
	$(announce)
	$(call install,.[bench])
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(announce)
	$(BIN)/pip install --disable-pip-version-check -e ".[test]"
	@touch $@ $(VENV)/.installed
