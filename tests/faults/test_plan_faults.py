"""Bad inputs of `samestep plan`: modules, build functions, models, batches, clusters and options."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests.faults.harness import Fault, cases, check

pytestmark = pytest.mark.slow  # every entry is a real command

MODEL = """
    import os, sys
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch):
            return self.layer(batch)

    def build():
        return Net(), torch.zeros(2, 4)
"""
DEVICE = {"name": "mygpu", "memory_gib": 10, "bandwidth_gbs": 100, "tflops": {"float32": 1}}


def plan(
    name: str,
    says: str,
    *options: str,
    code: int = 2,
    source: str = MODEL,
    target: str = "model.py:build",
    batch: str = "8",
    gpus: str = "h100:2",
    prepare: Callable[[Path], object] | None = None,
) -> Fault:
    """`samestep plan` for the source of model.py, in a process that has imported torch already."""

    def prepare_folder(folder: Path) -> None:
        (folder / "model.py").write_text(dedent(source))
        if prepare is not None:
            prepare(folder)

    arguments = ["plan", target, "--global-batch", batch, "--gpus", gpus, *options]
    stdin, call = "sys.stdin = open('/dev/null')", f"sys.exit(main({arguments!r}))"
    script = f"import sys\nfrom samestep.cli.main import main\n{stdin}\n{call}"
    return Fault(name, says, code=code, script=script, prepare=prepare_folder)


def build(name: str, says: str, body: str, code: int = 2) -> Fault:
    """A build function with another body."""
    return plan(name, says, code=code, source=f"{dedent(MODEL).rpartition('    return')[0]}    {body}\n")


def forward(name: str, says: str, body: str, code: int = 2) -> Fault:
    """A model with another forward."""
    return plan(name, says, code=code, source=MODEL.replace("return self.layer(batch)", body))


def device(title: str, says: str, **fields: object) -> Fault:
    """A device description with other fields."""
    return plan(title, says, gpus=json.dumps({**DEVICE, **fields}))


NUMBER = r"the JSON of --gpus: {} must be a number from 1e-06 to 1,000,000,000, got {}\."
FAULTS = [
    # Modules
    plan("module raises", r"model.py cannot be imported \(RuntimeError: boom\)", source="raise RuntimeError('boom')"),
    plan("module exits", r"model.py cannot be imported \(SystemExit: 5\)", source="import sys; sys.exit(5)"),
    plan("module ends the process", r"imported \(SystemExit: os._exit\(0\)\)", source="import os; os._exit(0)"),
    plan("module raises a class that is not an Exception", r"cannot be imported \(Stop: now\)",
         source="class Stop(BaseException): pass\nraise Stop('now')"),
    plan("module is interrupted", "^$", code=130, source="raise KeyboardInterrupt"),
    plan("module is binary", r"cannot be imported \(SyntaxError: source code string cannot contain null bytes",
         prepare=lambda folder: (folder / "model.py").write_bytes(bytes(range(256)))),
    plan("module is empty", "model.py has no function build. It has none.", source=""),
    plan("module is a folder", "folder.py is not a file in /.*. Pass a file and its function", target="folder.py:build",
         prepare=lambda folder: (folder / "folder.py").mkdir()),
    plan("module is a pipe", "pipe.py is not a file in /.*. Pass", target="pipe.py:build",
         prepare=lambda folder: os.mkfifo(folder / "pipe.py")),
    plan("module is a link to itself", "loop.py does not exist in", target="loop.py:build",
         prepare=lambda folder: (folder / "loop.py").symlink_to("loop.py")),
    plan("module is __main__", "Module __main__ is neither in", target="__main__:build"),
    plan("module has hundreds of functions", "It has .* and [0-9]+ more.", target="torch:build"),
    # Build functions
    build("build returns None", r"build\(\) returned None. Return a model and an example batch", "return None"),
    build("build raises", r"build\(\) failed \(RuntimeError: broken\)", "raise RuntimeError('broken')"),
    build("build raises an exception without a text", r"build\(\) failed \(Odd\). Call it on its own",
          "class Odd(Exception):\n        def __str__(self): raise ValueError\n    raise Odd"),
    build("build exits", r"build\(\) failed \(SystemExit: 0\)", "sys.exit(0)"),
    build("build ends the process", r"build\(\) failed \(SystemExit: os._exit\(1\)\)", "os._exit(1)"),
    build("build asks", r"build\(\) failed \(EOFError: EOF when reading a line\)", "input('name? ')"),
    build("build needs CUDA", r"build\(\) needs CUDA .* Build the model and its batch without a device",
          "return Net().cuda(), torch.zeros(2, 4)"),
    build("build is interrupted", "^$", "raise KeyboardInterrupt", code=130),
    build("build prints a lot, starts a thread and forks", "noise 4999 .*model +Net.*traced without memory",
          "import threading; [print('noise', i) for i in range(5000)]; threading.Thread(target=print).start()\n"
          "    child = os.fork() or os._exit(0); os.waitpid(child, 0)\n    return Net(), torch.zeros(2, 4)", code=0),
    plan("build needs arguments", r"Missing option '--layers'.\). Pass the parameters of the build function after",
         source=MODEL.replace("def build():", "def build(layers):")),
    plan("build gets a number of 5,000 digits", r"Invalid value for '--layers': '9+\.\.\. is not a valid integer", "--",
         "--layers", "9" * 5000, source=MODEL.replace("def build():", "def build(layers: int = 2):")),
    # Models and batches
    build("model without parameters", "ReLU has no trainable parameters", "return nn.ReLU(), torch.zeros(2, 4)"),
    build("batch without samples", r"returned a tensor of shape \(0, 4\)", "return Net(), torch.zeros(0, 4)"),
    build("batch is a generator", "batch is of class generator", "return Net(), (x for x in [1])"),
    forward("forward raises without values", r"Net cannot be called with the example batch \(ValueError: no\)",
            "raise ValueError('no')"),
    forward("forward exits", r"Net cannot be called with the example batch \(SystemExit: 4\)", "sys.exit(4)"),
    forward("forward never returns", r"\(RecursionError: maximum recursion depth", "return self.forward(batch)"),
    forward("forward needs values", "measured with real micro-batches", code=0,
            body="return self.layer(batch) * (2 if batch.sum().item() else 3)"),
    # Clusters
    device("memory is not a number", NUMBER.format("memory_gib", "nan"), memory_gib=float("nan")),
    device("memory is text", NUMBER.format("memory_gib", "'10'"), memory_gib="10"),
    device("memory of 10**400 GiB", "memory_gib must be a number .* got 1000", memory_gib=10**400),
    device("no memory", NUMBER.format("memory_gib", "0"), memory_gib=0),
    device("bandwidth is infinite", NUMBER.format("bandwidth_gbs", "inf"), bandwidth_gbs=float("inf")),
    device("bandwidth so small that a step never ends", NUMBER.format("bandwidth_gbs", "5e-324"), bandwidth_gbs=5e-324),
    device("name is a number", "the JSON of --gpus: name must be text that is not empty, got 5.", name=5),
    device("a million devices per node", "count must be at most 4096, got 1000000", count=10**6),
    device("tflops is a list", r"tflops must map dtypes to dense TFLOP/s, got \[\]", tflops=[]),
    plan("cluster of 5,000 digits", "devices per node must be from 1 to 4096, got 99", gpus=f"h100:{'9' * 5000}"),
    plan("cluster file is binary", r"--gpus x.json cannot be read \(it is not a text file\)", gpus="x.json",
         prepare=lambda folder: (folder / "x.json").write_bytes(b"\xff\xfe\x00")),
    plan("cluster file is a pipe", "--gpus x.json is not a file. Pass a file", gpus="x.json",
         prepare=lambda folder: os.mkfifo(folder / "x.json")),
    plan("cluster file is a link to itself", "x.json cannot be read .Too many levels of symbolic links", gpus="x.json",
         prepare=lambda folder: (folder / "x.json").symlink_to("x.json")),
    plan("cluster file is nested too deeply", r"x.json is not valid JSON \(maximum recursion depth", gpus="x.json",
         prepare=lambda folder: (folder / "x.json").write_text("[" * 100_000)),
    # Options
    plan("batch of 0", "--global-batch must be an integer from 1 to 1000000000, got 0", batch="0"),
    plan("optimizer needs a closure", r"optimizer='LBFGS' cannot step after a backward pass", "--optimizer", "LBFGS"),
    plan("nothing is left of the memory", "nothing fits", "--margin", "0.99", code=1, gpus="t4"),
]  # fmt: skip


@cases(FAULTS)
def test_a_bad_input_of_a_plan_ends_with_its_sentence(fault: Fault, tmp_path: Path):
    output = check(fault, tmp_path).outputs[0]
    assert "Traceback" not in output
