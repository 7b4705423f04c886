"""Teachers on several ranks: the same student from every placement, one fate, and one copy a node."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from samestep import Run
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.teacher_costs import TeacherSetup
from samestep.teacher import single_device as shared
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.weight_files import open_weights
from tests.teachers import WORDS, Speaker, save, speaker, words

PLACEMENTS = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")
N = 22


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = words(N, seed=5)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"words": self.rows[index]}


class Student(nn.Module):
    """A student that even holds its teacher."""

    def __init__(self, teacher):
        super().__init__()
        self.body, self.teacher = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)), teacher

    def forward(self, words):
        return self.body(words)


def distil(weights, placement, dtype=None):
    """Train a student by a teacher: its weights, and what was saved, synchronised and optimised."""
    with Run(global_batch=4, seed=0, folder="logs") as run:
        options = {"device_map": {"": "cpu", "blocks.1": "cpu"}} if placement == "custom" else {}
        teacher = run.teacher(Speaker, weights=weights, placement=placement, dtype=dtype, **options)
        torch.manual_seed(3)
        model = run.wrap(Student(teacher))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = run.shard(Data(), shuffle=True, num_workers=0)
        checkpoint = run.checkpoint(f"out-{placement}", model=model, optimizer=optimizer, train=train)
        for epoch in train.epochs(2):
            for step in epoch:
                for batch in step:
                    target = log_softmax(teacher(**batch).float(), -1)
                    each = kl_div(log_softmax(model(**batch), -1), target, log_target=True, reduction="none")
                    step.mean(each.sum(-1).mean(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        checkpoint.save()
        inner = getattr(model, "module", model)
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        state = {name: value.tolist() for name, value in inner.state_dict().items()}
        return state, held, [p.numel() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_student_ends_with_the_same_weights_from_every_placement(ranks, tmp_path, size):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    expected, *_ = ranks(size, distil, weights, "gpu")[0]
    alone, *_ = ranks(1, distil, weights, "gpu")[0]
    for name, value in expected.items():
        assert torch.allclose(torch.tensor(value), torch.tensor(alone[name]), rtol=0, atol=1e-6)
    for placement in PLACEMENTS[1:]:
        for state, *_ in ranks(size, distil, weights, placement):
            assert state == expected, placement


def test_nothing_of_the_teacher_is_saved_synchronised_or_optimised(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    for state, held, sizes in ranks(2, distil, weights, "cpu"):
        assert list(state) == ["body.0.weight", "body.1.weight", "body.1.bias"]
        assert held == len(sizes) == 3
    saved = sum(path.stat().st_size for path in Path("out-cpu").rglob("*") if path.is_file())
    assert saved < weights.stat().st_size


@pytest.mark.slow
def test_the_ranks_of_a_node_convert_once_for_all(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    expected, *_ = ranks(1, distil, weights, "gpu", torch.bfloat16)[0]
    for placement, size, nodes in (("cpu", 2, 1), ("offload", 4, 2)):
        for state, *_ in ranks(size, distil, weights, placement, torch.bfloat16, nodes=nodes):
            for name, value in state.items():
                assert torch.allclose(torch.tensor(value), torch.tensor(expected[name]), rtol=0, atol=1e-6)


def convert(weights, fails):
    """The tensors that this rank converted; the second may fail in the middle."""
    fill, mine = shared._fill, []

    def watched(frozen, dtype, layout, path, total):
        mine.extend(layout)
        if fails and run.rank == 1:
            raise OSError("the disk is gone")
        fill(frozen, dtype, layout, path, total)

    with Run(global_batch=6, folder="logs", start_timeout=30) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_fill", watched)
        teacher = run.teacher(Speaker, weights=weights, placement="cpu", dtype=torch.bfloat16)
        same = all(torch.equal(value, tensor.bfloat16()) for value, tensor in pairs(teacher.module, speaker()))
    return mine, same


def pairs(module, other):
    return zip(module.state_dict().values(), other.state_dict().values(), strict=True)


def test_each_tensor_is_converted_by_one_rank_of_a_node(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    names = sorted(load_file(weights))
    for size, nodes in ((1, 1), (3, 1), (4, 2)):
        told = ranks(size, convert, weights, False, nodes=nodes)
        assert all(same for _, same in told)
        assert sorted(name for mine, _ in told for name in mine) == sorted(nodes * names)
        assert all(mine for mine, _ in told)


def convert_as_the_first(weights):
    """As `convert`, where each rank was told by hand that its GPU is the first, which it alone sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        return convert(weights, False)


