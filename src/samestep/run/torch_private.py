"""What torch does not offer in public yet, wrapped here alone; tests fail when torch changes it."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_group_timeout(seconds: float, group: dist.ProcessGroup) -> None:
    """Give every later collective of `group` this long; torch only lets the timeout be named at the start."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # pyright: ignore[reportPrivateUsage]
