"""The text and the JSON of a hang, and how stacks and collectives are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.hang import evidence as evidence_module
from samestep.hang.evidence import Frame, read_evidence, user_frame
from samestep.hang.hang_cause import find_cause
from samestep.hang.hang_report import (
    JSON_VERSION,
    format_frame,
    format_overview,
    format_report,
    format_summary,
    format_unreadable,
    report_json,
)
from samestep.hang.wait_graph import describe_call, format_ranks, operation
from tests.hang import simulated_ranks as sim
from tests.hang.simulated_ranks import at, barrier, c10d, call, done, line, others, rank, torch_frame, worker

SAMESTEP = Path(evidence_module.__file__).parent.parent
EVIDENCE = [
    *others([0], done(call(39, seconds=43.0)), call(40)),
    rank(
        1,
        done(call(39, seconds=43.0)),
        stack=sim.WAITS_FOR_LOADER,
        children=[worker(4501, sim.READS_SAMPLE)],
        threads={"Thread-1": at(4)},
        full_disk="/scratch",
        oom_kills=2,
        last_lines=["epoch 3"],
    ),
    rank(2, answers=False, stack=at(9), state="running", cpu=1.0),
    rank(3, answers=False, state="gone", exit_code=0, last_lines=["done"]),
    rank(4, answers=False, state="gone", exit_code=-9),
]


@pytest.fixture(autouse=True)
def sources():
    sim.add_sources()
    yield
    sim.remove_sources()


def test_the_summary_is_a_few_lines():
    cause = find_cause(EVIDENCE[:2])
    assert cause is not None
    assert format_summary(cause) == (
        "samestep: rank 1 is holding up rank 0 for 42 s.\n"
        "  rank 0 waits in all_reduce #40 (DDP gradients, 264,970 elements), called from /job/train.py:5: "
        "loss.backward()\n"
        "  rank 1 (node gpu-07, pid 4001) has not called it; it is waiting for its DataLoader, at /job/train.py:3: "
        "for batch in loader:\n"
        "  its last collective was #39, 43 s ago; its process sleeps\n"
        "  its data worker (pid 4501) is at /job/dataset.py:3: return read(self.files[index])\n"
        "  rank 1 may still arrive: rank 0 waits for up to 10 min\n"
        "  what to do: repair what the dataset waits for, or set `timeout=` of the DataLoader so that it raises instead"
    )


def test_the_report_shows_all_ranks():
    cause = find_cause(EVIDENCE)
    assert cause is not None
    summary, overview, *ranks = format_report(cause, list(reversed(EVIDENCE))).split("\n\n")
    assert summary == format_summary(cause)
    assert overview.splitlines() == [
        "rank 0 (node gpu-07, pid 4000): sleeps, 1 pending collective, at /job/train.py:5: loss.backward()",
        "rank 1 (node gpu-07, pid 4001): sleeps, 0 pending collectives, at /job/train.py:3: for batch in loader:",
        "rank 2 (node gpu-07, pid 4002): runs at 100 % CPU, does not answer, at /job/train.py:9: time.sleep(120)",
        "rank 3 (node gpu-07, pid 4003): ended with exit code 0",
        "rank 4 (node gpu-07, pid 4004): ended by signal 9",
    ]
    assert [text.splitlines()[0] for text in ranks] == [
        f"--- rank {number} (node gpu-07, pid 400{number}) ---" for number in range(5)
    ]
    assert ranks[1].splitlines()[1:] == [
        "thread main (the innermost line first)",
        "  /usr/lib/python3.11/multiprocessing/connection.py:1 in wait",
        f"  {sim.PACKAGES}/torch/utils/data/dataloader.py:1 in _try_get_data",
        f"  {sim.PACKAGES}/torch/utils/data/dataloader.py:1 in __next__",
        "  /job/train.py:3 in main",
        "  /job/train.py:15 in <module>",
        "thread Thread-1 (the innermost line first)",
        "  /job/train.py:4 in main",
        "  /job/train.py:15 in <module>",
        "child process 4501 (sleeping): python",
        "thread main (the innermost line first)",
        "  /job/dataset.py:3 in __getitem__",
        f"  {sim.PACKAGES}/torch/utils/data/_utils/fetch.py:1 in fetch",
        f"  {sim.PACKAGES}/torch/utils/data/_utils/worker.py:1 in _worker_loop",
        "  /job/train.py:15 in <module>",
        "last collectives (the latest last)",
        "  group 0: all_reduce #39 (DDP gradients, 264,970 elements), complete, called 43.0 s ago, at /job/train.py:5: "
        "loss.backward()",
        "full file system: /scratch",
        "processes that the kernel killed for memory on this node: 2",
        "end of its log",
        "  epoch 3",
    ]
    assert ranks[3].splitlines()[1:] == ["end of its log", "  done"]


def test_a_report_without_a_cause():
    text = format_report(None, [rank(0, stack=at(9))])
    assert text.startswith(
        "samestep: no rank waits for another one.\n\nrank 0 (node gpu-07, pid 4000): sleeps, 0 pending collectives"
    )
    assert report_json(None, [])["cause"] is None


UNREADABLE = (
    "samestep: the launcher cannot read the collectives of rank 1 (AttributeError: module has no attribute '_world'), "
    "so it cannot detect hangs: this version of torch may be too new for samestep; a hang ends by torch's timeouts, "
    "and `py-spy dump --pid PID` shows the line of a rank"
)


def test_ranks_whose_collectives_cannot_be_read_are_not_reported_as_healthy():
    error = "AttributeError: module has no attribute '_world'"
    evidence = [rank(number, stack=at(9), answers=False, error=error) for number in (2, 1)]
    state = f"sleeps, samestep cannot read its collectives ({error}), at /job/train.py:9: time.sleep(120)"
    rows = [f"rank {number} (node gpu-07, pid {4000 + number}): {state}" for number in (1, 2)]
    assert format_unreadable({2: error, 1: error}) == UNREADABLE
    assert format_overview(None, evidence).splitlines() == [UNREADABLE, *rows]
    assert format_report(None, evidence).startswith("\n".join([UNREADABLE, "", *rows, ""]))


def test_a_rank_whose_collectives_cannot_be_read_is_named_with_the_reason():
    evidence = [rank(0, done(call(39)), call(40)), rank(1, stack=at(9), answers=False, error="KeyError: 'pg_names'")]
    cause = find_cause(evidence)
    assert cause is not None
    assert (cause.kind, cause.culprits) == ("elsewhere", [1])
    text = "has collectives that samestep cannot read (KeyError: 'pg_names'); it is at /job/train.py:9: time.sleep(120)"
    assert f"  rank 1 (node gpu-07, pid 4001) {text}" in format_summary(cause).splitlines()
    assert format_overview(cause, evidence).startswith(format_summary(cause))


def test_the_report_has_the_latest_collectives_only():
    history = [done(call(number, seconds=100.0 - number)) for number in range(1, 41)]
    text = format_report(None, [rank(0, *history)])
    assert "all_reduce #32 " not in text
    assert all(f"all_reduce #{number} " in text for number in range(33, 41))


def test_the_report_has_no_color_codes():
    assert "\x1b" not in format_report(find_cause(EVIDENCE), EVIDENCE)


def test_the_json_has_these_keys_and_the_evidence_reads_back():
    cause = find_cause(EVIDENCE)
    assert cause is not None
    value = json.loads(json.dumps(report_json(cause, EVIDENCE)))
    assert list(value) == ["version", "summary", "cause", "ranks"]
    assert value["version"] == JSON_VERSION == 1
    assert value["summary"] == format_summary(cause)
    assert list(value["cause"]) == [
        "kind", "culprits", "waiting", "seconds", "headline", "sentences", "collective", "call", "lateness",
        "remedy",
    ]  # fmt: skip
    assert value["cause"] == cause.to_json()
    frames = [each.pop("user_frame") for each in value["ranks"]]
    assert [read_evidence(each) for each in value["ranks"]] == EVIDENCE
    assert frames[0] == {"file": "/job/train.py", "line": 5, "function": "main"}
    assert frames[3] is None


def test_a_line_is_shown_with_its_source(tmp_path, monkeypatch):
    script = tmp_path / "src" / "train.py"
    script.parent.mkdir()
    script.write_text("\n    time.sleep(\t120)\n" + "x" * 200 + "\n")
    monkeypatch.chdir(tmp_path)
    assert format_frame(Frame(str(script), 2, "main")) == "src/train.py:2: time.sleep( 120)"
    assert format_frame(Frame(str(script), 3, "main")) == f"src/train.py:3: {'x' * 97}..."
    assert format_frame(Frame(str(script), 9, "main")) == "src/train.py:9 in main"
    assert format_frame(Frame("/gone/train.py", 9, "main")) == "/gone/train.py:9 in main"
    monkeypatch.chdir("/")
    assert format_frame(Frame("/gone/train.py", 9, "main")) == "gone/train.py:9 in main"


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3.11/threading.py",
        "/opt/conda/lib/python3.12/site-packages/lightning/pytorch/trainer/trainer.py",
        "/usr/lib/python3/dist-packages/torch/nn/modules/module.py",
        "/home/me/.venv/lib64/python3.11/site-packages/wandb/run.py",
        "/opt/pytorch/torch/nn/parallel/distributed.py",
        "/opt/pytorch/torch/distributed/distributed_c10d.py",
        "<frozen runpy>",
        str(SAMESTEP / "training" / "run.py"),
    ],
)
def test_the_line_of_the_user_is_outside_of_libraries(file):
    library, user, outer = Frame(file, 1, "inner"), Frame("/home/me/torch/train.py", 2, "main"), line(9)
    assert user_frame([library, user, library, outer]) == user
    assert user_frame([library, Frame("x.py", 3, "first"), Frame(file, 7, "outer")]) == Frame("x.py", 3, "first")
    is_package = "lightning" in file or "wandb" in file
    assert user_frame([library, Frame(file, 7, "outer")]) == (library if is_package else Frame(file, 7, "outer"))
    assert user_frame([]) is None


def own(module: str, function: str) -> Frame:
    return Frame(str(SAMESTEP / module), 1, function)


EXCHANGE = [*c10d("all_gather", 13)[:2], own("distributed/communicator.py", "start_exchange")]
FSDP = torch_frame("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather")


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        (call(40), "all_reduce #40 (DDP gradients, 264,970 elements)"),
        (call(2, c10d("all_reduce", 10), shape=(1,)), "all_reduce #2 (1 element)"),
        (call(2, c10d("all_reduce", 10), shape=()), "all_reduce #2 (1 element)"),
        (call(3, [torch_frame("nn/parallel/distributed.py", "_sync_buffers"), *at(4)], "broadcast", (8,)),
         "broadcast #3 (DDP buffers, 8 elements)"),
        (call(1, [torch_frame("nn/parallel/distributed.py", "__init__"), *at(2)], "all_gather", (1,)),
         "all_gather #1 (DDP, at its start, 1 element)"),
        (call(4, [FSDP, *at(4)], "nccl:_all_gather_base", (64,)), "all_gather #4 (FSDP parameters, 64 elements)"),
        (call(5, [FSDP, *sim.BACKWARD], "nccl:_reduce_scatter_base", (64,)),
         "reduce_scatter #5 (FSDP gradients, 64 elements)"),
        (call(6, [torch_frame("nn/modules/_functions.py", "forward"), *at(4)], "all_gather", (9,)),
         "all_gather #6 (SyncBatchNorm, 9 elements)"),
        (call(7, [*c10d("all_gather", 4)[:2], *c10d("all_gather_object", 4)], "all_gather", (21,)),
         "all_gather_object #7 (21 elements)"),
        (barrier(8), "barrier #8"),
        (call(9, [], "nccl:all_reduce_barrier", (1,)), "barrier #9"),
        (call(3, [*EXCHANGE, own("distributed/collectives.py", "mean"), *at(13)], "all_gather", (256,)),
         "run.mean (all_gather #3)"),
        (call(3, [*EXCHANGE, own("distributed/metric_sync.py", "start"), own("training/step_loop.py", "run"), *at(3)]),
         "metric sync (all_reduce #3)"),
        (call(3, [*EXCHANGE, own("training/models.py", "_check"), *at(3)], "all_gather"),
         "samestep control message (all_gather #3)"),
        (call(3, [*EXCHANGE, own("distributed/communicator.py", "close"), *at(3)], "all_gather"),
         "Run.close (all_gather #3)"),
        (call(40, [*sim.BACKWARD[:3], own("training/step.py", "backward"), *at(3)]),
         "all_reduce #40 (DDP gradients, 264,970 elements)"),
    ],
)  # fmt: skip
def test_a_collective_has_the_name_that_people_know(collective, text):
    assert describe_call(collective) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_all_gather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_broadcast_oop", "broadcast"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_to_all_single", "all_to_all"),
        ("barrier", "barrier"),
    ],
)
def test_backends_have_other_names_for_the_same_collective(name, expected):
    assert operation(replace(call(1), name=name)) == expected


def test_many_ranks_are_counted():
    assert format_ranks([3, 1]) == "ranks 1 and 3"
    assert format_ranks(range(5)) == "5 ranks"


def test_a_thousand_ranks_have_a_short_summary():
    waiting = others([number for number in range(1024) if number != 517], done(call(39)), call(40))
    cause = find_cause([*waiting, rank(517, done(call(39)), stack=at(9))])
    assert cause is not None
    text = format_summary(cause)
    assert text.startswith("samestep: rank 517 is holding up the other 1023 ranks for 42 s.\n  1023 ranks wait in")
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize(
    ("timeout", "shown"),
    [
        (1800.0, "rank 1 may still arrive: rank 0 waits for up to 30 min"),
        (60.0, "rank 1 may still arrive: rank 0 waits for up to 60 s"),
        (50.0, ""),  # it has waited for 42 s: rank 1 will hardly come
        (0.0, ""),  # not known
    ],
)
def test_the_summary_says_how_long_ranks_wait_for_one_that_may_still_come(timeout, shown):
    evidence = [rank(0, done(call(39)), replace(call(40), timeout=timeout)), rank(1, done(call(39)), stack=at(9))]
    cause = find_cause(evidence)
    assert cause is not None
    assert [line.strip() for line in format_summary(cause).splitlines() if "may still" in line] == [shown] * bool(shown)