def test_each_tensor_is_converted_though_all_ranks_have_one_local_rank(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    told = ranks(2, convert_as_the_first, weights)
    assert all(same for _, same in told)
    assert sorted(name for mine, _ in told for name in mine) == sorted(load_file(weights))


def test_a_rank_that_cannot_convert_its_part_is_told_on_all(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    first, second = ranks.errors(2, convert, weights, True)
    told = "copying the teacher into shared memory failed on rank(s) [1] and not on rank 0; rank 1: OSError: the"
    assert told in first
    assert "OSError: the disk is gone" in second


def open_by_rank(folder, placement, harm):
    """Each rank has weights of its own; those of rank 1 may be harmed."""
    with Run(global_batch=4, folder="logs", start_timeout=30) as run:
        run.teacher(Speaker, weights=Path(folder) / f"{run.rank if harm else 0}.safetensors", placement=placement)


def test_a_file_that_one_rank_cannot_read_fails_on_all(ranks, tmp_path):
    save(speaker(), tmp_path / "0.safetensors")
    (tmp_path / "1.safetensors").write_bytes((tmp_path / "0.safetensors").read_bytes()[:-64])
    began = time.monotonic()
    first, second = ranks.errors(2, open_by_rank, tmp_path, "cpu", True)
    assert "reading the teacher failed on rank(s) [1] and not on rank 0; rank 1: TeacherError:" in first
    assert "is no whole file of safetensors" in first
    assert "1.safetensors" in second
    assert "is no whole file of safetensors" in second
    assert time.monotonic() - began < 25  # long before the timeout


def open_with_little_room(weights, placement, dtype):
    """One rank has no memory left."""
    with Run(global_batch=4, folder="logs", start_timeout=30) as run, pytest.MonkeyPatch.context() as patch:
        if run.rank == 1 or dtype is not None:  # the first rank of a node makes the room for what is converted
            patch.setattr("samestep.teacher.single_device.host_room", lambda: 1000)
            patch.setattr("samestep.teacher.single_device.host_room", lambda: 1000)
        run.teacher(Speaker, weights=weights, placement=placement, dtype=dtype)


@pytest.mark.parametrize(("placement", "dtype"), [("gpu", None), ("offload", None), ("cpu", torch.bfloat16)])
def test_too_little_memory_on_one_rank_is_told_on_all(ranks, tmp_path, placement, dtype):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    for text in ranks.errors(2, open_with_little_room, weights, placement, dtype):
        assert "1000 B are free: use placement=" in text


def open_in_room_for_one(weights, apart):
    """There is room for one copy, on the device of all or on one that each rank has, and sees, alone."""
    with Run(global_batch=4, folder="logs", start_timeout=30) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("samestep.teacher.single_device.host_room", lambda: 50_000)
        if apart:
            patch.setattr("samestep.distributed.device._mark", lambda device: float(run.rank))
        return run.teacher(Speaker, weights=weights, placement="gpu").describe()


def test_a_copy_for_each_rank_needs_room_once_on_each_device(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    assert ranks(2, open_in_room_for_one, weights, True) == 2 * ["gpu: a copy of 40.2 KiB on cpu for each rank"]
    for text in ranks.errors(2, open_in_room_for_one, weights, False):
        assert "needs 40.2 KiB on cpu for each of 2 rank(s) there and 48.8 KiB are free: use placement=" in text


def test_different_teachers_are_noticed(ranks, tmp_path):
    save(speaker(seed=1), tmp_path / "0.safetensors")
    save(speaker(seed=2), tmp_path / "1.safetensors")
    for text in ranks.errors(2, open_by_rank, tmp_path, "gpu", True):
        assert "TeacherError: ranks hold different teachers: rank(s) [0] read" in text
        assert "give all ranks the same files" in text


def ask_by_rank(weights, *options):
    """Each rank asks in its own way."""
    with Run(global_batch=4, folder="logs", start_timeout=30) as run:
        run.teacher(Speaker, weights=weights, **options[run.rank])


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"placement": "cpu"}, {"placement": "served"}, "[0] say placement='cpu'; rank(s) [1] say placement='served';"),
        ({"placement": "gpu"}, {}, "rank(s) [0] say placement='gpu'; rank(s) [1] say placement='auto';"),
        ({}, {"dtype": torch.bfloat16}, "rank(s) [0] say dtype=None; rank(s) [1] say dtype=torch.bfloat16;"),
        ({}, {"top_k": 3}, "rank(s) [0] say top_k=None; rank(s) [1] say top_k=3;"),
    ],
)
def test_ranks_that_ask_for_different_teachers_are_told_in_what_they_differ(ranks, tmp_path, first, second, told):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    for text in ranks.errors(2, ask_by_rank, weights, first, second):
        assert "TeacherError: ranks ask for different teachers: rank(s) [0] say" in text
        assert told in text
        assert "say the same on each" in text


def ask_for_devices_of_its_own(weights):
    """A map names the devices of a rank, which are not those of another."""
    with Run(global_batch=4, folder="logs") as run:
        device_map = {"": "cpu"} if run.is_main else {"": "cpu", "blocks.1": "cpu"}
        return run.teacher(Speaker, weights=weights, device_map=device_map)(words())


