"""`run.profile`: valid traces with phases, a table of operations, the right steps and ranks, and no cost without it."""

import gzip
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import Run
from samestep.environment.world import PROFILE, profiled_steps
from samestep.errors import WorldError
from tests.launch.launched import start
from tests.small_disk import small_disk

STEPS_PER_EPOCH = 4


def train(
    folder, profile, epochs=2, ranks=(0,), fail_at=None, save=False, skip=()
):  # at module level: it is sent to the ranks by name
    """Train 4 steps per epoch; returns the warnings of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Run(global_batch=4, seed=0, folder=folder) as run:
            model = run.wrap(nn.Linear(3, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = run.shard([torch.ones(3)] * (4 * STEPS_PER_EPOCH))
            checkpoint = run.checkpoint(Path(folder) / "out", model=model, train=data) if save else None
            for steps in profile:
                run.profile(steps, ranks)
            for epoch in data.epochs(epochs):
                for step in epoch:
                    if step.number in skip:
                        continue
                    for x in step:
                        step.mean(model(x).squeeze(1)).backward()
                    if step.number == fail_at:
                        raise ValueError("step failed")
                    optimizer.step()
                    optimizer.zero_grad()
                if checkpoint is not None:
                    checkpoint.save()
    return [str(each.message) for each in caught]


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").glob("*")) if (folder / "profile").exists() else []


def read_trace(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def named(events: list[dict], row: str) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == row]


def test_each_rank_writes_a_trace_and_a_table(ranks, tmp_path):
    assert ranks(2, train, tmp_path, [range(5, 7)], 2, (0, 1)) == [[], []]

    assert traces(tmp_path) == [f"rank-{rank}-steps-5-6.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    for rank in (0, 1):
        events = read_trace(tmp_path / "profile" / f"rank-{rank}-steps-5-6.json.gz")
        assert named(events, "steps") == ["step 5", "step 6"]
        assert {"data", "forward", "backward", "optimizer"} <= set(named(events, "phases"))
        steps = [event for event in events if event.get("cat") == "steps"]
        operations = [event for event in events if event.get("name") == "aten::linear"]
        assert len(operations) == 2, "one forward pass in each of the two steps"
        for step, operation in zip(steps, operations, strict=True):
            assert step["ts"] <= operation["ts"] <= step["ts"] + step["dur"], "rows of samestep have the trace's clock"
        table = (tmp_path / "profile" / f"rank-{rank}-steps-5-6.txt").read_text()
        assert table.startswith(f"steps 5 to 6 of rank {rank} of 2 on cpu\nMilliseconds of the host per step: ")
        assert "aten::" in table
        assert "Self CPU" in table
    text = (
        "profile of steps 5 to 6 of rank 0, rank 1: traces for https://ui.perfetto.dev, and tables of the slowest "
        f"operations, in {tmp_path}/profile"
    )
    assert text in (tmp_path / "log.txt").read_text()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "profile"]
    assert (event["steps"], event["ranks"]) == ([5, 6], [0, 1])
    assert event["files"] == ["profile/rank-0-steps-5-6.json.gz", "profile/rank-1-steps-5-6.json.gz"]


def test_steps_that_do_not_follow_each_other_have_separate_traces(ranks, tmp_path):
    assert ranks(1, train, tmp_path, [[0, 2, 3], [7]]) == [[]]
    assert traces(tmp_path)[::2] == [f"rank-0-steps-{steps}.json.gz" for steps in ("0-0", "2-3", "7-7")]


def test_a_rank_that_is_not_rank_0_can_be_the_only_one(ranks, tmp_path):
    ranks(2, train, tmp_path, [range(1, 2)], 1, (1,))
    assert traces(tmp_path) == ["rank-1-steps-1-1.json.gz", "rank-1-steps-1-1.txt"]
    assert "profile of step 1 of rank 1: traces" in (tmp_path / "log.txt").read_text()


def test_a_resumed_run_counts_its_steps_from_the_first_start(ranks, tmp_path):
    ranks(1, train, tmp_path, [], 1, (0,), None, True)
    assert ranks(1, train, tmp_path, [range(4, 6)], 2, (0,), None, True) == [[]]
    assert named(read_trace(tmp_path / "profile" / "rank-0-steps-4-5.json.gz"), "steps") == ["step 4", "step 5"]


def test_steps_that_were_not_trained_give_a_warning_at_the_end(ranks, tmp_path):
    (shown,) = ranks(1, train, tmp_path, [range(6, 10)])
    assert shown == [
        "run.profile has not recorded steps 8 to 9: this process has trained steps 0 to 7, and steps count from 0 over "
        "all epochs and restarts; choose others"
    ]
    assert traces(tmp_path)[0] == "rank-0-steps-6-7.json.gz"


def test_a_run_that_trains_no_step_says_so(ranks, tmp_path):
    (shown,) = ranks(1, train, tmp_path, [range(1, 3)], 0)
    assert shown[0].startswith("run.profile has not recorded steps 1 to 2: this process has trained no steps, and")


def test_a_step_is_recorded_once(ranks, tmp_path):
    (shown,) = ranks(1, train, tmp_path, [range(2), range(1, 3)])
    assert shown == [
        "run.profile records step 1 once, with the ranks and options of the first call, or of `samestep run "
        "--profile`: profile each step once"
    ]
    assert traces(tmp_path)[::2] == ["rank-0-steps-0-1.json.gz", "rank-0-steps-2-2.json.gz"]


def test_an_exception_leaves_a_valid_trace_and_no_warning(ranks, tmp_path):
    assert "ValueError: step failed" in ranks.errors(1, train, tmp_path, [range(2, 6)], 2, (0,), 3)[0]
    events = read_trace(tmp_path / "profile" / "rank-0-steps-2-3.json.gz")
    assert named(events, "steps") == ["step 2", "step 3"]
    assert "run.profile" not in (tmp_path / "log.txt").read_text().replace("profile of", "")


def test_a_full_disk_costs_the_profile_and_not_the_run(ranks, tmp_path):
    with small_disk(tmp_path / "disk", 128) as disk:  # the trace has more before it is compressed
        (shown,) = ranks(1, train, disk.path, [range(8)])
        assert shown == [
            f"the profile of steps 0 to 7 of rank 0 cannot be written to {disk.path}/profile: the disk may "
            "be full: free some space; training continues without it"
        ]
        assert traces(disk.path) == []
        events = [json.loads(line)["event"] for line in (disk.path / "events.jsonl").read_text().splitlines()]
        assert "profile" not in events
        assert "end" in events
        assert json.loads((disk.path / "summary.json").read_text())["steps"] == 8


def refuse_a_profile(folder):
    (Path(folder) / "profile").write_text("")  # a file where the folder should be
    return train(folder, [range(2)])


def test_a_folder_that_cannot_be_written_is_named(ranks, tmp_path):
    (shown,) = ranks(1, refuse_a_profile, tmp_path)
    assert shown == [
        f"the profile of steps 0 to 1 of rank 0 cannot be written to {tmp_path}/profile: a file is where a folder "
        "is needed: choose another folder; training continues without it"
    ]


def test_steps_without_micro_batches_are_in_the_trace(ranks, tmp_path):
    ranks(1, train, tmp_path, [range(1, 4)], 1, (0,), None, False, (2,))
    assert named(read_trace(tmp_path / "profile" / "rank-0-steps-1-3.json.gz"), "steps") == [
        "step 1",
        "step 2",
        "step 3",
    ]


def from_variable(folder):
    from samestep.environment.world import export

    export({PROFILE: "1:3"})
    try:
        return train(folder, [])
    finally:
        export({PROFILE: None})


def test_the_variable_of_samestep_run_profiles_any_script(ranks, tmp_path):
    assert ranks(1, from_variable, tmp_path) == [[]]
    assert traces(tmp_path) == ["rank-0-steps-1-2.json.gz", "rank-0-steps-1-2.txt"]


def test_an_invalid_variable_is_an_error():
    with pytest.raises(WorldError) as raised:
        profiled_steps({PROFILE: "10"})
    assert str(raised.value) == (
        "SAMESTEP_PROFILE=10 does not name steps: set it as in SAMESTEP_PROFILE=10:13, which are the steps 10 to 12, "
        "or run `unset SAMESTEP_PROFILE`"
    )


@pytest.mark.parametrize(
    ("steps", "of_ranks", "text"),
    [
        (
            range(0),
            (0,),
            "run.profile got steps=range(0, 0): pass at least one step, counted from 0, as in steps=range",
        ),
        ([1.5], (0,), "run.profile got steps=[1.5]: pass at least one step, counted from 0, as in steps=range(10, 13)"),
        (range(3), (), "run.profile got ranks=(): pass some of the ranks 0 to 0"),
        (range(3), (1,), "run.profile got ranks=(1,): pass some of the ranks 0 to 0"),
    ],
    ids=str,
)
def test_steps_and_ranks_that_no_run_has_are_refused(ranks, tmp_path, steps, of_ranks, text):
    assert f"ConfigError: {text}" in ranks.errors(1, train, tmp_path, [steps], 1, of_ranks)[0]


def without_profile(folder):
    sys.modules.pop("samestep.training.profiler", None)  # of another test in this process
    with Run(global_batch=4, folder=folder) as run:
        loop, times = run._lifecycle.loop, run._lifecycle.context.times
        for epoch in run.shard([torch.ones(3)] * 8).epochs(1):
            for step in epoch:
                for _ in step:
                    recording = torch.autograd.profiler._is_profiler_enabled
        hooks = [*loop.before_step, *loop.after_step]
        return "samestep.training.profiler" in sys.modules, recording, hooks, times.observer


def test_a_run_without_a_profile_imports_and_calls_nothing_of_it(ranks, tmp_path):
    assert ranks(1, without_profile, tmp_path) == [(False, False, [], None)]


def after_profile(folder):
    with Run(global_batch=4, folder=folder) as run:
        loop, times = run._lifecycle.loop, run._lifecycle.context.times
        run.profile([0])
        for epoch in run.shard([torch.ones(3)] * 8).epochs(1):
            for step in epoch:
                list(step)
        return [*loop.before_step, *loop.after_step], times.observer


def test_nothing_is_called_any_more_after_the_last_step(ranks, tmp_path):
    assert ranks(1, after_profile, tmp_path) == [([], None)]


SCRIPT = """
    import torch
    from samestep import Run

    with Run(global_batch=4) as run:
        for epoch in run.shard([torch.ones(3)] * 20).epochs(1):
            for step in epoch:
                for x in step:
                    x + 1
"""


@pytest.mark.slow
def test_samestep_run_profiles_a_script_as_it_is(tmp_path, tmp_path_factory):
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    options = ["--profile", "2:4", "--nproc-per-node", "1", "--folder", "kept", "train.py"]
    ended = start(tmp_path, SCRIPT, *options, env=cache).finish()
    assert ended.code == 0, ended.err
    assert "profile of steps 2 to 3 of rank 0: traces for https://ui.perfetto.dev" in ended.out
    assert ended.err.count("\n") == 1, "torch's profiler writes nothing to stderr, only the launcher does"
    assert named(read_trace(tmp_path / "kept" / "profile" / "rank-0-steps-2-3.json.gz"), "steps") == [
        "step 2",
        "step 3",
    ]
