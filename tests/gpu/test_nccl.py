"""The same step over NCCL on 2 and 4 ranks: strategies, uneven batches, checkpoints, teachers, faults and preemption.

NCCL 2.30 and newer lets ranks share a GPU, so these tests need one GPU only: docs/gpu_tests.md says how to run them.
"""

import json
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from samestep import Run, read_metrics
from samestep.data.audit import audit
from samestep.environment.gpus import nccl_version
from samestep.training.preemption import StoppedEarly
from tests.gpu.test_gpu import CLASSES, LENGTH, WIDTH, Net
from tests.gpu.test_no_sync import STEPS, steady_steps
from tests.launch.launched import start
from tests.ranks.teachers import Teacher, tokens, write_teacher

SAMPLES, EPOCHS = 50, 2  # of five steps: 12 samples at a time, the last step has two
TIMEOUT = 200


def missing_for(ranks: int) -> str | None:
    """Why NCCL cannot connect this many ranks here, or None."""
    gpus, version = torch.cuda.device_count(), nccl_version()
    if gpus >= ranks or (version >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"):
        return None
    shown = ".".join(map(str, version))
    return f"{ranks} ranks over NCCL {shown} need {ranks} GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1"


@pytest.fixture(autouse=True)
def _nccl(_on_a_gpu_in_a_separate_folder, request):
    ranks = request.node.callspec.params.get("size", 2) if hasattr(request.node, "callspec") else 2
    if reason := missing_for(ranks):
        pytest.skip(reason)


class Interrupted(Exception):
    pass


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def train(folder, strategy=None, fail_at=None, signal_at=None):
    """Resume from the folder and train in fp64: weights, the loss of an evaluation, and what `once` returned."""
    try:
        with Run(global_batch=12, seed=3, precision="fp64", folder=folder, ledger=True) as run:
            assert run.size == 1 or run._comm.backend == "nccl"
            torch.manual_seed(5 + run.rank)  # every rank gets the weights of rank 0
            model = run.wrap(Net(dropout=0.2), None if run.size == 1 else strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            shard = run.shard(data(), shuffle=True, micro_batch=2, num_workers=0)
            run.checkpoint(folder, model=model, optimizer=optimizer, train=shard).every(steps=3)
            for epoch in shard.epochs(EPOCHS):
                for step in epoch:
                    for inputs, labels in step:
                        if step.number == fail_at:
                            raise Interrupted
                        step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                    if step.number == signal_at and run.rank == run.size - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    run.log({"norm": norm}, now=True)
                    optimizer.step()
                    optimizer.zero_grad()
            with run.evaluate(model) as net:
                evaluated = run.shard(data(), num_workers=0)
                loss = run.mean(cross_entropy(net(x), y, reduction="none") for x, y in evaluated)
            first = run.once(lambda: run.rank)
            state = {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}
            return state, loss, first
    except Interrupted:
        if dist.is_initialized():
            dist.destroy_process_group()
        return None
    except StoppedEarly as early:
        return early.code, str(early)


def difference(state, other):
    return max(float((state[name] - other[name]).abs().max()) for name in state)


@pytest.fixture(scope="module")
def single(ranks, tmp_path_factory):
    """The weights and the loss of one rank."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        state, loss, _ = ranks(1, train, folder / "run", timeout=TIMEOUT)[0]
    return state, loss


@pytest.mark.parametrize(
    ("size", "nodes", "strategy"),
    [(2, 1, "ddp"), (2, 1, "fsdp"), (2, 1, "zero2"), (4, 1, "ddp"), (4, 1, "fsdp"), (4, 2, "hybrid")],
)
def test_every_strategy_trains_the_same_as_one_rank(ranks, tmp_path, single, size, nodes, strategy):
    for state, loss, first in ranks(size, train, tmp_path / "run", strategy, nodes=nodes, timeout=TIMEOUT):
        assert difference(state, single[0]) < 1e-12
        assert loss == pytest.approx(single[1], rel=1e-12)
        assert first == 0
    assert audit(tmp_path / "run").exactly_once


@pytest.mark.parametrize("size", [4])
def test_training_interrupted_on_changing_world_sizes_ends_with_the_same_weights(ranks, tmp_path, single, size):
    folder = tmp_path / "run"
    for ranks_now, strategy, fail_at in ((2, "fsdp", 4), (size, "ddp", 7), (1, None, 9)):
        assert ranks(ranks_now, train, folder, strategy, fail_at, timeout=TIMEOUT) == [None] * ranks_now
    for state, loss, _ in ranks(2, train, folder, "fsdp", timeout=TIMEOUT):
        assert difference(state, single[0]) < 1e-12
        assert loss == pytest.approx(single[1], rel=1e-12)
    assert audit(folder).exactly_once


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_on_one_rank_saves_on_all_and_the_run_resumes(ranks, tmp_path, single, strategy):
    folder = tmp_path / "run"
    assert ranks(2, train, folder, strategy, None, 4, timeout=TIMEOUT) == [(75, "saved step 5")] * 2
    for state, _, _ in ranks(2, train, folder, strategy, timeout=TIMEOUT):
        assert difference(state, single[0]) < 1e-12


def train_steadily(folder, precision, options):
    return steady_steps(folder, precision, **options)


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {"clip": True}),
        ("bf16", {"clip": True}),
        ("fp32", {"clip": True, "mask": True}),
        ("fp32", {"clip": True, "mask": True, "micro_batch": 4}),
        ("fp32", {"strategy": "fsdp"}),
        ("bf16", {"strategy": "fsdp", "mask": True, "interval": 1}),
        ("bf16", {"strategy": "fsdp", "micro_batch": 4}),
        ("fp32", {"strategy": "zero2", "mask": True, "micro_batch": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{name}={each}" for name, each in value.items()),
)
def test_no_steady_step_waits_for_the_gpu_or_another_rank(ranks, tmp_path, precision, options):
    (single,) = ranks(1, train_steadily, tmp_path / "single", precision, options, timeout=TIMEOUT)
    first, second = ranks(2, train_steadily, tmp_path / "run", precision, options, timeout=TIMEOUT)
    assert first == second
    assert first == pytest.approx(single, abs={"fp32": 1e-3, "bf16": 0.05}[precision])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["train/loss"] for record in records] == pytest.approx(first, rel=1e-6)
    assert [record["value"] for record in records] == list(range(STEPS))
    assert all("norm" in record for record in records) == ("clip" in options)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["backend"] == "nccl"


def train_masked(folder, strategy, micro_batch):
    """Train in fp64 with masked means, whose count differs between ranks."""
    with Run(global_batch=12, seed=3, precision="fp64", folder=folder) as run:
        torch.manual_seed(5)
        model = run.wrap(Net(), None if run.size == 1 else strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for epoch in run.shard(data(), shuffle=True, micro_batch=micro_batch, num_workers=0).epochs(1):
            for step in epoch:
                for inputs, labels in step:
                    losses = cross_entropy(model(inputs), labels, reduction="none")
                    step.mean(losses, mask=0.25 + (inputs[:, 0, 0] > 0).double()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_masked_mean_counts_over_all_ranks(ranks, tmp_path, strategy, micro_batch):
    (single,) = ranks(1, train_masked, tmp_path / "single", strategy, micro_batch, timeout=TIMEOUT)
    for state in ranks(2, train_masked, tmp_path / "run", strategy, micro_batch, timeout=TIMEOUT):
        by_name = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        assert difference(by_name, single) < 1e-12


def dtypes_of_outputs(strategy):
    """The dtypes of logits, losses and weights in a step, and of logits in an evaluation."""
    with Run(global_batch=12, seed=3, precision="bf16") as run:
        model = run.wrap(Net(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        shard = run.shard(data(), num_workers=0)
        for step in next(iter(shard.epochs(1))):
            for inputs, labels in step:
                logits = model(inputs.float())
                losses = cross_entropy(logits, labels, reduction="none")
                step.mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
        with run.evaluate(model) as net:
            evaluated = net(inputs.float())
        return logits.dtype, losses.dtype, next(model.parameters()).dtype, evaluated.dtype


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_logits_have_no_fp32_copy_in_a_step_and_losses_are_fp32(ranks, strategy):
    expected = torch.bfloat16, torch.float32, torch.float32, torch.float32
    assert ranks(2, dtypes_of_outputs, strategy, timeout=TIMEOUT) == [expected, expected]


def teach(path, placement):
    """The outputs of a teacher for the rows of this rank, on the CPU."""
    with Run(global_batch=4, precision="fp32") as run:
        assert run._comm.backend in ("nccl", "none")
        teacher = run.teacher(Teacher, weights=path, placement=placement)
        outputs = teacher(tokens(12)[run.rank :: run.size].to(run.device))
        run.barrier()
        return outputs.cpu()


@pytest.mark.parametrize(("size", "placement"), [(2, "sharded"), (4, "sharded"), (2, "served")])
def test_a_teacher_answers_as_on_one_rank(ranks, tmp_path, size, placement):
    path = tmp_path / "teacher.safetensors"
    write_teacher(path)
    (wanted,) = ranks(1, teach, path, "gpu", timeout=TIMEOUT)
    for rank, outputs in enumerate(ranks(size, teach, path, placement, timeout=TIMEOUT)):
        torch.testing.assert_close(outputs, wanted[rank::size], rtol=1e-5, atol=1e-5)


def train_in_an_existing_group(folder):
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    try:
        result = train(folder, "ddp")
        total = torch.ones(3, device="cuda")
        dist.all_reduce(total)
        return result, total.tolist()
    finally:
        dist.destroy_process_group()


def test_a_run_works_in_a_plain_nccl_group_of_the_script(ranks, tmp_path, single):
    for (state, _, _), total in ranks(2, train_in_an_existing_group, tmp_path / "run", timeout=TIMEOUT):
        assert difference(state, single[0]) < 1e-12
        assert total == [2.0] * 3


SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from samestep import Run

with Run(global_batch=8, step_timeout=20, folder="run") as run:
    assert run._comm.backend == "nccl"
    model = run.wrap(nn.Linear(8, 8), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in run.shard([torch.ones(8)] * 800, num_workers=0).epochs(1):
        for step in epoch:
            for x in step:
                if step.number == 5 and run.rank == 1:
                    {fault}
                step.mean(model(x).square().sum(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.number == 2:
                run.log({"value": 1.0}, now=True)  # opens metrics.jsonl, so that the run has a summary
"""
FAULT_LINE = f"train.py:{1 + SCRIPT.splitlines().index('                    {fault}')}"
WATCHDOG_SECONDS = 400  # torch's default: up to 80 after the timeout, then 30 until the launcher kills the other rank


def run_with(folder, fault, seconds=TIMEOUT, **env):
    script = SCRIPT.replace("{fault}", fault)
    return start(folder, script, "--nproc-per-node", "2", "train.py", env=env).finish(seconds)


def test_a_rank_that_raises_is_the_one_that_is_reported(tmp_path):
    ended = run_with(tmp_path, 'raise ValueError("on purpose")')
    assert ended.code == 1
    assert "rank 1" in ended.err
    assert "ValueError: on purpose" in ended.err
    assert not ended.left


def test_a_killed_rank_is_the_one_that_is_reported(tmp_path):
    ended = run_with(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.code == 137
    assert re.search(r"^rank 1 on \S+, killed by SIGKILL", ended.err, re.M), ended.err
    assert not ended.left


def test_a_sleeping_rank_is_named_with_its_line_and_the_summary_says_failed(tmp_path):
    ended = run_with(tmp_path, "time.sleep(150)")
    assert ended.code != 0
    summary = f"samestep: rank 1 is holding up rank 0 for .*\n(.*\n)*?.*it is at {re.escape(FAULT_LINE)}: time.sleep"
    assert len(re.findall(summary, ended.err)) == 2, ended.err  # before the timeout, and in the report of the failure
    assert re.search(r"rank 1 +pid \d+ +ended by the launcher  <- the cause\n  rank 0 +pid \d+ +victim: ", ended.err)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert not ended.left


def test_without_the_flight_recorder_rank_0_says_that_the_run_may_hang_before_nccl_ends_it(tmp_path):
    off = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "0"}  # the older and the newer name
    ended = run_with(tmp_path, "time.sleep(350)", WATCHDOG_SECONDS, **off)
    assert ended.code != 0
    notice = re.search(r"samestep: the run may hang: rank\(s\) 0 have called more collectives over NCCL .*", ended.err)
    assert notice is not None, ended.err
    assert f"rank 1 is at {FAULT_LINE}" in notice[0], ended.err
    assert not ended.left


def test_process_groups_that_the_script_destroys_inside_of_a_run_are_named(tmp_path):
    script = SCRIPT.replace(" and run.rank == 1", "").replace("{fault}", "torch.distributed.destroy_process_group()")
    script = script.replace("                step.mean(", "                run.barrier()\n                step.mean(")
    ended = start(tmp_path, script, "--nproc-per-node", "2", "train.py").finish(TIMEOUT)
    assert ended.code == 1, ended.err
    assert re.search(r"CommunicationError: run\.barrier at train\.py:16 was called after dist\.destroy_p", ended.err)
    assert not ended.left


def test_a_rank_that_calls_sys_exit_while_the_other_waits_for_it_is_the_cause(tmp_path):
    ended = run_with(tmp_path, "sys.exit(0)")
    assert ended.code == 1, ended.err
    assert "samestep: rank 1 is leaving its run, and rank 0 has waited" in ended.err, ended.err
    report = ended.err[ended.err.rindex("samestep: rank 1 is leaving its run") :]  # that of the failure
    assert "it has called sys.exit and is leaving its run, which begins at train.py:7" in report, ended.err
    assert re.search(r"  rank 1 +pid \d+ .*  <- the cause\n  rank 0 +pid \d+ +victim: ", report), ended.err
    assert not ended.left
