"""Start the recorder in this process, and run the script of the user below it."""

import builtins
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any, Final

from samestep.verify.recorder.rank_process import end, run_until_stopped
from samestep.verify.recorder.recorder import Recorder, RecorderSettings, wrap

PRELOADED: Final = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "numpy",
)
"""What takes long to import, and what most scripts import."""
_MAX_TEXT: Final = 400  # characters of a line that is printed
OBSERVERS: Final = ("samestep.verify.recorder.optimizer_observer", "samestep.verify.recorder.collective_observer")


def install(settings: RecorderSettings, rank: int | None) -> Recorder:
    """Observe this process from now on."""
    # torch is imported here, not above: a process that only starts others does not need it
    from samestep.verify.recorder.collective_observer import CollectiveObserver
    from samestep.verify.recorder.cpu_batchnorm import use_cpu_batchnorm
    from samestep.verify.recorder.cpu_devices import use_cpu
    from samestep.verify.recorder.data_observer import DataObserver
    from samestep.verify.recorder.file_observer import FileObserver
    from samestep.verify.recorder.framework_observer import FrameworkObserver
    from samestep.verify.recorder.line_trace import LineTrace
    from samestep.verify.recorder.model_observer import ModelObserver
    from samestep.verify.recorder.optimizer_observer import OptimizerObserver
    from samestep.verify.recorder.random_observer import RandomObserver
    from samestep.verify.recorder.replay import Replay
    from samestep.verify.recorder.spawned_ranks import SpawnedRanks

    recorder = Recorder(settings, rank)
    recorder.write("start", rank=rank, size=settings.size, pid=os.getpid())
    builtin = torch_builtins()
    if settings.device == "cpu":
        use_cpu(recorder)
        use_cpu_batchnorm(recorder)
    data, replay = DataObserver(recorder), Replay(recorder)
    models = ModelObserver(recorder, data, replay)
    data.install()
    models.install()
    OptimizerObserver(recorder, models, replay).install()
    CollectiveObserver(recorder).install()
    files = FileObserver(recorder)
    files.install()
    RandomObserver(recorder).install()
    FrameworkObserver(recorder, files).install()
    _keep_scriptable(builtin)
    _observe_print(recorder)
    lines = LineTrace(recorder)
    SpawnedRanks(recorder, lines).install()
    lines.install()
    return recorder


def torch_builtins() -> dict[str, Any]:
    """The operators of functions of torch by their names, as torch.jit.script finds them."""
    import torch
    from torch.jit import _builtins

    find: Any = _builtins._find_builtin  # pyright: ignore[reportPrivateUsage]
    found = {name: find(function) for name, function in vars(torch).items() if callable(function)}
    return {name: operator for name, operator in found.items() if operator}


def _keep_scriptable(operators: dict[str, Any]) -> None:
    """Let torch.jit.script compile observed functions of torch as it compiles the original ones."""
    import torch
    from torch.jit import _builtins

    register: Any = _builtins._register_builtin  # pyright: ignore[reportPrivateUsage]
    for name, operator in operators.items():
        register(getattr(torch, name), operator)


def _observe_print(recorder: Recorder) -> None:
    """Note what a rank prints and logs: metrics, perhaps."""

    def observed(original: Any, *args: Any, **kwargs: Any) -> None:
        if not recorder.is_quiet and kwargs.get("file") is None:
            text = str(kwargs.get("sep") or " ").join(map(str, args))
            recorder.write("print", site=recorder.site(), text=text[:_MAX_TEXT])
        original(*args, **kwargs)

    def handle(original: Any, logger: logging.Logger, record: logging.LogRecord) -> None:
        frames = recorder.user_frames(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if frames and frames[0][1] == record.lineno and not recorder.is_quiet:  # not a message of a library
            recorder.write("print", site=recorder.number(tuple(frames)), text=record.getMessage()[:_MAX_TEXT])
        original(logger, record)

    wrap(builtins, "print", observed)
    wrap(logging.Logger, "handle", handle)


def run_script(recorder: Recorder, target: str, is_module: bool, arguments: list[str]) -> int:
    """Run the script as `python` would; returns its exit code."""
    sys.argv = [target, *arguments]

    def run() -> None:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).absolute().parent))
            runpy.run_path(target, run_name="__main__")

    code, error = run_until_stopped(run)
    end(recorder, code, error)
    return code
