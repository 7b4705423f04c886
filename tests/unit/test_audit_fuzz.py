"""Damaged ledgers: the audit always ends with a verdict or a LedgerError, and never certifies changed records."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from samestep.data.audit import audit
from samestep.data.ledger import RECORD, RECORD_BYTES, RecordKind
from samestep.errors import LedgerError
from tests.unit.simulated_ledgers import DESCRIPTION, Generation, file_of, simulate, write

ROUNDS = 100
ABSURD = [0, 1, 2, 3, 9, 10, 255, 2**15, 2**16 - 1, 2**22, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63, 2**64 - 1]
VALUES = [None, True, -1, 0, 1, 10, 2**31, 2**62, 2**64, 10**30, 0.5, float("nan"), float("inf"), "x", [], {}, [[1]]]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    runs = Generation(2, 0, 14, "killed"), Generation(3, 12, 8, "error"), Generation(2, 18, 9)
    simulate(folder, DESCRIPTION, *runs, evaluate_every=5)
    assert audit(folder).verdict == "sound"
    return folder


def verdict(folder: Path) -> str:
    try:
        report = audit(folder)
        json.dumps(report.as_dict())
    except LedgerError:
        return "unreadable"
    return report.verdict


def without_hashes(records: np.ndarray) -> bytes:
    return records[records["kind"] != RecordKind.CHECK].tobytes()


def change_fields(rng: random.Random, records: np.ndarray) -> None:
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([name for name in RECORD.names if name != "checksum"])
        limit = 256 ** RECORD[name].itemsize
        value = rng.choice(ABSURD) % limit if rng.random() < 0.7 else rng.randrange(limit)
        records[name].view(f"<u{RECORD[name].itemsize}")[rng.randrange(len(records))] = value


def change_bytes(rng: random.Random, records: np.ndarray) -> None:
    data = records.view(np.uint8)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)


def move_records(rng: random.Random, records: np.ndarray) -> np.ndarray:
    start, length = rng.randrange(len(records)), rng.randint(1, 20)
    part = records[start : start + length]
    rest = np.delete(records, slice(start, start + length))
    if rng.random() < 0.5:
        return rest
    at = rng.randrange(len(rest) + 1)
    return np.concatenate([rest[:at], part, rest[at:]])


@pytest.mark.slow
@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("change", [change_fields, change_bytes, move_records])
def test_changed_records_are_never_certified(original, tmp_path, change, hashes):
    """With the hashes repaired the audit may find nothing in what no longer counts, but it always ends."""
    rng = random.Random(f"{change.__name__} {hashes}")
    found = set()
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        rank = rng.randrange(3 if hashes else 2)  # rank 2 was not in the last start: its end may look like a kill
        before = np.fromfile(file_of(folder, rank), dtype=RECORD)
        after = before.copy()
        after = (result if (result := change(rng, after)) is not None else after).copy()
        write(folder, rank, after, hashes=hashes)
        found.add(answer := verdict(folder))
        assert hashes or answer != "sound" or without_hashes(after) == without_hashes(before), f"round {number}"
    assert found <= {"sound", "incomplete", "faulty", "unreadable"}


def test_changed_bytes_of_the_files_are_never_certified(original, tmp_path):
    """Without repaired checksums, and with files that end anywhere."""
    rng = random.Random(0)
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        path = file_of(folder, rng.choice([0, 1]))  # the last start has these ranks
        data = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= rng.randint(1, 255)
        path.write_bytes(data)
        assert verdict(folder) != "sound", f"round {number}"


def test_changed_descriptions_are_never_certified(original, tmp_path):
    rng = random.Random(0)
    fields = json.loads((original / "ledger" / "train" / "shard.json").read_text())
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        name, value = rng.choice([*fields, "other"]), rng.choice(VALUES)
        (folder / "ledger" / "train" / "shard.json").write_text(json.dumps({**fields, name: value}))
        # An older version or fewer starts say less, and are not wrong.
        allowed = fields.get(name) == value or name in ("version", "starts")
        assert verdict(folder) != "sound" or allowed, (name, value)


def test_the_kinds_of_records_have_stable_numbers():
    assert [kind.value for kind in RecordKind] == list(range(1, 10))
    assert RECORD_BYTES == 32
