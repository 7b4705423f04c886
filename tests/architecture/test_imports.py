"""What loads when: packages that must start without torch, and how long the command takes to say its help.

The layers themselves are contracts of import-linter in pyproject.toml, which `make check` keeps.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import measure

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "samestep"
COMMAND = str(Path(sys.executable).with_name("samestep"))

TORCH_FREE = ("facts", "plan", "launch", "lint", "cli", "errors", "units")
# torch itself, and packages that load it with themselves
HEAVY = ("torch", "torchdata", "torchmetrics", "lightning", "pytorch_lightning", "transformers", "accelerate")
SECONDS_MOST = 0.3
TRIES = 5  # the quickest counts: the others tell how busy the machine is

ALL_LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} loads torch")
"""


def torch_free_modules() -> list[measure.Module]:
    found = [module for module in measure.read_package(SOURCE) if f"{module.name}..".split(".")[1] in TORCH_FREE]
    assert found, f"no module of {TORCH_FREE} was found: what follows would check nothing"
    return found


def cpu_seconds(*command: str) -> float:
    """Run a command to its end and give the CPU time it took, which other processes do not lengthen."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command} ended with {child.returncode}"
    return usage.ru_utime + usage.ru_stime


def test_torch_free_packages_name_no_torch_when_loaded():
    heavy = [
        f"{module.place(node)}: {name}"
        for module in torch_free_modules()
        for node, name in measure.loaded_names(module)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(["import these inside the function that needs them:", *heavy])


def test_torch_free_packages_load_without_torch():
    names = [module.name for module in torch_free_modules()]
    told = subprocess.run(
        [sys.executable, "-c", ALL_LOADED, *names], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert told.returncode == 0, f"{told.stderr}\npython -X importtime -c 'import <that module>' shows by which way"


@pytest.mark.parametrize(
    "command", [(sys.executable, "-c", "import samestep"), (COMMAND, "--help")], ids=["import", "help"]
)
def test_the_start_is_quick(command):
    best = min(cpu_seconds(*command) for _ in range(TRIES))
    assert best < SECONDS_MOST, (
        f"{best:.2f} s of CPU, at most {SECONDS_MOST}: python -X importtime shows what is loaded"
    )


def test_importing_samestep_loads_no_torch():
    code = "import sys, samestep; sys.exit('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=False)
    assert told.returncode == 0, "`import samestep` loads torch: import what needs it when it is asked for"


def test_the_help_of_the_command_loads_no_torch():
    code = "import sys; sys.argv[1:] = ['--help']\ntry:\n    from samestep.cli.main import main; main()\n"
    code += "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stderr.strip() == "False", "`samestep --help` loads torch: import it inside the command that needs it"
