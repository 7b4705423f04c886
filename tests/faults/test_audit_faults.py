"""Ledgers that lack something or are wrong, and data that differs between ranks: the exit code and the sentence."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from samestep.cli.main import main
from samestep.data.ledger import RECORD, RECORD_BYTES, FileState, RecordKind, describe_files
from samestep.data.ledger_reader import read_ledger
from samestep.errors import LedgerError
from tests.faults.harness import Fault, cases, check
from tests.unit.simulated_ledgers import (
    DESCRIPTION,
    Generation,
    edit,
    file_of,
    find_trained,
    open_ledger,
    replace_records,
    simulate,
    write,
)

RUN = Path("run")
SHARD = RUN / "ledger" / "train"
AUDIT = "samestep audit run"


def states(folder: Path) -> list[list[FileState | None]]:
    """What the files of the shard contain, rank by rank."""
    files = read_ledger(folder / "ledger" / "train").files
    end = {rank: np.fromfile(file_of(folder, rank), dtype=RECORD)[-1] for rank in files}
    return [
        [
            FileState(
                "train",
                1,
                int(end[rank]["epoch"]),
                int(end[rank]["step"]),
                file.length,
                file.hashes[file.length],
                file.began,
            )
        ]
        for rank, file in files.items()
    ]


def write_summary(folder: Path, **changes: object) -> None:
    summary = {"status": "finished", "samples": 250, "ledger": describe_files(states(folder)), **changes}
    (folder / "summary.json").write_text(json.dumps(summary))


def write_checkpoint(folder: Path, **changes: object) -> None:
    checkpoint = folder / "step-00000014"
    checkpoint.mkdir(parents=True)
    manifest = {"run": {"ledger": describe_files(states(folder)), **changes}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def finished_run(folder: Path) -> Path:
    """Write a run of 25 steps on 2 ranks that was resumed at step 12, with a summary and a checkpoint."""
    run = folder / RUN
    simulate(run, DESCRIPTION, Generation(2, 0, 14))
    write_checkpoint(run)
    shutil.copytree(run / "ledger", folder / "first-start")
    simulate(run, DESCRIPTION, Generation(2, 12, 13))
    write_summary(run)
    return run


def without_evidence(run: Path) -> None:
    """Remove what the ledger could be compared with."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / "step-00000014")


