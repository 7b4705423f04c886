"""Teachers on several ranks: the same student from every placement, shared errors, one copy per node."""

import json
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
from samestep.teacher import resident
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
from tests.teachers import VOCABULARY, TinyLM, random_tokens, save, tiny_lm

PLACEMENTS = ("gpu", "cpu", "balanced", "sequential", "custom", "offload", "disk")
N = 22


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = random_tokens(N, seed=5)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"tokens": self.rows[index]}


class Student(nn.Module):
    """A student with the teacher as an attribute."""

    def __init__(self, teacher):
        super().__init__()
        self.body, self.teacher = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)), teacher

    def forward(self, tokens):
        return self.body(tokens)


def distill(weights, placement, dtype=None):
    """Train a student: its weights, the number of optimized parameters, and the sizes of the wrapped ones."""
    with Run(global_batch=4, seed=0, folder="logs") as run:
        options = {"device_map": {"": "cpu", "blocks.1": "cpu"}} if placement == "custom" else {}
        teacher = run.teacher(TinyLM, weights=weights, placement=placement, dtype=dtype, **options)
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
def test_every_placement_trains_the_same_student(ranks, tmp_path, size):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    expected, *_ = ranks(size, distill, weights, "gpu")[0]
    alone, *_ = ranks(1, distill, weights, "gpu")[0]
    for name, value in expected.items():
        assert torch.allclose(torch.tensor(value), torch.tensor(alone[name]), rtol=0, atol=1e-6)
    for placement in PLACEMENTS[1:]:
        for state, *_ in ranks(size, distill, weights, placement):
            assert state == expected, placement


