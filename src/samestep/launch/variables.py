"""What the ranks find in their environment beyond what torch's agent sets, and why, in one line."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.launch.job import Job, count_threads
from samestep.launch.probe import Bf16


@dataclass(frozen=True)
class RankVariables:
    """Variables to export before the ranks start."""

    values: dict[str, str]
    """Names and values; what the user set is not among them."""
    reason: str
    """What was set and why, in one line."""


def choose_variables(job: Job, environ: Mapping[str, str], cores: int, gpus: int, bf16: Bf16) -> RankVariables:
    """Decide what to set for the ranks; what the user has set stays."""
    shared = f"{_count(cores, 'core')} for {_count(job.processes, 'rank')}, {_count(gpus, 'GPU')}"
    wanted = {"OMP_NUM_THREADS": (str(count_threads(job.processes, cores)), shared)}
    if job.may_restart:
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        wanted[name] = ("1", "the store that torch shares with its agent keeps dead addresses over a restart")
    for name, value in bf16.cure.items():
        wanted[name] = (value, bf16.detail)
    values = {name: value for name, (value, _) in wanted.items() if name not in environ}
    told = [
        f"{name}={value} ({reason})" if name in values else f"{name}={environ[name]} (as you set it)"
        for name, (value, reason) in wanted.items()
    ]
    folder = {"SAMESTEP_FOLDER": str(job.folder), "SAMESTEP_FOLDER_TYPED": str(int(job.folder_typed))}
    return RankVariables({**values, **folder}, "; ".join(told))


def _count(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'s' if number > 1 else ''}"
