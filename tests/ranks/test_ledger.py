"""The ledgers of real runs have no faults after failures, resumes and changes of world size."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import IterableDataset, TensorDataset

from samestep import Run
from samestep.cli.audit_command import command
from samestep.data.audit import audit


class SimulatedFailure(Exception):
    pass


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(17))


def train(folder, epochs, state=None, fail_at=None, save_at=None, stream=False):
    """Train, save the position after `save_at`, fail inside step `fail_at`; return the position to resume from."""
    saved = state
    try:
        with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
            data = (
                run.stream(Count())
                if stream
                else run.shard(TensorDataset(torch.arange(23.0)), shuffle=True, micro_batch=2)
            )
            test = run.shard(TensorDataset(torch.arange(7.0)))
            if state is not None:
                data.load_state_dict(state)
            for epoch in data.epochs(epochs):
                for step in epoch:
                    for _ in step:
                        if step.number == fail_at:
                            raise SimulatedFailure
                    if step.number == save_at:
                        saved = data.state_dict()
                run.mean(x for (x,) in test)
    except SimulatedFailure:
        import gc

        import torch.distributed as dist

        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_every_sample_counts_once_after_failures_and_changes_of_world_size(ranks, tmp_path, stream):
    state = ranks(2, train, tmp_path, 3, None, 5, 3, stream)[0]  # steps 4 and 5 are lost and repeated
    state = ranks(3, train, tmp_path, 3, state, 9, 7, stream)[0]
    ranks(1, train, tmp_path, 3, state, None, None, stream)
    report = audit(tmp_path)
    assert report.exactly_once
    trained = next(shard for shard in report.shards if shard.name.startswith("stream" if stream else "shard-0"))
    assert [(epoch.number, epoch.samples) for epoch in trained.epochs] == [(e, 17 if stream else 23) for e in range(3)]
    assert [each.world_size for each in trained.generations] == [2, 3, 1]
    answer = CliRunner().invoke(command, [str(tmp_path), "--json"])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["exactly_once"] is True


def test_a_step_that_the_loop_skipped_is_a_fault(ranks, tmp_path):
    ranks(2, skip_a_step, tmp_path)
    answer = CliRunner().invoke(command, [str(tmp_path)])
    assert answer.exit_code == 1
    assert "step 1" in answer.output
    assert not audit(tmp_path).exactly_once


def skip_a_step(folder):
    with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
        data = run.shard(TensorDataset(torch.arange(23.0)), shuffle=True)
        for epoch in data.epochs(1):
            for step in epoch:
                if step.number == 1:
                    continue  # no sample of it is trained
                for _ in step:
                    pass


def evaluate_only(folder):
    with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
        return float(run.mean(x for (x,) in run.shard(TensorDataset(torch.arange(7.0)), name="test")))


def test_a_run_that_logs_nothing_has_a_summary_with_the_files_of_all_ranks(ranks, tmp_path):
    assert ranks(2, evaluate_only, tmp_path) == [3.0, 3.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "events.jsonl", "ledger", "summary.json"]
    described = json.loads((tmp_path / "summary.json").read_text())["ledger"]["test"]
    for rank, state in enumerate(described):
        path = tmp_path / "ledger" / "test" / f"rank-{rank:05}.bin"
        assert path.stat().st_size == 32 * state["records"]
    assert len(described) == 2
    report = audit(tmp_path)
    assert (report.verdict, report.compared, report.not_compared) == ("sound", ("summary.json",), ())


def test_a_run_without_a_ledger_has_no_description_of_it(ranks, tmp_path):
    ranks(1, log_once, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()).keys().isdisjoint({"ledger", "checkpoints"})


def log_once(folder):
    with Run(global_batch=6, seed=1, folder=folder) as run:
        run.log({"val/accuracy": 1.0})


def leave_or_skip(folder, how, stream):
    """Three epochs of which some are left early, or whose last step is skipped."""
    with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
        data = run.stream(Count()) if stream else run.shard(TensorDataset(torch.arange(17.0)))
        for epoch in data.epochs(3):
            for step in epoch:
                if how == "skip" and epoch.number == 2 and step.number % 3 == 2:
                    continue
                for _ in step:
                    pass
                if how == "break" or (how == "break first" and epoch.number == 0):
                    break


VERDICTS = {
    ("", False): ("sound", ""),
    ("", True): ("sound", ""),
    ("skip", False): ("faulty", "epoch 2: 5 samples never counted"),
    ("skip", True): ("faulty", "epoch 2: 5 positions never counted"),
    ("break", False): ("faulty", "epoch 0: 11 samples never counted"),
    ("break", True): ("incomplete", "epoch 0: the end of the stream was not reached"),
    ("break first", True): ("incomplete", "epoch 0: the end of the stream was not reached"),
}


@pytest.mark.parametrize(("how", "stream"), VERDICTS, ids=str)
def test_steps_and_epochs_that_the_script_left_out_are_reported(ranks, tmp_path, how, stream):
    ranks(2, leave_or_skip, tmp_path, how, stream)
    (shard,) = audit(tmp_path).shards
    verdict, text = VERDICTS[how, stream]
    assert shard.verdict == verdict
    assert text in " ".join(each.text for each in (*shard.faults, *shard.missing))


def train_on(folder, offset):
    with Run(global_batch=6, seed=1, folder=folder, ledger=True) as run:
        data = run.shard(TensorDataset(torch.arange(17.0) + offset))
        for epoch in data.epochs(1):
            for step in epoch:
                for _ in step:
                    pass


def test_a_start_on_other_data_of_the_same_length_is_an_error(ranks, tmp_path):
    ranks(2, train_on, tmp_path, 0.0)
    for text in ranks.errors(2, train_on, tmp_path, 100.0):
        assert "LedgerError: the ledger " in text
        assert "shows that sample 0 was another one at an earlier start of this run: restore the data" in text
