"""The records of a run and its launchers that a report can use: those that lack a field are left out.

A file may be written by another version of samestep or by another program, and a crash of the machine may damage it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from samestep.loggers.run_files import read_records

Record = Mapping[str, Any]
LAUNCHER_EVENTS: Final = "launcher-*.jsonl"
"""In the folder `logs` of a launcher, one file per node."""

_NUMBER: Final = (int, float)
_LATEST: Final = 1e11  # seconds since 1970; no clock is that wrong
_Fields = Mapping[str, type | tuple[type, ...]]
_EVENT_FIELDS: Final[Mapping[str, _Fields]] = {
    "start": {
        "command": list, "folder": str, "versions": dict, "host": str, "pid": int, "started_from_boot": _NUMBER,
        "ranks": int, "nodes": int, "hosts": dict, "devices": dict, "backend": str, "choices": dict, "launcher": str,
    },
    "code": {"commit": str},
    "plan": {"chosen": dict},
    "model": {"model": str, "parameters": int, "trainable": int, "strategy": str},
    "data": {"name": str, "dataset": str},
    "restored": {"checkpoint": str, "step": int},
    "evaluation": {"step": int, "seconds": _NUMBER},
    "checkpoint": {
        "checkpoint": str, "step": int, "bytes": _NUMBER, "seconds": _NUMBER, "waited_seconds": _NUMBER,
    },
    "warning": {"text": str, "category": str, "file": str, "line": int},
    "preempted": {"cause": str},
    "end": {"status": str, "steps": int},
}  # fmt: skip
_LAUNCH_FIELDS: Final[Mapping[str, _Fields]] = {
    "attempt": {"world_size": int},
    "hang": {"summary": str},
    "failure": {"cause": str, "report": str},
    "stopped": {"text": str},
    "end": {"code": int},
}
_TIMES_FIELDS: Final[_Fields] = {"step": int, "time": _NUMBER, "steps": int, "seconds": _NUMBER, "phases": dict}


def read_events(path: Path) -> list[Record]:
    """The events of a run, by time."""
    return sorted(_read(path, _EVENT_FIELDS), key=lambda event: event["time"])


def read_launches(folder: Path) -> Iterator[Record]:
    """The events of the launchers of all nodes, each with the name of its host."""
    for path in sorted((folder / "logs").glob(LAUNCHER_EVENTS)):
        host = path.name.removeprefix("launcher-").removesuffix(".jsonl")
        yield from ({**record, "host": host} for record in _read(path, _LAUNCH_FIELDS))


def read_times(path: Path) -> list[Record]:
    """What the ranks spent their time on."""
    return [record for record in read_records(path) if _has(record, _TIMES_FIELDS)]


def _read(path: Path, fields: Mapping[str, _Fields]) -> Iterator[Record]:
    known: dict[str, type | tuple[type, ...]] = {"event": str, "time": _NUMBER}
    return (each for each in read_records(path) if _has(each, known) and _has(each, fields.get(each["event"], {})))


def _has(record: Record, fields: _Fields) -> bool:
    return all(isinstance(record.get(name), kind) for name, kind in fields.items()) and 0 <= record["time"] < _LATEST