def cut(run: Path, *, size: int = 0, epoch: int | None = None, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Cut files off by `size` bytes, or where an epoch of the last start begins."""
    for rank in ranks:
        path = file_of(run, rank)
        length = path.stat().st_size - size
        if epoch is not None:
            length = find_trained(np.fromfile(path, dtype=RECORD), epoch, 0) * RECORD_BYTES
        os.truncate(path, length)


def change(field: str, value: object, kind: RecordKind = RecordKind.TRAINED, generation: int = 1):
    """Change a field of the first record of a kind, and repair checksums, sums and running hashes."""

    def damage(run: Path) -> None:
        def changed(records: np.ndarray) -> np.ndarray:
            at = np.flatnonzero((records["kind"] == kind) & (records["generation"] == generation))[0]
            records[field][at] = value
            return records

        for rank in (0, 1):
            replace_records(run, rank, changed)

    return damage


def tamper(edit_records: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """Change the records of rank 1 and their checksums, but not the running hashes."""
    return lambda run: write(run, 1, edit_records(np.fromfile(file_of(run, 1), dtype=RECORD)), hashes=False)


def trained_at(records: np.ndarray, number: int) -> int:
    return int(np.flatnonzero(records["kind"] == RecordKind.TRAINED)[number])


def lower_count(records: np.ndarray) -> np.ndarray:
    records["count"][trained_at(records, 5)] -= 1
    return records


def rename_option(name: str, value: object) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / "ledger" / "train" / "shard.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return damage


def age(version: int) -> Callable[[Path], None]:
    """Rewrite the ledger as an older version wrote it."""

    def damage(run: Path) -> None:
        without_evidence(run)
        rename_option("version", version)(run)
        for rank in (0, 1):
            records = np.fromfile(file_of(run, rank), dtype=RECORD)
            hidden = [RecordKind.CHECK] + [RecordKind.OPTION, RecordKind.PROBE] * (version == 1)
            records = records[~np.isin(records["kind"], hidden)]
            records["weight"][records["kind"] == RecordKind.START] = 1
            records["first"][records["kind"] == RecordKind.END] = 0
            write(run, rank, records)

    return damage


def rewind(run: Path) -> None:
    """Replace the files of all ranks by those of the first start."""
    shutil.rmtree(run / "ledger")
    shutil.copytree(run.parent / "first-start", run / "ledger")


def other_ledger(run: Path) -> None:
    """Replace the ledger by that of a later run with the same data."""
    shutil.rmtree(run / "ledger")
    simulate(run, DESCRIPTION, Generation(2, 0, 14), Generation(2, 12, 13))


def two_writers(run: Path) -> None:
    """Let two processes write as rank 0 of the same start."""
    writers = [open_ledger(run, DESCRIPTION, 0, 1, 2, (2, 5)) for _ in range(2)]
    for step in range(5, 7):
        for writer in writers:
            writer.record_training(2, step, 10 * step, 10)
            writer.flush()
    for writer in writers:
        with pytest.raises(LedgerError, match="was removed or changed while this run wrote it"):
            writer.close()


def many(*damages: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for each in damages:
            each(run)

    return damage


def start_with_size(size: int) -> Callable[[Path], None]:
    return many(without_evidence, change("count", size, RecordKind.START))


def in_shard(name: str) -> Callable[[Path], Path]:
    return lambda run: run / "ledger" / "train" / name


def make_pipe(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        in_shard(name)(run).unlink()
        os.mkfifo(in_shard(name)(run))

    return damage


def flip(run: Path, at: int) -> None:
    with file_of(run, 0).open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def append(run: Path, data: bytes) -> None:
    with file_of(run, 1).open("ab") as file:
        file.write(data)


def set_option(records: np.ndarray, number: int) -> np.ndarray:
    records["first"][(records["kind"] == RecordKind.OPTION) & (records["epoch"] == number)] += 1
    return records


def set_probe(records: np.ndarray) -> np.ndarray:
    records["count"][records["kind"] == RecordKind.PROBE] += 1
    return records


def audited(name: str, says: str, code: int, damage: Callable[[Path], object], command: str = AUDIT) -> Fault:
    return Fault(name, says, code, command=command, prepare=lambda folder: damage(finished_run(folder)))


NOT_ENDED = r"missing: train: the run has not ended \(generation 1 has no end record: it is still running, or it was"
FROM_SUMMARY = "missing: train: summary.json says that training came to epoch 2, step 5, and rank 0 has"

LEFT = "note: train: the script left epoch 2 early, after 50 of 100 samples: they were checked"
LEDGERS = [
    audited("nothing is wrong", f"2 sound {LEFT} compared with: summary.json, step-00000014", 0, lambda run: None),
    # Cut off, removed or replaced
    audited("the last 64 bytes of all files", FROM_SUMMARY, 3, lambda run: cut(run, size=64)),
    audited(
        "the last 64 bytes, nothing to compare",
        rf"{NOT_ENDED} killed and not resumed\); sound up to epoch 2, step 5",
        3,
        many(without_evidence, lambda run: cut(run, size=64)),
    ),
    audited("the last 32 bytes of all files", NOT_ENDED, 3, many(without_evidence, lambda run: cut(run, size=32))),
    audited("one byte of all files", NOT_ENDED, 3, many(without_evidence, lambda run: cut(run, size=1))),
    audited(
        "the last epoch of all files",
        r"and rank 0 has \d+ of \d+ records; rank 1 has",
        3,
        lambda run: cut(run, epoch=2),
    ),
    audited(
        "the last epoch, nothing to compare",
        rf"{NOT_ENDED} killed and not resumed\); sound up to epoch 2, step 0",
        3,
        many(without_evidence, lambda run: cut(run, epoch=2)),
    ),
    audited(
        "a torn last record in an epoch",
        "the last 20 bytes are an incomplete record",
        3,
        many(without_evidence, lambda run: cut(run, size=5 * RECORD_BYTES + 12)),
    ),
    audited(
        "the end of one file",
        "rank 1 of generation 1 recorded no end, but other ranks did: the file is cut off at epoch",
        3,
        many(without_evidence, lambda run: cut(run, size=7 * RECORD_BYTES, ranks=(1,))),
    ),
    audited(
        "one file removed",
        "generation 0 had 2 ranks, but rank 1 recorded nothing: no file of rank 1",
        3,
        lambda run: file_of(run, 1).unlink(),
    ),
    audited(
        "one file emptied",
        "but rank 0 recorded nothing: the file is cut off or was replaced",
        3,
        lambda run: os.truncate(file_of(run, 0), 0),
    ),
    audited(
        "all files removed",
        r"train: no rank has records: the files rank-\*\.bin are missing or empty",
        3,
        lambda run: [file_of(run, rank).unlink() for rank in (0, 1)],
    ),
    audited(
        "all files removed, nothing to compare",
        "none incomplete missing: train: no rank has records",
        3,
        many(without_evidence, lambda run: [file_of(run, rank).unlink() for rank in (0, 1)]),
    ),
    audited(
        "one file is an older copy",
        r"rank 1 recorded nothing: the file is cut off or was replaced",
        3,
        lambda run: shutil.copy(run.parent / "first-start" / "train" / "rank-00001.bin", file_of(run, 1)),
    ),
    audited("all files are older copies", FROM_SUMMARY, 3, rewind),
    audited(
        "all files are older copies, nothing to compare",
        "started 2 times, and there are no records of generation 1",
        3,
        many(
            without_evidence,
            lambda run: [
                shutil.copy(run.parent / "first-start" / "train" / f"rank-0000{rank}.bin", file_of(run, rank))
                for rank in (0, 1)
            ],
        ),
    ),
    audited(
        "cut off before the checkpoint",
        "missing: train: step-00000014 says that training came to epoch 1, step 4",
        3,
        many(lambda run: (run / "summary.json").unlink(), lambda run: cut(run, size=18 * 2 * RECORD_BYTES)),
    ),
    audited(
        "the ledger of another run",
        "fault: train: summary.json belongs to other files of ranks 0, 1: they were",
        1,
        other_ledger,
    ),
    audited(
        "a file of another rank",
        "rank-00001.bin: .* records of rank 0",
        1,
        lambda run: shutil.copy(file_of(run, 0), file_of(run, 1)),
    ),
    audited(
        "shard.json removed",
        "shard.json is missing, and the records next to it cannot be interpreted",
        2,
        lambda run: in_shard("shard.json")(run).unlink(),
    ),
    audited(
        "the folder of the shard removed",
        "missing: summary.json names the shard train, and ledger/train is missing",
        3,
        lambda run: (run / "ledger" / "train").rename(run / "ledger" / "other"),
    ),
    audited(
        "the folder of the ledger removed",
        "is not the folder of a run with a ledger",
        2,
        lambda run: shutil.rmtree(run / "ledger"),
    ),
    audited(
        "an empty folder next to the shard",
        "backup/shard.json is missing",
        2,
        lambda run: (run / "ledger" / "backup").mkdir(),
    ),
    audited(
        "the ledger is a file",
        "is not the folder of a run with a ledger",
        2,
        many(lambda run: shutil.rmtree(run / "ledger"), lambda run: (run / "ledger").write_text("")),
    ),
    audited(
        "a folder that does not exist",
        "nowhere is not the folder of a run with a ledger",
        2,
        lambda run: None,
        "samestep audit nowhere",
    ),
    audited(
        "the folder of the ledger itself",
        "run/ledger is not the folder of a run with a ledger",
        2,
        lambda run: None,
        "samestep audit run/ledger",
    ),
    # Changed
    audited("a lower count", "rank-00001.bin: records .* were changed after they were written", 1, tamper(lower_count)),
    audited(
        "a removed record",
        "records were written before record .*, so records were removed or added",
        1,
        tamper(lambda records: np.delete(records, trained_at(records, 3))),
    ),
    audited(
        "a repeated record",
        "so records were removed or added",
        1,
        tamper(lambda records: np.insert(records, trained_at(records, 3), records[trained_at(records, 3)])),
    ),
    audited(
        "two records exchanged",
        "were changed after they were written",
        1,
        tamper(
            lambda records: records[
                np.r_[
                    0 : trained_at(records, 3),
                    trained_at(records, 4),
                    trained_at(records, 3),
                    trained_at(records, 4) + 1 : len(records),
                ]
            ]
        ),
    ),
    audited(
        "a changed byte",
        "rank-00000.bin: 1 corrupt record, first record 10",
        1,
        lambda run: flip(run, 10 * RECORD_BYTES + 20),
    ),
    audited(
        "random bytes after the end",
        "the last 640 bytes are an incomplete record",
        0,
        lambda run: append(run, b"\xa5" * 640),
    ),
    audited(
        "a file of random bytes",
        "rank 1 recorded nothing: the file is cut off or was replaced",
        3,
        lambda run: file_of(run, 1).write_bytes(np.random.default_rng(0).bytes(4096)),
    ),
    audited("two processes wrote one file", "rank-00000.bin: .* records were written before record", 1, two_writers),
    audited(
        "other samples at the end",
        "generation 1: rank 0 counted 3 samples and recorded 65",
        1,
        many(without_evidence, change("first", 3, RecordKind.END)),
    ),
    # Absurd numbers, with valid checksums and hashes
    audited(
        "epoch 2**32 - 1",
        "1 record.s. with impossible numbers, the first has epoch 4294967295",
        1,
        change("epoch", 2**32 - 1),
    ),
    audited("an epoch in four million", r"epochs 3 to 3999999: no sample counted", 1, change("epoch", 4_000_000)),
    audited(
        "the end in four million epochs",
        "epochs 3 to 3999999: no sample counted",
        1,
        change("epoch", 4_000_000, RecordKind.END),
    ),
    audited(
        "a start in four million epochs",
        "generation 1 has records before its start at epoch 4000000",
        1,
        change("epoch", 4_000_000, RecordKind.START),
    ),
    audited(
        "step 2**63",
        "with impossible numbers, the first has epoch 1, step 9223372036854775808",
        1,
        change("step", 2**63),
    ),
    audited("step 2**36 - 1", r"record\(s\) in the wrong step: rank 0 counted", 1, change("step", 2**36 - 1)),
    audited("position 2**64 - 1", "impossible numbers, .* first 18446744073709551615", 1, change("first", 2**64 - 1)),
    audited(
        "position 2**62",
        "in the wrong step: rank 0 counted positions 4611686018427387904 to",
        1,
        change("first", 2**62),
    ),
    audited("2**32 - 1 samples", "counted more than once", 1, change("count", 2**32 - 1)),
    audited("a world of 0 ranks", "impossible numbers, .* count 0", 1, start_with_size(0)),
    audited(
        "a world of 65535 ranks",
        "generation 1 had 65535 ranks, but ranks 2, 3, 4, .* and 65525 more recorded nothing",
        3,
        start_with_size(65535),
    ),
    audited("a world of 2**32 - 1 ranks", "impossible numbers, .* count 4294967295", 1, start_with_size(2**32 - 1)),
    audited(
        "a start after the end of time",
        "sound",
        0,
        many(without_evidence, change("first", 2**64 - 1, RecordKind.START)),
    ),
    audited(
        "a weight that is not a number",
        "with a wrong weight: .* the first has weight nan instead of 1",
        1,
        change("weight", float("nan")),
    ),
    audited("a negative weight", "weight -1.0 instead of 1", 1, change("weight", -1)),
    audited("generation 65535", "generation 65535 has records but no start record", 1, change("generation", 65535)),
    audited("rank 65535", "generation 1 had 2 ranks, but there are records of rank 65535", 1, change("rank", 65535)),
    audited(
        "n is 10**30",
        "n is 1000000000000000000000000000000, and must be an integer from 1 to",
        2,
        rename_option("n", 10**30),
    ),
    audited("n is negative", "n is -1, and must be an integer", 2, rename_option("n", -1)),
    audited(
        "n is another number",
        "fault: train: shard.json has n=90, and rank 0 of generation 0 recorded another value",
        1,
        rename_option("n", 90),
    ),
    audited("n is huge", "shard.json has n=4611686018427387904, and rank 0", 1, rename_option("n", 2**62)),
    audited(
        "a stream by shard.json",
        "shard.json has n=None, and rank 0 of generation 0 recorded another value",
        1,
        rename_option("n", None),
    ),
    audited("another seed in shard.json", "shard.json has seed=8, and rank 0", 1, rename_option("seed", 8)),
    audited(
        "weights in shard.json", "shard.json has sampling_weights=True, and rank 0", 1, rename_option("weighted", True)
    ),
    audited(
        "a global batch of 2**62",
        "fault: train: shard.json has global_batch=4611686018427387904",
        1,
        rename_option("global_batch", 2**62),
    ),
    audited(
        "a newer version",
        "has version 9, and this samestep reads version 3: update samestep",
        2,
        rename_option("version", 9),
    ),
    audited(
        "shard.json is a list",
        "does not describe a shard",
        2,
        lambda run: in_shard("shard.json")(run).write_text("[1]"),
    ),
    audited(
        "shard.json is not UTF-8",
        "does not describe a shard",
        2,
        lambda run: in_shard("shard.json")(run).write_bytes(b"\xff{}"),
    ),
    audited(
        "shard.json is nested",
        "does not describe a shard",
        2,
        lambda run: in_shard("shard.json")(run).write_text("[" * 10**5),
    ),
    audited("shard.json is a pipe", "cannot be read: it is not a regular file", 2, make_pipe("shard.json")),
    audited("a rank's file is a pipe", "cannot be read: it is not a regular file", 2, make_pipe("rank-00000.bin")),
    audited(
        "a rank's file is a folder",
        "cannot be read: it is not a regular file",
        2,
        many(lambda run: file_of(run, 1).unlink(), lambda run: file_of(run, 1).mkdir()),
    ),
    # Other data
    audited(
        "an option of one rank",
        "shuffle is not the same for rank 0 of generation 0 and rank 1 of generation 0",
        1,
        lambda run: edit(run, 1, lambda records: set_option(records, 2)),
    ),
    audited(
        "sampling weights of one rank",
        "sampling_weights is not the same for rank 0 of generation 0 and rank 1",
        1,
        lambda run: edit(run, 1, lambda records: set_option(records, 5)),
    ),
    audited(
        "another sample on one rank",
        "sample 5 was not the same for rank 0 of generation 0 and rank 1 of generation 0",
        1,
        lambda run: edit(run, 1, set_probe),
    ),
    audited("version 1 on two ranks", "ranks 0, 1 recorded no probes of the data, so it is unknown whether", 3, age(1)),
    audited("version 2", "sound note: train: an older samestep wrote it, without running hashes", 0, age(2)),
    audited("version 2, cut off", NOT_ENDED, 3, many(age(2), lambda run: cut(run, size=RECORD_BYTES))),
    # Summary and checkpoints
    audited(
        "more samples in summary.json",
        "summary.json says that 300 samples were trained, and the ledger has 250: a start had",
        3,
        lambda run: write_summary(run, samples=300),
    ),
    audited(
        "more samples of a failed run",
        f"sound {LEFT} compared with: summary.json",
        0,
        lambda run: write_summary(run, samples=300, status="failed"),
    ),
    audited(
        "summary.json without a ledger",
        r"not compared with: summary.json \(it does not describe the ledger\)",
        0,
        lambda run: (run / "summary.json").write_text('{"samples": 250}'),
    ),
    audited(
        "summary.json is garbage",
        "not compared with: summary.json",
        0,
        lambda run: (run / "summary.json").write_bytes(b"\xff\0"),
    ),
    audited(
        "summary.json is a list",
        "not compared with: summary.json",
        0,
        lambda run: (run / "summary.json").write_text("[1]"),
    ),
    audited(
        "summary.json is a folder",
        "not compared with: summary.json",
        0,
        many(lambda run: (run / "summary.json").unlink(), lambda run: (run / "summary.json").mkdir()),
    ),
    audited(
        "summary.json has a float",
        "not compared with: summary.json",
        0,
        lambda run: write_summary(run, ledger={"train": [{**asdict(states(run)[0][0]), "records": 1.5}]}),
    ),
    audited(
        "summary.json has negative numbers",
        "summary.json belongs to other files of rank 0",
        1,
        lambda run: write_summary(run, ledger={"train": [{**asdict(states(run)[0][0]), "records": -7}]}),
    ),
    audited(
        "summary.json has 10**30 records",
        "rank 0 has 63 of 1000000000000000000000000000000 records",
        3,
        lambda run: write_summary(run, ledger={"train": [{**asdict(states(run)[0][0]), "records": 10**30}]}),
    ),
    audited(
        "more ranks in summary.json",
        "and rank 2 has 0 of 63 records",
        3,
        lambda run: write_summary(run, ledger=describe_files([*states(run), states(run)[0]])),
    ),
    audited(
        "a checkpoint of another ledger",
        rf"sound {LEFT} compared with: summary.json not compared with: old/step-00000014 \(it belongs to another",
        0,
        lambda run: [
            simulate(run / "old", DESCRIPTION, Generation(2, 0, 14)),
            write_checkpoint(run / "old"),
            shutil.rmtree(run / "step-00000014"),
        ],
    ),
    audited(
        "a manifest is garbage",
        "not compared with: step-00000014",
        0,
        lambda run: (run / "step-00000014" / "manifest.json").write_text("{"),
    ),
]


@pytest.mark.slow
@cases(LEDGERS)
def test_the_audit_of_a_damaged_ledger_ends_with_its_verdict(fault, tmp_path, monkeypatch, capsys):
    """In this process, since a hundred processes would take a minute."""
    fault.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main(fault.command.split()[1:])
    captured = capsys.readouterr()
    text = " ".join((captured.out + captured.err).split())
    assert code == fault.code, text
    assert re.search(fault.says, text), text
    if fault.code != 2:
        assert main([*fault.command.split()[1:], "--json"]) == fault.code
        report = json.loads(capsys.readouterr().out)
        assert {0: "sound", 1: "faulty", 3: "incomplete"}[fault.code] == report["verdict"]


HEAD = """
    import os, torch
    from torch.utils.data import IterableDataset
    from samestep import Run

    rank = int(os.environ["RANK"])

    def train(data, stream=False, **options):
        with Run(global_batch=4, seed=0, folder="run", ledger=True) as run:
            shard = run.stream(data) if stream else run.shard(data, num_workers=0, **options)
            for epoch in shard.epochs(2):
                for step in epoch:
                    for _ in step:
                        pass
"""


def trained(name: str, says: str, body: str, code: int = 1) -> Fault:
    return Fault(name, says, code, HEAD + body, ranks=2)


DURING = """
    with Run(global_batch=4, folder="run", ledger=True, step_timeout=20) as run:
        data = run.shard(range(40), num_workers=0)
        for epoch in data.epochs(2):
            for step in epoch:
                for _ in step:
                    pass
                path = f"run/ledger/shard-0/rank-0000{{rank}}.bin"
                if step.number == 12 and rank == 0:
                    {action}
            # saves
"""

RUNS = [
    trained(
        "shuffle differs by rank",
        "run.shard has shuffle=True on rank 0 and shuffle=False on rank 1",
        """
    train(range(10), shuffle=rank == 0)
""",
    ),
    trained(
        "sampling weights differ by rank",
        "run.shard has sampling_weights=.* on rank 0 and sampling_weights=.* on",
        """
    train(range(10), sampling_weights=torch.arange(1.0, 11) + rank)
""",
    ),
    trained(
        "drop_last differs by rank",
        "run.shard has drop_last=False on rank 0 and drop_last=True on rank 1",
        """
    train(range(10), drop_last=rank == 1)
""",
    ),
    trained(
        "the name differs by rank",
        "run.shard has name=train-0 on rank 0 and name=train-1 on rank 1",
        """
    train(range(10), name=f"train-{rank}")
""",
    ),
    trained(
        "the order differs by rank",
        "list differs between ranks: sample 0 is 0 on rank 0 and 9 on rank 1",
        """
    train(list(range(10))[::-1 if rank else 1])
""",
    ),
    trained(
        "a dataset sharded by the user",
        "list differs between ranks: sample 0 is 0 on rank 0 and 1 on rank 1",
        """
    train(list(range(20))[rank::2])
""",
    ),
    trained(
        "a subset of its own per rank",
        "Subset differs between ranks: sample 0 is",
        """
    from torch.utils.data import Subset
    train(Subset(list(range(20)), range(10 * rank, 10 * rank + 10)))
""",
    ),
    trained(
        "files listed in another order",
        "list differs between ranks: sample 0 is 'a' on rank 0 and 'd' on rank 1",
        """
    train(["a", "b", "c", "d"][::-1 if rank else 1])
""",
    ),
    trained(
        "a random split without a seed",
        "Subset differs between ranks",
        """
    from torch.utils.data import random_split
    torch.manual_seed(rank)
    train(random_split(list(range(100)), [50, 50], generator=torch.Generator().manual_seed(rank))[0])
""",
    ),
    trained(
        "a longer dataset on one rank",
        "the same length on all ranks: 10 on rank 0, 11 on rank 1",
        """
    train(range(10 + rank))
""",
    ),
    trained(
        "a stream that splits itself",
        "the stream Split differs between ranks: record 0 is 0 on rank 0 and 1 on rank 1",
        """
    class Split(IterableDataset):
        def __iter__(self):
            return iter(range(rank, 20, 2))
    train(Split(), stream=True)
""",
    ),
    trained(
        "a stream that is shorter on one rank",
        "4 on rank 0, 3 on rank 1",
        """
    class Short(IterableDataset):
        def __iter__(self):
            return iter(range(20 if rank == 0 else 3))
    train(Short(), stream=True)
""",
    ),
    trained(
        "a ledger on one rank only",
        r"has Run\(global_batch=4, seed=0, ledger=True\) and rank 1 has Run\(global_batch=4, seed=0, ledger=False\)",
        """
    with Run(global_batch=4, folder="run", ledger=rank == 0) as run:
        run.shard(range(10))
""",
    ),
    trained(
        "two shards of one name",
        "two shards are named 'train', and each needs its own ledger",
        """
    with Run(global_batch=4, folder="run", ledger=True) as run:
        run.shard(range(10), name="train"), run.shard(range(10), name="train")
""",
    ),
    trained(
        "a shard name with a slash",
        "shard name 'a/b' cannot be a folder name",
        """
    train(range(10), name="a/b")
""",
    ),
    trained(
        "a file where the ledger should be",
        "the ledger .* cannot be written: ",
        """
    if rank == 0:
        os.makedirs("run"), open("run/ledger", "w").close()
    train(range(10))
""",
    ),
    trained(
        "another dataset in the same folder",
        "describes other data: n was 10 and is now 12; use a new folder",
        """
    train(range(10))
    train(range(12))
""",
    ),
    trained(
        "a corrupt shard.json at the restart",
        "shard.json does not describe a shard",
        """
    train(range(10))
    open("run/ledger/shard-0/shard.json", "w").write("{")
    train(range(10))
""",
    ),
    trained(
        "the ledger is removed during training",
        "the ledger .*rank-00000.bin was removed or changed while this run wrote it: let only one run",
        DURING.format(action="os.unlink(path)"),
    ),
    trained(
        "the ledger is cut off during training",
        "the ledger .*rank-00000.bin was removed or changed while this run wrote it",
        DURING.format(action="os.truncate(path, 100)"),
    ),
    trained(
        "another process writes to the ledger",
        "the ledger .*rank-00000.bin was removed or changed while this run wrote it",
        DURING.format(action="open(path, 'ab').write(bytes(32))"),
    ),
    trained(
        "the ledger is removed before a checkpoint",
        "rank 0: the ledger .*rank-00000.bin was removed or changed while this run wrote it",
        DURING.format(action="os.unlink(path)").replace(
            "# saves", "epoch.number and run.checkpoint('saved', data=data).save()"
        ),
    ),
    trained(
        "numpy numbers",
        "ended",
        """
    import numpy as np
    with Run(global_batch=np.int64(4), seed=np.int64(1), folder="run", ledger=True) as run:
        for epoch in run.shard(range(10), shuffle=np.bool_(True), num_workers=0).epochs(1):
            for step in epoch:
                for _ in step:
                    pass
    from samestep.cli.main import main
    assert main(["audit", "run"]) == 0
    print("ended")
""",
        0,
    ),
]


@pytest.mark.slow
@cases(RUNS)
def test_ranks_that_disagree_about_the_data_end_with_the_sentence(fault, tmp_path):
    check(fault, tmp_path)


RESUMED = """
    import os, sys, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from samestep import Run

    data = TensorDataset(torch.arange(30.0)[:, None])
    with Run(global_batch=5, seed=0, folder="run", ledger=True) as run:
        model = run.wrap(nn.Linear(1, 1))
        train = run.shard(data, shuffle=True, num_workers=0, name="train")
        checkpoint = run.checkpoint({folder!r}, model=model, train=train)
        for epoch in train.epochs(2):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).sum(1)).backward()
                if step.number in (2, 7):
                    checkpoint.save()
                if step.number == 4 and checkpoint.restored is None:
                    checkpoint.wait()
                    {end}
