"""`samestep audit` prints a table or JSON and exits with 0, 1 or 3."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from samestep.cli.audit_command import command
from samestep.data.audit import audit
from samestep.data.partition import EvaluationPartition
from samestep.errors import LedgerError
from tests.unit.simulated_ledgers import (
    DESCRIPTION,
    Generation,
    audit_train,
    edit,
    evaluate,
    file_of,
    find_trained,
    open_ledger,
    simulate,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Simulate 25 steps of 10 samples each, on 2 ranks and, from step 12 on, on 3 ranks."""
    simulate(tmp_path, DESCRIPTION, Generation(2, 0, 14, "killed"), Generation(3, 12, 13), evaluate_every=4)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_exits_with_0(run):
    code, text = invoke(str(run))
    assert code == 0
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["shard", "epochs", "samples", "evaluations", "restarts", "ranks", "verdict"]
    assert " ".join(lines[2]) == "train 2 and 5 steps 250 5 and 1 unfinished 1 2, 3 sound"


def test_the_command_prints_the_faults_and_exits_with_1(run):
    edit(run, 1, lambda records: np.delete(records, find_trained(records, epoch=1, step=5)))
    code, text = invoke(str(run))
    assert code == 1
    assert "2, 3 faulty" in " ".join(text.split())
    assert f"fault: train: {audit_train(run).faults[0].text}\n" in text


def test_the_command_says_what_is_missing_and_exits_with_3_also_if_no_shard_is_sound(run):
    for rank in range(3):
        os.truncate(file_of(run, rank), file_of(run, rank).stat().st_size - 64)
    code, text = invoke(str(run))
    assert code == 3
    assert "2, 3 incomplete" in " ".join(text.split())
    assert "missing: train: the run has not ended" in text


def test_the_command_prints_json(run):
    with file_of(run, 2).open("ab") as file:
        file.write(b"part")
    code, text = invoke(str(run), "--json")
    report = json.loads(text)
    assert code == 0
    assert report["exactly_once"] is True
    assert report["folder"] == str(run)
    (train,) = report["shards"]
    assert (train["name"], train["exactly_once"], train["faults"], len(train["notes"])) == ("train", True, [], 2)
    assert train["epochs"][2] == {"number": 2, "complete": False, "steps": 5, "samples": 50}
    code, text = invoke(str(run))
    assert "note: train: rank-00002.bin: the last 4 bytes" in text


def test_every_shard_of_a_run_is_audited(run):
    for rank in range(2):
        test = replace(DESCRIPTION, shuffle=False)
        ledger = open_ledger(run, test, rank, 2, name="test")
        evaluate(ledger, EvaluationPartition(100, 7, rank, 2))
        ledger.record_evaluation(1, 0, rank, 1)
        ledger.close()
    edit(run, 1, lambda records: np.delete(records, find_trained(records, epoch=1, step=5)))
    report = audit(run)
    assert [(each.name, each.exactly_once) for each in report.shards] == [("test", True), ("train", False)]
    assert not report.exactly_once
    _, text = invoke(str(run))
    assert "test 0 0 1 and 1 unfinished 0 2 sound" in " ".join(text.split())


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: (folder / "ledger").mkdir()])
def test_a_folder_without_a_ledger_is_an_error(tmp_path, make):
    make(tmp_path)
    with pytest.raises(
        LedgerError, match=r"is not the folder of a run with a ledger \(there is no .*/ledger/SHARD/shard\.json"
    ):
        audit(tmp_path)


def test_a_ledger_without_its_description_is_an_error(run):
    (run / "ledger" / "train" / "shard.json").unlink()
    with pytest.raises(LedgerError, match=r"shard\.json is missing, and the records next to it cannot be interpreted"):
        audit(run)
