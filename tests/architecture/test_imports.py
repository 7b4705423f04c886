"""What is imported when: packages that must load without torch, and the time until `samestep --help` is shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import measure

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "samestep"
COMMAND = str(Path(sys.executable).with_name("samestep"))

TORCH_FREE = ("hang", "environment", "planner", "launch", "lint", "cli", "errors", "messages", "disk")
# Modules of these packages that need torch when they are imported: name -> why.
NEEDS_TORCH = {
    "samestep.environment.gpus": "asks torch which GPUs there are",
    "samestep.launch.agent": "is torch's elastic agent",
    "samestep.launch.launcher": "runs the agent",
    "samestep.planner.step_recorder": "follows tensors",
    "samestep.planner.calibration": "times kernels",
    "samestep.planner.trace": "traces a model",
    "samestep.planner.step_timing": "times steps",
    "samestep.planner.cuda_emulation": "traces for CUDA without a GPU",
    "samestep.planner.cudnn_rnn": "traces recurrent layers for CUDA without a GPU",
    "samestep.planner.traced_model": "traces a model",
    "samestep.planner.cluster_discovery": "reads the GPUs of this machine",
}
# torch itself, and packages that import it
HEAVY = ("torch", "torchdata", "torchmetrics", "lightning", "pytorch_lightning", "transformers", "accelerate")
MAX_CPU_SECONDS = 0.3
TRIES = 5  # the fastest counts, the others measure the load of the machine

ALL_LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} loads torch")
"""


def torch_free_modules() -> list[measure.Module]:
    found = [module for module in measure.read_package(SOURCE) if f"{module.name}..".split(".")[1] in TORCH_FREE]
    assert found, f"found no module of {TORCH_FREE}, so these tests would check nothing"
    assert NEEDS_TORCH.keys() <= {module.name for module in found}, "NEEDS_TORCH names a module that does not exist"
    return [module for module in found if module.name not in NEEDS_TORCH]


def cpu_seconds(*command: str) -> float:
    """Run a command and return its CPU time, which does not depend on other processes."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command} exited with status {child.returncode}"
    return usage.ru_utime + usage.ru_stime


def test_torch_free_modules_do_not_import_torch_themselves():
    heavy = [
        f"{module.location(node)}: {name}"
        for module in torch_free_modules()
        for node, name in measure.loaded_names(module)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(["import these inside the function that needs them:", *heavy])


def test_torch_free_modules_load_without_torch():
    names = [module.name for module in torch_free_modules()]
    ended = subprocess.run(
        [sys.executable, "-c", ALL_LOADED, *names], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert ended.returncode == 0, (
        f"{ended.stderr}\npython -X importtime -c 'import <that module>' shows the chain of imports"
    )


@pytest.mark.parametrize(
    "command", [(sys.executable, "-c", "import samestep"), (COMMAND, "--help")], ids=["import", "help"]
)
def test_starting_is_fast(command):
    best = min(cpu_seconds(*command) for _ in range(TRIES))
    assert best < MAX_CPU_SECONDS, (
        f"{best:.2f} s of CPU, at most {MAX_CPU_SECONDS}: python -X importtime shows what is imported"
    )


def test_importing_samestep_loads_no_torch():
    code = "import sys, samestep; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == 0, "`import samestep` imports torch: import it when a name that needs it is used"


def test_the_help_of_the_command_loads_no_torch():
    code = "import sys; sys.argv[1:] = ['--help']\ntry:\n    from samestep.cli.main import main; main()\n"
    code += "finally:\n    print('torch' in sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.strip() == "False", (
        "`samestep --help` imports torch: import it inside the command that needs it"
    )
