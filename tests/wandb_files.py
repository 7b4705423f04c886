"""Read what W&B has written in offline mode: `.wandb` files are records of protobuf in the log format of LevelDB."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32_768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Any]:
    """Yield every complete record of a file."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content.startswith(b":W&B"), f"{path} is not a file of W&B"
    at, parts = _FILE_HEADER, b""
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block is too short for a header
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
        assert kind in (_FULL, _FIRST, _MIDDLE, _LAST), f"{path} has a record of type {kind}"


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows; `_step` is W&B's own step."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            rows.append({**items, "_step": record.history.step.num})
    return rows


def run_of(path: Path) -> Any:
    """The record that describes the run: its id, project and configuration."""
    return next(record.run for record in read_records(path) if record.WhichOneof("record_type") == "run")


def config_of(path: Path) -> dict[str, Any]:
    """The configuration of the run, as it was updated."""
    found = {}
    for record in read_records(path):
        for update in (record.run.config.update, record.config.update):
            found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in update}
    return found


def exit_code(path: Path) -> int | None:
    """The exit code with which the run was finished; None if it was not."""
    ends = [record.exit.exit_code for record in read_records(path) if record.WhichOneof("record_type") == "exit"]
    return ends[-1] if ends else None
