"""What verify makes of scripts that start, read, compile or end in another way than most.

A script that was not compared between ranks is never a success, and what verify itself changes is never a fault of it.
"""

import pytest

from samestep.verify import verify

BASE = """\
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(320, 4, generator=generator), torch.randn(320, 1, generator=generator))


def train(network=None, by_hand=False, samples=32, batch=4, sampler=DistributedSampler):
    model = DDP(network or nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    part = TensorDataset(*(tensor[:samples] for tensor in data.tensors))
    loader = DataLoader(part, batch, sampler=sampler and sampler(part))
    batches = iter(loader)
    for each in range(len(loader)) if by_hand else loader:
        inputs, targets = next(batches) if by_hand else each
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

"""
SPAWN = """
def work(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29733", rank=rank, world_size=size)
    train(sampler={sampler})


if __name__ == "__main__":
    size = {size}
    mp.spawn(work, args=(size,), nprocs=size)
"""
GPUS = "torch.cuda.device_count() if torch.cuda.is_available() else 1"


@pytest.fixture
def run(tmp_path, monkeypatch, interpreters):
    def run(text, **options):
        (tmp_path / "train.py").write_text(BASE + text)
        return verify("train.py", interpreters=interpreters, **options)

    monkeypatch.chdir(tmp_path)
    return run


def codes(verdict):
    return [each.code for each in verdict.findings]


@pytest.mark.slow
def test_a_script_that_spawns_a_rank_per_gpu_gets_as_many_gpus_as_ranks(run):
    verdict = run(SPAWN.format(size=GPUS, sampler="None"))
    assert (codes(verdict), verdict.worlds["many"]) == (["SS101"], 2)


@pytest.mark.slow
def test_a_script_that_always_runs_on_one_rank_is_not_verified(run):
    verdict = run(SPAWN.format(size=1, sampler="None"))
    assert verdict.exit_code == 2
    assert verdict.failure.startswith("the script ran on 1 rank although --nproc is 2: ")


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["pyproject.toml", None])
def test_a_script_finds_what_is_beside_its_folder_and_writes_to_a_copy_of_it(
    tmp_path, monkeypatch, interpreters, marker
):
    for name, text in {"lab/model.py": "width = 4\n", "data/scale.txt": "2"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    if marker is not None:
        (tmp_path / marker).touch()
    folder = tmp_path / "lab" / "runs"
    folder.mkdir()
    (folder / "train.py").write_text(
        BASE
        + """
sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[2]))
from lab.model import width

dist.init_process_group("gloo")
data.tensors[0].mul_(float(open("../../data/scale.txt").read()))
train(nn.Linear(width, 1))
if dist.get_rank() == 0:
    open("../model.py", "a").write("height = 2\\n")
"""
    )
    monkeypatch.chdir(folder)
    verdict = verify("train.py", interpreters=interpreters, keep=folder / "kept")
    assert (verdict.failure, verdict.findings) == ("", ())
    assert (tmp_path / "lab" / "model.py").read_text() == "width = 4\n"
    assert (folder / "kept" / "many" / "files" / ".." / "model.py").read_text() == "width = 4\nheight = 2\n"


@pytest.mark.slow
def test_a_script_without_a_process_group_is_not_verified(run):
    verdict = run("""
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(data, 32):
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
""")
    assert (verdict.exit_code, verdict.findings) == (2, ())
    assert verdict.failure.startswith("the script creates no process group, so that each rank trains alone: ")


@pytest.mark.slow
def test_a_script_that_returns_without_enough_gpus_is_run_with_claimed_ones(run):
    verdict = run("""
if torch.accelerator.device_count() < 2:
    sys.exit("2 accelerators are needed")
dist.init_process_group("gloo")
train()
""")
    assert (verdict.failure, verdict.findings, verdict.worlds) == ("", (), {"many": 2, "one": 1})
    assert any("the gradients of 4 steps" in each for each in verdict.scope)


@pytest.mark.slow
def test_torch_jit_script_compiles_functions_that_verify_observes(run):
    verdict = run("""
@torch.jit.script
def noise(x):
    return x + 0 * torch.rand_like(x) + torch.zeros(1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x) + 0 * torch.randn(1)


dist.init_process_group("gloo")
noise(torch.ones(2))
train(torch.jit.script(Network()))
""")
    assert (verdict.failure, verdict.findings) == ("", ())


@pytest.mark.slow
def test_an_iterator_that_is_advanced_by_hand_is_not_cut(run):
    verdict = run('dist.init_process_group("gloo")\ntrain(by_hand=True, samples=320)\n')
    assert (verdict.failure, verdict.findings, verdict.steps) == ("", (), 40)


@pytest.mark.slow
def test_an_epoch_of_exactly_32_batches_is_complete(run):
    verdict = run('dist.init_process_group("gloo")\ntrain(samples=256)\n')
    assert (verdict.failure, verdict.findings, verdict.steps) == ("", (), 32)
    assert not any("cut" in each for each in verdict.scope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "text"), [("True", "rank 0: 3, rank 1: 3"), ("dist.get_rank() == 1", "rank 1: 3")]
)
def test_an_exit_code_after_the_training_is_mentioned_and_no_fault(run, condition, text):
    end = f"if {condition} and dist.get_world_size() > 1:\n    sys.exit(3)\ntime.sleep(1)\n"
    verdict = run(f'dist.init_process_group("gloo")\ntrain()\n{end}')
    assert (verdict.failure, verdict.findings) == ("", ())
    assert any(each.endswith(f"({text})") for each in verdict.scope), verdict.scope


