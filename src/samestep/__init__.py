"""N GPUs, the same step: elastic multi-GPU PyTorch training whose results do not depend on how many processes ran."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Names are imported when first asked for: `import samestep` costs milliseconds, torch costs seconds.
_HOMES = {
    "Run": "samestep.run.run",
    "Shard": "samestep.run.shard",
    "Step": "samestep.run.step",
    "World": "samestep.facts.world",
    "SamestepError": "samestep.errors",
    "SamestepWarning": "samestep.log",
    "sample_rng": "samestep.data.sample_rng",
    "sample_numpy_rng": "samestep.data.sample_rng",
    "current_setting": "samestep.data.sample_rng",
    "read_metrics": "samestep.sinks.metrics_file",
}

if TYPE_CHECKING:
    from samestep.data.sample_rng import current_setting, sample_numpy_rng, sample_rng
    from samestep.errors import SamestepError
    from samestep.facts.world import World
    from samestep.log import SamestepWarning
    from samestep.run.run import Run
    from samestep.run.shard import Shard
    from samestep.run.step import Step
    from samestep.sinks.metrics_file import read_metrics

__all__ = [
    "Run",
    "SamestepError",
    "SamestepWarning",
    "Shard",
    "Step",
    "World",
    "__version__",
    "current_setting",
    "read_metrics",
    "sample_numpy_rng",
    "sample_rng",
]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
