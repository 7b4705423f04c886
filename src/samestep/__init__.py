"""N GPUs, the same step: elastic multi-GPU PyTorch training whose results do not depend on how many processes ran."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Names are imported when first asked for: `import samestep` costs milliseconds, torch costs seconds.
_HOMES = {
    "Run": "samestep.training.run",
    "Shard": "samestep.training.shard",
    "Step": "samestep.training.step",
    "World": "samestep.environment.world",
    "SamestepError": "samestep.errors",
    "SamestepWarning": "samestep.messages",
    "sample_rng": "samestep.data.sample_rng",
    "sample_numpy_rng": "samestep.data.sample_rng",
    "epoch_setting": "samestep.data.sample_rng",
    "read_metrics": "samestep.loggers.run_files",
    "launch": "samestep.launch.python_launch",
}

if TYPE_CHECKING:
    from samestep.data.sample_rng import epoch_setting, sample_numpy_rng, sample_rng
    from samestep.environment.world import World
    from samestep.errors import SamestepError
    from samestep.launch.python_launch import launch
    from samestep.loggers.run_files import read_metrics
    from samestep.messages import SamestepWarning
    from samestep.training.run import Run
    from samestep.training.shard import Shard
    from samestep.training.step import Step

__all__ = [
    "Run", "SamestepError", "SamestepWarning", "Shard", "Step", "World", "__version__", "epoch_setting", "launch",
    "read_metrics", "sample_numpy_rng", "sample_rng",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    if name == "launch":  # a package that can be called: what this name is once a module of it is imported
        return import_module("samestep.launch")
    if "torch" not in sys.modules:
        import_module("samestep.environment.processes").check_current_folder()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