@pytest.mark.slow
def test_ranks_wait_for_one_that_sleeps_less_than_the_timeouts(run):
    verdict = run("""
if os.environ["RANK"] == "1":
    time.sleep(35)
dist.init_process_group("gloo")
train()
""")
    assert (verdict.failure, verdict.findings) == ("", ())


@pytest.mark.slow
def test_a_rank_that_comes_too_late_to_the_process_group_is_no_fault_of_the_script(run):
    verdict = run("""
if os.environ["RANK"] == "1":
    time.sleep(60)
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
train()
""")
    assert (verdict.exit_code, verdict.findings) == (2, ())
    assert "waited in init_process_group until the timeout" in verdict.failure


PARTS = """
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    order = list(range({samples}))
    random.{shuffle}
    mine = order[rank::size]
    for start in range(0, len(mine), 8):
        inputs, targets = data[mine[start : start + 8]]
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "shuffle", "expected"),
    [
        (96, "Random(epoch).shuffle(order)", []),
        (96, "shuffle(order)", ["SS101"]),
        (97, "Random(epoch).shuffle(order)", ["SS108"]),
    ],
)
def test_parts_that_a_script_takes_by_hand_must_be_disjoint_and_equally_long(run, samples, shuffle, expected):
    verdict = run("import random\n" + PARTS.format(samples=samples, shuffle=shuffle))
    assert (codes(verdict), verdict.failure) == (expected, "")
    assert all(each.location.source == "mine = order[rank::size]" for each in verdict.findings)


@pytest.mark.slow
def test_full_tensor_on_rank_0_is_a_collective_on_some_ranks(run):
    verdict = run("""
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(data, 32, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        weights = [each.full_tensor() for each in model.parameters()]
""")
    assert codes(verdict) == ["SS301"]


METER = """
class Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, inputs):
        self.total += inputs.detach().sum(0)
        return inputs - self.total


dist.init_process_group("gloo")
meter, model = Meter(), DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(data, 32, sampler=DistributedSampler(data)):
    changed = meter(inputs)
    optimizer.zero_grad()
    mse_loss(model({argument}), targets).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "expected"), [("inputs", []), ("changed", ["SS210"])])
def test_buffers_of_a_rank_count_only_if_the_loss_depends_on_them(run, argument, expected):
    verdict = run(METER.format(argument=argument))
    assert (codes(verdict), verdict.failure) == (expected, "")


LOOK = """
dist.init_process_group("gloo")
if not os.path.exists("words.txt"):
    if dist.get_rank() == 0:
        with open("words.txt", "w") as file:
            file.write("a b c")
{indent}dist.barrier()
train()
"""


@pytest.mark.parametrize(("indent", "codes"), [("    ", ["SS301"]), ("", [])])
def test_a_look_for_a_file_counts_only_if_a_collective_depends_on_it(run, indent, codes):
    assert [each.code for each in run(LOOK.format(indent=indent)).findings] == codes


LEVELS = """
class Points(TensorDataset):
    level = 0

    def set_level(self, level):
        self.level = level


def main():
    dist.init_process_group("gloo")
    part = Points(*(tensor[:32] for tensor in data.tensors))
    sampler = DistributedSampler(part)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(part, 4, sampler=sampler):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        part.set_level({level})


main()
"""


@pytest.mark.parametrize(("level", "codes"), [("10 + dist.get_rank()", ["SS110"]), ("10 + epoch", [])])
def test_a_setting_of_the_dataset_that_changes_must_be_equal_on_all_ranks(run, level, codes):
    findings = run(LEVELS.format(level=level)).findings
    assert [each.code for each in findings] == codes
    assert all(each.location.source == f"part.set_level({level})" for each in findings)
