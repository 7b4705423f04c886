"""What the control group of this process may use: Linux's limits on cores and memory, in both of their versions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest number of pages it can count.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Limits:
    """The tightest limits that this process is under; None where there is none."""

    cores: float | None = None
    """Cores' worth of time in a second, e.g. 1.5."""
    memory: int | None = None
    """Bytes that the group may hold."""
    memory_left: int | None = None
    """Bytes that it may still take, counting file caches that would be given up as free."""


@dataclass(frozen=True)
class _Names:
    """How one version of control groups calls the files that are read here."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process; a system without control groups has none."""
    groups = _groups(root)
    quotas = [quota for folder in _folders(root, groups, "cpu") if (quota := _quota(folder)) is not None]
    rooms = [room for folder in _folders(root, groups, "memory") for room in _rooms(folder)]
    return Limits(
        cores=min(quotas, default=None),
        memory=min((limit for limit, _ in rooms), default=None),
        memory_left=min((left for _, left in rooms), default=None),
    )


def _groups(root: Path) -> dict[str, str]:
    """The group of this process by controller; version 2 has one for all, under the empty name."""
    lines = (_text(root / "proc/self/cgroup") or "").splitlines()
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in fields for name in names.split(",")}


def _folders(root: Path, groups: dict[str, str], controller: str) -> Iterator[Path]:
    """The folders that limit this process: its own group's and those above, whose limits hold for it as well."""
    for mount, path in (
        (root / "sys/fs/cgroup" / controller, groups.get(controller)),
        (root / "sys/fs/cgroup/unified", groups.get("")),
        (root / "sys/fs/cgroup", groups.get("")),
    ):
        if path is None or not mount.is_dir():
            continue
        # In a container the path may be told as the host sees it, while only the container's own group is mounted.
        below = Path(path.lstrip("/"))
        known = ".." not in below.parts and (mount / below).is_dir()
        yield from (mount / part for part in ((below, *below.parents) if known else (Path(),)))


def _quota(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")
    if both is not None:
        quota, period = both.split()
    else:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _rooms(folder: Path) -> Iterator[tuple[int, int]]:
    """Limit and rest of one group, if it has a limit."""
    for names in (_V1, _V2):
        limit, used = _text(folder / names.limit), _text(folder / names.used)
        if limit is None or used is None or limit == "max" or int(limit) >= _UNLIMITED:
            continue
        cache = dict(line.split(" ", 1) for line in (_text(folder / "memory.stat") or "").splitlines())
        yield int(limit), max(0, int(limit) - int(used) + int(cache.get(names.cache, "0")))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