def test_nothing_of_the_teacher_is_saved_synchronized_or_optimized(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    for state, held, sizes in ranks(2, distill, weights, "cpu"):
        assert list(state) == ["body.0.weight", "body.1.weight", "body.1.bias"]
        assert held == len(sizes) == 3
    (index,) = Path("out-cpu").rglob("index.json")
    saved = [name for name in json.loads(index.read_text()) if name.startswith("model/")]
    assert sorted(saved) == ["model/body.0.weight", "model/body.1.bias", "model/body.1.weight"]
    assert all(name.startswith(("model/", "optimizer/", "rng/", "train/")) for name in json.loads(index.read_text()))


@pytest.mark.slow
def test_the_ranks_of_a_node_convert_the_weights_once(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    expected, *_ = ranks(1, distill, weights, "gpu", torch.bfloat16)[0]
    for placement, size, nodes in (("cpu", 2, 1), ("offload", 4, 2)):
        for state, *_ in ranks(size, distill, weights, placement, torch.bfloat16, nodes=nodes):
            for name, value in state.items():
                assert torch.allclose(torch.tensor(value), torch.tensor(expected[name]), rtol=0, atol=1e-6)


def convert(weights, fails):
    """The tensors that this rank converted; rank 1 may fail."""
    fill, mine = resident._fill_part, []

    def watched(frozen, part, path, total):
        mine.extend(tensor.name for tensor in part)
        if fails and run.rank == 1:
            raise OSError("the disk is gone")
        fill(frozen, part, path, total)

    with Run(global_batch=6, folder="logs", start_timeout=120) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "_fill_part", watched)
        teacher = run.teacher(TinyLM, weights=weights, placement="cpu", dtype=torch.bfloat16)
        same = all(torch.equal(value, tensor.bfloat16()) for value, tensor in pairs(teacher.module, tiny_lm()))
    return mine, same


def pairs(module, other):
    return zip(module.state_dict().values(), other.state_dict().values(), strict=True)


def test_each_tensor_is_converted_by_one_rank_of_a_node(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    names = sorted(load_file(weights))
    for size, nodes in ((1, 1), (3, 1), (4, 2)):
        results = ranks(size, convert, weights, False, nodes=nodes)
        assert all(same for _, same in results)
        assert sorted(name for mine, _ in results for name in mine) == sorted(nodes * names)
        assert all(mine for mine, _ in results)


def convert_with_local_rank_0(weights):
    """As `convert`, with LOCAL_RANK=0 on every rank, as if each rank saw only its own GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        return convert(weights, False)


def test_each_tensor_is_converted_even_if_all_ranks_have_local_rank_0(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    results = ranks(2, convert_with_local_rank_0, weights)
    assert all(same for _, same in results)
    assert sorted(name for mine, _ in results for name in mine) == sorted(load_file(weights))


def test_a_failed_conversion_on_one_rank_is_reported_on_all(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    first, second = ranks.errors(2, convert, weights, True)
    message = "copying the teacher into shared memory failed on rank(s) [1] and not on rank 0; rank 1: OSError: the"
    assert message in first
    assert "OSError: the disk is gone" in second


def open_by_rank(folder, placement, own_files):
    """Open the same file on every rank, or a separate file per rank."""
    with Run(global_batch=4, folder="logs", start_timeout=120) as run:
        run.teacher(TinyLM, weights=Path(folder) / f"{run.rank if own_files else 0}.safetensors", placement=placement)


def test_a_file_that_one_rank_cannot_read_fails_on_all(ranks, tmp_path):
    save(tiny_lm(), tmp_path / "0.safetensors")
    (tmp_path / "1.safetensors").write_bytes((tmp_path / "0.safetensors").read_bytes()[:-64])
    began = time.monotonic()
    first, second = ranks.errors(2, open_by_rank, tmp_path, "cpu", True)
    assert "reading the teacher failed on rank(s) [1] and not on rank 0; rank 1: TeacherError:" in first
    assert "is not a complete safetensors file" in first
    assert "1.safetensors" in second
    assert "is not a complete safetensors file" in second
    assert time.monotonic() - began < 60  # long before the timeout


def open_with_little_memory(weights, placement, dtype):
    """One rank has no free memory."""
    with Run(global_batch=4, folder="logs", start_timeout=120) as run, pytest.MonkeyPatch.context() as patch:
        if run.rank == 1 or dtype is not None:  # rank 0 reserves memory for the conversion
            patch.setattr("samestep.teacher.resident.free_host_memory", lambda: 1000)
        run.teacher(TinyLM, weights=weights, placement=placement, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "dtype"), [("gpu", None), ("offload", None), ("cpu", torch.bfloat16)])
def test_too_little_memory_on_one_rank_is_reported_on_all(ranks, tmp_path, placement, dtype):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    for text in ranks.errors(2, open_with_little_memory, weights, placement, dtype):
        assert "1000 B are free: use placement=" in text


def open_with_memory_for_one(weights, own_device):
    """There is memory for one copy, on a device that all ranks share or on a separate device of each rank."""
    with Run(global_batch=4, folder="logs", start_timeout=120) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("samestep.teacher.resident.free_host_memory", lambda: 50_000)
        if own_device:
            patch.setattr("samestep.distributed.device._device_id", lambda device: float(run.rank))
        return run.teacher(TinyLM, weights=weights, placement="gpu").describe()


def test_each_rank_of_a_device_needs_memory_for_a_copy(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    assert ranks(2, open_with_memory_for_one, weights, True) == 2 * ["gpu: a copy of 40.2 KiB on cpu for each rank"]
    for text in ranks.errors(2, open_with_memory_for_one, weights, False):
        assert "needs 40.2 KiB on cpu for each of its 2 rank(s), and 48.8 KiB are free: use placement=" in text


def test_different_teachers_are_rejected(ranks, tmp_path):
    save(tiny_lm(seed=1), tmp_path / "0.safetensors")
    save(tiny_lm(seed=2), tmp_path / "1.safetensors")
    for text in ranks.errors(2, open_by_rank, tmp_path, "gpu", True):
        assert "TeacherError: ranks hold different teachers: rank(s) [0] read" in text
        assert "give all ranks the same files" in text


def open_with_own_options(weights, *options):
    """Each rank passes its own options."""
    with Run(global_batch=4, folder="logs", start_timeout=120) as run:
        run.teacher(TinyLM, weights=weights, **options[run.rank])


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (
            {"placement": "cpu"},
            {"placement": "served"},
            "passed placement='cpu'; rank(s) [1] passed placement='served';",
        ),
        ({"placement": "gpu"}, {}, "rank(s) [0] passed placement='gpu'; rank(s) [1] passed placement='auto';"),
        ({}, {"dtype": torch.bfloat16}, "rank(s) [0] passed dtype=None; rank(s) [1] passed dtype=torch.bfloat16;"),
        ({}, {"top_k": 3}, "rank(s) [0] passed top_k=None; rank(s) [1] passed top_k=3;"),
    ],
)
def test_ranks_with_different_options_are_named_with_the_difference(ranks, tmp_path, first, second, difference):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    for text in ranks.errors(2, open_with_own_options, weights, first, second):
        assert "TeacherError: ranks request different teachers: rank(s) [0] passed" in text
        assert difference in text
        assert "pass the same on each" in text


def open_with_own_device_map(weights):
    """The device maps of two ranks differ."""
    with Run(global_batch=4, folder="logs") as run:
        device_map = {"": "cpu"} if run.is_main else {"": "cpu", "blocks.1": "cpu"}
        return run.teacher(TinyLM, weights=weights, device_map=device_map)(random_tokens())


def test_each_rank_can_have_its_own_device_map(ranks, tmp_path):
    plain = tiny_lm()
    for found in ranks(2, open_with_own_device_map, save(plain, tmp_path / "teacher.safetensors")):
        assert torch.equal(found, plain(random_tokens()))


def test_a_file_that_is_corrupt_for_all_fails_on_all(ranks, tmp_path):
    save(tiny_lm(), tmp_path / "0.safetensors")
    (tmp_path / "0.safetensors").write_bytes(b"{")
    for text in ranks.errors(2, open_by_rank, tmp_path, None, False):
        assert "is not a complete safetensors file" in text


def choose_with_little_memory_on(rank, weights):
    """The placement that each rank chooses for the GPUs of another cluster; one rank has little free memory."""
    size = FrozenModel(TinyLM, open_weights(weights)).total_bytes()
    with Run(global_batch=4, folder="logs") as run, pytest.MonkeyPatch.context() as patch:
        free = size * (1 if run.rank == rank else 100)
        patch.setattr("samestep.teacher.placement_choice.free_device_memory", lambda device: free)
        cluster = parse_cluster_spec("h100:2")
        cluster = replace(cluster, device=replace(cluster.device, memory=100 * size))
        patch.setattr("samestep.teacher.placement_choice.teacher_setup", lambda *_: TeacherSetup(cluster, 2, 4, 2))
        return run.teacher(TinyLM, weights=weights).placement


def test_all_ranks_choose_what_fits_the_rank_with_least_memory(ranks, tmp_path):
    weights = save(tiny_lm(), tmp_path / "teacher.safetensors")
    assert ranks(2, choose_with_little_memory_on, None, weights) == ["gpu", "gpu"]
    for rank in (0, 1):
        first, second = ranks(2, choose_with_little_memory_on, rank, weights)
        assert first == second != "gpu"


def differ_in_examples(weights):
    """Ranks with examples of different sizes: that of rank 0 counts."""
    with Run(global_batch=8, folder="logs") as run:
        teacher = run.teacher(lambda: (TinyLM(), random_tokens(run.rank + 1)), weights=weights)
        for _ in range(4):
            teacher(random_tokens(2))
        run.log({"x": 1.0}, now=True)
        return teacher.placement, teacher.summary()["estimated_seconds"]


def test_rank_0_chooses_for_all(ranks, tmp_path):
    first, second = ranks(2, differ_in_examples, save(tiny_lm(), tmp_path / "teacher.safetensors"))
    assert first == second
    assert first[0] == "cpu"
    log = Path("logs/log.txt").read_text()
    assert log.count("chosen: fastest placement that fits") == 1
    assert log.count("counted with an example of 1 sample(s)") == 1
    assert log.count("than the estimate of") == 1


def proportional_set_size(pids):
    """Bytes of memory of some processes, with shared pages counted once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def node_memory(run):
    """The memory of all ranks together, while no rank computes."""
    pids = [int(part[0]) for part in run._comm.exchange("pids", [float(os.getpid())])]
    run.barrier()
    found = run.once(proportional_set_size, pids)
    run.barrier()
    return found


def measure_memory(weights, build, placement, dtype):
    """The memory that a teacher adds on all ranks after forward passes, and after a backward pass; its bytes."""
    with Run(global_batch=4, folder="logs") as run:
        run.teacher(TinyLM, weights=weights[1], placement="cpu")(random_tokens())  # load what is imported late
        before = node_memory(run)
        teacher = run.teacher(build, weights=weights[0], placement=placement, dtype=dtype)
        found = []
        for _ in range(3):
            teacher(torch.ones(2, LARGE, dtype=dtype))
            found.append(node_memory(run) - before)
        soft = torch.ones(2, LARGE, dtype=dtype, requires_grad=True)
        teacher.module(soft).sum().backward()
        assert soft.grad is not None
        return max(found), node_memory(run) - before, teacher.bytes


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
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not report shared memory")
def test_a_node_holds_one_copy_for_any_number_of_ranks(ranks, tmp_path):
    state = {f"layers.{at}.weight": torch.full((LARGE, LARGE), 1e-4) for at in range(LAYERS)}
    with torch.device("meta"):
        large = Large()
    large.load_state_dict(state, assign=True)
    weights = save(large, tmp_path / "large.safetensors"), save(tiny_lm(), tmp_path / "small.safetensors")
    del large, state
    for size, dtype in ((1, None), (4, None), (4, torch.bfloat16)):
        ranks.stop()  # memory that a process has not returned would count for the next
        for added, with_gradients, size_of_teacher in ranks(size, measure_memory, weights, Large, "cpu", dtype):
            assert size_of_teacher == (201326592 if dtype is None else 100663296)
            # each process has its own buffers, which are small compared with a real teacher
            own = size * 2 * 2**20
            assert 0.9 * size_of_teacher < added < 1.05 * size_of_teacher + own, (size, dtype)
            assert with_gradients < 1.25 * size_of_teacher, (size, dtype)  # one matrix in use on each rank
    ranks.stop()
    shutil.rmtree(tmp_path)