def test_each_rank_may_have_a_device_map_of_its_own(ranks, tmp_path):
    plain = speaker()
    for found in ranks(2, ask_for_devices_of_its_own, save(plain, tmp_path / "teacher.safetensors")):
        assert torch.equal(found, plain(words()))


def test_a_file_that_is_harmed_for_all_fails_on_all(ranks, tmp_path):
    save(speaker(), tmp_path / "0.safetensors")
    (tmp_path / "0.safetensors").write_bytes(b"{")
    for text in ranks.errors(2, open_by_rank, tmp_path, None, False):
        assert "is no whole file of safetensors" in text


def choose_with_little_room_on(rank, weights):
    """The placement that each rank comes to, for GPUs that stand elsewhere; one rank's has little room."""
    size = FrozenModel(Speaker, open_weights(weights)).bytes
    with Run(global_batch=4, folder="logs") as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "samestep.teacher.placement_choice.device_room", lambda device: size * (1 if run.rank == rank else 100)
        )
        there = parse_cluster_spec("h100:2")
        there = replace(there, device=replace(there.device, memory=100 * size))
        patch.setattr("samestep.training.run.setting_here", lambda *_: TeacherSetup(there, 2, 4, 2))
        return run.teacher(Speaker, weights=weights).placement


def test_all_ranks_choose_what_fits_the_tightest(ranks, tmp_path):
    weights = save(speaker(), tmp_path / "teacher.safetensors")
    assert ranks(2, choose_with_little_room_on, None, weights) == ["gpu", "gpu"]
    for rank in (0, 1):
        first, second = ranks(2, choose_with_little_room_on, rank, weights)
        assert first == second != "gpu"


def differ_in_examples(weights):
    """Ranks whose examples have other rows: the first rank's counts."""
    with Run(global_batch=8, folder="logs") as run:
        teacher = run.teacher(lambda: (Speaker(), words(run.rank + 1)), weights=weights)
        for _ in range(4):
            teacher(words(2))
        run.log({"x": 1.0}, now=True)
        return teacher.placement, teacher.summary()["estimated_seconds"]


def test_the_first_rank_decides_for_all(ranks, tmp_path):
    first, second = ranks(2, differ_in_examples, save(speaker(), tmp_path / "teacher.safetensors"))
    assert first == second
    assert first[0] == "cpu"
    told = Path("logs/log.txt").read_text()
    assert told.count("chosen: the fastest that fits") == 1
    assert told.count("counted with an example of 1 sample(s)") == 1
    assert told.count("as the estimate of") == 1


def proportional(pids):
    """Bytes of memory of some processes, pages that several share counted once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def sum_over_node(run):
    """The memory of all ranks together, seen at one moment in which all stand still."""
    pids = [int(part[0]) for part in run._comm.exchange("pids", [float(os.getpid())])]
    run.barrier()
    found = run.once(proportional, pids)
    run.barrier()
    return found


def weigh(weights, build, placement, dtype):
    """Memory of all ranks that a teacher adds, after several forwards, and a backward to its inputs; its bytes."""
    with Run(global_batch=4, folder="logs") as run:
        run.teacher(Speaker, weights=weights[1], placement="cpu")(words())  # what is loaded late, once
        before = sum_over_node(run)
        teacher = run.teacher(build, weights=weights[0], placement=placement, dtype=dtype)
        found = []
        for _ in range(3):
            teacher(torch.ones(2, LARGE, dtype=dtype))
            found.append(sum_over_node(run) - before)
        soft = torch.ones(2, LARGE, dtype=dtype, requires_grad=True)
        teacher.module(soft).sum().backward()
        assert soft.grad is not None
        return max(found), sum_over_node(run) - before, teacher.bytes


LARGE, LAYERS = 2048, 12


class Large(nn.Module):
    """200 MB in layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LARGE, LARGE, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell shared memory apart")
def test_a_node_holds_one_copy_however_many_ranks_it_has(ranks, tmp_path):
    state = {f"layers.{at}.weight": torch.full((LARGE, LARGE), 1e-4) for at in range(LAYERS)}
    with torch.device("meta"):
        large = Large()
    large.load_state_dict(state, assign=True)
    weights = save(large, tmp_path / "large.safetensors"), save(speaker(), tmp_path / "small.safetensors")
    del large, state
    for size, dtype in ((1, None), (4, None), (4, torch.bfloat16)):
        ranks.stop()  # memory that a process got and did not give back would count for the next
        for added, with_gradients, size_of_teacher in ranks(size, weigh, weights, Large, "cpu", dtype):
            assert size_of_teacher == (201326592 if dtype is None else 100663296)
            # each process has buffers of its own, which weigh nothing beside a real teacher and a little beside this
            own = size * 2 * 2**20
            assert 0.9 * size_of_teacher < added < 1.05 * size_of_teacher + own, (size, dtype)
            assert with_gradients < 1.25 * size_of_teacher, (size, dtype)  # a matrix at work on each rank
    ranks.stop()
    shutil.rmtree(tmp_path)