"""


def resume(folder: Path, end: str, checkpoints: str, code: int, ranks: int) -> None:
    script = RESUMED.replace("{end}", end).replace("{folder!r}", repr(checkpoints))
    check(Fault(end, "", code, script, ranks), folder)


def verdict(capsys, folder: Path, *lines: str) -> tuple[int, str]:
    code = main(["audit", str(folder / "run")])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["run", "run/saved", "elsewhere"])
def test_a_killed_run_is_incomplete_until_it_is_resumed(tmp_path, capsys, checkpoints):
    resume(tmp_path, "os._exit(7)", checkpoints, code=7, ranks=1)
    code, text = verdict(capsys, tmp_path)
    assert code == 3
    assert "the run has not ended (generation 0 has no end record" in text
    assert ("step-00000003" in text) == (checkpoints != "elsewhere")  # a killed run has no summary that names it
    resume(tmp_path, "pass", checkpoints, code=0, ranks=2)
    code, text = verdict(capsys, tmp_path)
    folder = {"run": "", "run/saved": "saved/", "elsewhere": f"{tmp_path}/elsewhere/"}[checkpoints]
    assert code == 0, text
    assert f"compared with: summary.json, {folder}step-00000003, {folder}step-00000008" in text
    path = tmp_path / "run" / "ledger" / "train" / "rank-00000.bin"
    os.truncate(path, path.stat().st_size - 64)
    code, text = verdict(capsys, tmp_path)
    assert code == 3
    assert "summary.json says that training came to epoch 1, step 6, and rank 0 has" in text
    (tmp_path / "run" / "summary.json").unlink()
    os.truncate(path, path.stat().st_size - 7 * RECORD_BYTES)
    code, text = verdict(capsys, tmp_path)
    assert code == 3
    says = f"missing: train: {folder}step-00000008 says that training came to epoch 1, step 2"
    assert (says in text) == (checkpoints != "elsewhere"), text


def test_a_failed_run_is_incomplete_and_sound_up_to_the_failure(tmp_path, capsys):
    resume(tmp_path, "raise ValueError('broken')", "run", code=1, ranks=2)
    code, text = verdict(capsys, tmp_path)
    assert code == 3, text
    failed = "missing: train: the run failed at epoch 0, step 5 in generation 0 and was not resumed; sound up to epoch"
    assert failed in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"]["train"][0]["epoch"] == 0


def test_a_start_without_a_ledger_is_found_by_its_samples(tmp_path, capsys):
    resume(tmp_path, "run.close(); sys.exit()", "run", code=0, ranks=1)
    assert verdict(capsys, tmp_path)[0] == 0
    script = RESUMED.replace("ledger=True", "ledger=False").replace("{end}", "pass").replace("{folder!r}", "'run'")
    check(Fault("without a ledger", "", 0, script), tmp_path)
    code, text = verdict(capsys, tmp_path)
    assert code == 3
    assert "missing: summary.json says that 60 samples were trained, and the ledger has 25: a start had no" in text
