"""Folders of runs for tests of the report: written by hand, as samestep writes them, so that every number is known."""

import json
import os
from pathlib import Path
from socket import gethostname

BEGIN = 1_767_225_600.0  # seconds since 1970
GONE = 2**22 + 1  # the id of no process
START = {
    "command": ["train.py", "--lr", "0.1"],
    "folder": "/home/me/lab",
    "versions": {"samestep": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "host": gethostname(),
    "pid": GONE,
    "started_from_boot": 1.0,
    "launcher": "samestep run",
    "launcher_folder": None,
    "job": "a1b2",
    "restart": 0,
    "out_of_memory_retries": 0,
    "ranks": 2,
    "nodes": 1,
    "hosts": {"gpu-07": 2},
    "devices": {"NVIDIA H200": 2},
    "backend": "nccl",
    "global_batch": 256,
    "seed": 3,
    "ledger": False,
    "choices": {"precision": "bf16", "tf32": True, "compile": False},
}


def write_lines(path: Path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def event(kind: str, seconds: float, /, **fields):
    return {"event": kind, "time": BEGIN + seconds, **fields}


def start(seconds: float = 0.0, **fields):
    return event("start", seconds, **{**START, **fields})


def running(seconds: float = 0.0, **fields):
    """The start of a process that runs: this one."""
    from samestep.environment.processes import seconds_from_boot

    return start(seconds, pid=os.getpid(), started_from_boot=seconds_from_boot(os.getpid()), **fields)


def losses(steps, of=lambda step: 1.0 / (1 + step), seconds=lambda step: float(step)):
    return [
        {"step": step, "epoch": step // 10, "time": BEGIN + seconds(step), "train/loss": of(step)} for step in steps
    ]


def times(step: int, seconds: float, ranks: int = 2, **fields):
    phases = {"forward": [0.3] * ranks, "backward": [0.5] * ranks}
    return {
        "step": step,
        "time": BEGIN + seconds,
        "steps": 10,
        "seconds": 1.0,
        "phases": phases,
        "communication": [0.2] * ranks,
        "memory_bytes": [2**30] * ranks,
        "cpu_cores": [1.0] * ranks,
        **fields,
    }


def write_run(folder: Path, events, metrics=(), records=(), launches=(), summary=None) -> Path:
    """The folder of a run."""
    write_lines(folder / "events.jsonl", events)
    if metrics:
        write_lines(folder / "metrics.jsonl", metrics)
    if records:
        write_lines(folder / "times.jsonl", records)
    if launches:
        write_lines(folder / "logs" / "launcher-gpu-07.jsonl", launches)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
