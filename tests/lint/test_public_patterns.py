"""Patterns of public code that look like a fault and are none, next to the fault that lint still finds."""

import re
from pathlib import Path

import pytest

from samestep.lint.linter import lint

HEAD = """\
import os
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.zeros(64, 8))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
MARK = re.compile(r"# (SS\d+)$")

SCRIPTS = {  # what follows HEAD; a comment names the rule that finds a fault in its line
    "file_that_is_named_by_the_hash_of_a_text": """
import sys
def number(names):
    return str(abs(hash("".join(names))))
with open(os.path.join("/tmp", "files." + number(sys.argv)), "w") as own:
    own.write("1")
with open(os.path.join("/tmp", "files." + "".join(sys.argv)), "w") as shared:  # SS501
    shared.write("1")
""",
    "rank_of_the_configuration": """
from project import load
def is_main_rank(options):
    return options.distributed_rank == 0
if is_main_rank(load()):
    torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()  # SS301
""",
    "copy_of_a_model_that_may_be_wrapped": """
import copy
def average(net):
    raw = net.module if hasattr(net, "module") else net
    copied = copy.deepcopy(raw).eval()
    for p in copied.parameters():
        p.requires_grad_(False)
    return copied
net = nn.Linear(8, 1)
ema = average(net) if rank == 0 else None
wrapped = DDP(net)
""",
    "learning_rate_in_a_loop_over_own_samples": """
for step, x in enumerate(torch.zeros(64, 8)[rank::world]):
    optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
""",
    "first_of_the_gpus_that_a_rank_sees": """
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
device = torch.device("cuda:0")
net = nn.Linear(8, 1).to(device)
""",
    "number_of_the_host_as_rank_of_a_sampler": """
import socket
number = int(socket.gethostname().split("-")[1])
other = DistributedSampler(data, world, number)  # SS104
""",
    "own_name_of_what_a_rank_has_sent": """
import random
numbers = list(range(64))
random.shuffle(numbers)
message = [numbers]
dist.broadcast_object_list(message, src=0)
mine = message[0][rank::world]
""",
    "handles_that_are_all_waited_for": """
works = []
for p in model.parameters():
    work = dist.all_reduce(p.data, async_op=True)
    works.append(work)
for work in works:
    work.wait()
""",
    "handle_that_the_next_iteration_overwrites": """
for p in model.parameters():
    work = dist.all_reduce(p.data, async_op=True)  # SS311
work.wait()
""",
    "counts_with_a_fixed_length": """
labels = torch.cat([x.argmax(1) for (x,) in loader])
counts = torch.bincount(labels, minlength=8)
dist.all_reduce(counts)
""",
    "mean_that_is_averaged_again": """
def reduce_mean(value):
    value = value.clone().detach()
    dist.all_reduce(value)
    value /= dist.get_world_size()
    return value
print(reduce_mean(reduce_mean(torch.zeros(1))).item())
print(reduce_mean(torch.zeros(1)) / world)  # SS408
""",
    "mean_that_is_divided_by_samples": """
total = torch.zeros(1)
dist.all_reduce(total)
mean = total / world
print((mean / len(data)).item())
""",
    "prefix_that_the_script_removes": """
torch.save(model.state_dict(), f"own-{rank}.pt")
state = torch.load(f"own-{rank}.pt", map_location="cpu")
nn.Linear(8, 1).load_state_dict({name.replace("module.", ""): value for name, value in state.items()})
""",
    "parameters_frozen_on_one_rank": """
net = nn.Linear(8, 1)
if rank == 0:
    for p in net.parameters():
        p.requires_grad_(False)  # SS201
wrapped = DDP(net)
""",
    "keys_of_the_checkpoint_of_a_rank": """
state = torch.load(f"rank-{rank}.pt", map_location="cpu")
if "optimizer" in state:
    optimizer.load_state_dict(state["optimizer"])
""",
    "state_that_one_rank_loads": """
state = torch.load("last.pt", map_location="cpu")
if rank == 0:
    optimizer.load_state_dict(state["optimizer"])  # SS607
""",
    "group_that_is_made_once": """
_group = None
def group():
    global _group
    if _group is None:
        _group = dist.new_group()
    return _group
group()
if rank == 0:
    print(group())
""",
    "group_of_one_rank": """
if rank == 0:
    group = dist.new_group()  # SS301
""",
    "spawned_function_that_is_called_directly": """
import sys
from torch.utils.tensorboard import SummaryWriter
def worker(rank, count):
    writer = SummaryWriter("runs") if rank == 0 else None
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
if len(sys.argv) > 1:
    worker(rank=0, count=1)
else:
    torch.multiprocessing.spawn(fn=worker, args=(2,), nprocs=2)
""",
    "spawned_function_that_all_ranks_write_in": """
def worker(rank, count):
    torch.save(model.module.state_dict(), "model.pt")  # SS501
torch.multiprocessing.spawn(worker, args=(2,), nprocs=2)
""",
    "module_that_is_inside_of_itself": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.root = self
    def forward(self, x):
        return self.root.layer(x)
net = DDP(Block())
if rank == 0:
    with torch.no_grad():
        net(torch.zeros(1, 8))
""",
    "only_file_of_a_folder": """
names = os.listdir("data")
assert len(names) == 1
ids = {name: number for number, name in enumerate(names)}
""",
    "files_of_a_folder": """
names = os.listdir("data")  # SS106
ids = {name: number for number, name in enumerate(names)}
""",
    "counter_that_is_named_rank": """
for rank, parameter in enumerate(model.parameters()):
    if rank == 0:
        dist.broadcast(parameter.data, 0)
""",
    "rank_under_its_name": """
for number, parameter in enumerate(model.parameters()):
    if rank == 0:
        dist.broadcast(parameter.data, 0)  # SS301
""",
    "dtype_of_own_samples": """
for (x,) in loader:
    total = x.sum()
    if x.dtype == torch.float16:
        dist.all_reduce(total)
""",
    "content_of_own_samples": """
for (x,) in loader:
    total = x.sum()
    if x.max() > 3:
        dist.all_reduce(total)  # SS308
""",
    "set_difference_in_the_order_of_a_list": """
class Ordered(list):
    pass
skipped = {3, 4}
left = [each for each in range(9) if each not in skipped]
numbers = {each: number for number, each in enumerate(left)}
""",
    "end_of_the_own_part": """
names = sorted(os.listdir("data"))
mine = names[rank::world]
valid = mine[len(mine) // 2 :]
""",
    "learning_rate_in_a_report": """
report = {}
for (x,) in loader:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < 3:
        report["lr"] = optimizer.param_groups[0]["lr"]
""",
    "learning_rate_from_own_samples": """
for (x,) in loader:
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < 3:
        optimizer.param_groups[0]["lr"] = 0.01  # SS404
""",
    "norm_that_knows_its_shards": """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
model = fully_shard(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    model(x).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    optimizer.zero_grad()
""",
    "tables_by_device": """
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
tables = {}
if tables[device]:
    dist.barrier()
""",
    "tables_by_rank": """
tables = {}
if tables[rank]:
    dist.barrier()  # SS301
""",
    "loss_over_the_tokens_of_all_ranks": """
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
    count = (y != -100).sum()
    dist.all_reduce(count)
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / count * world
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "loss_over_own_tokens": """
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
    count = (y != -100).sum()
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / count  # SS206
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "object_with_an_equal_share": """
class Part:
    def __init__(self, rows):
        self.rows = rows[rank::world]
        self.count = len(rows)
    def __len__(self):
        return self.count // world
part = Part(list(range(64)))
for _ in range(len(part)):
    dist.barrier()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_findings_that_its_comments_name_and_no_others(name, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEAD + SCRIPTS[name])
    lines = path.read_text().splitlines()
    expected = {(match[1], number) for number, line in enumerate(lines, 1) if (match := MARK.search(line))}
    result = lint([path])
    assert result.problems == {}
    assert {(each.code, each.location.line) for each in result.findings if each.location} == expected


def write(folder: Path, **files: str) -> None:
    """Write files by name without ".py"; names may have folders."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


WAIT = "import torch.distributed as dist\n\n\ndef wait():\n    dist.barrier()\n"
CALL = HEAD + "{}\nif rank == 0:\n    wait()\n"


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("from tools.sync import wait", {"tools/sync": WAIT}),  # no __init__.py
        ("from lab.tools.sync import wait", {"lab/tools/sync": WAIT}),
        ("from lab.sync import wait", {"lab/sync": WAIT, "other/lab/sync": "def wait():\n    pass\n"}),
        ("from tools import wait", {"tools/__init__": "from .sync import wait\n", "tools/sync": WAIT}),
        (
            "from tools import wait",
            {
                "tools/__init__": "from .names import wait\n",
                "tools/names": "from .sync import wait\n",
                "tools/sync": WAIT,
            },
        ),
        ("import json, tools.sync as sync  # waiting\nwait = sync.wait", {"tools/sync": WAIT}),
    ],
)
def test_files_next_to_a_script_are_imported(tmp_path, line, files):
    write(tmp_path, train=CALL.format(line), **files)
    (finding,) = lint([tmp_path]).findings
    assert finding.code == "SS301"
    assert finding.location is not None
    assert Path(finding.location.file).name == "train.py"


def test_packages_that_import_each_other_under_one_name_end(tmp_path):
    write(tmp_path, train=CALL.format("from tools import wait"), **{"tools/__init__": "from . import wait\n"})
    assert lint([tmp_path]).problems == {}


def test_a_text_that_begins_with_from_imports_nothing(tmp_path):
    text = f'"""\nfrom {"x" * 300}/{"y" * 300} import nothing, \x00\n"""\n'.replace("\x00", "")
    write(tmp_path, train=text + HEAD + "dist.barrier()\n")
    result = lint([tmp_path / "train.py"])
    assert (result.findings, result.problems) == ([], {})


def test_lines_are_counted_as_python_counts_them(tmp_path):
    path = tmp_path / "train.py"
    text = HEAD + 'note = "\x0c \u2028"\n\x0c\nif rank == 0:\n    dist.barrier()\n'
    for end in ("\n", "\r\n", "\r"):
        path.write_bytes(text.replace("\n", end).encode())
        (finding,) = lint([path]).findings
        assert finding.location is not None
        assert (finding.location.line, finding.location.column) == (HEAD.count("\n") + 4, 5)


def test_columns_count_characters(tmp_path):
    write(tmp_path, train=HEAD + 'if rank == 0:\n    x = "\u00e9\u00e9"; dist.barrier()\n')
    (finding,) = lint([tmp_path]).findings
    assert finding.location is not None
    assert finding.location.column == 15


def test_attributes_that_a_branch_assigned_before_it_returned_are_known(tmp_path):
    setup = (
        "class State:\n    def setup(self):\n        if os.path.exists('x'):\n            self.number = 0\n"
        "            return\n        self.number = int(os.environ['RANK'])\n"
        "state = State()\nstate.setup()\nif state.number == 0:\n    dist.barrier()\n"
    )
    other = setup.replace("self.number = 0", "self.number = int(os.environ['RANK'])").replace(
        "        self.number = int(os.environ['RANK'])\nstate", "        self.name = 1\nstate"
    )
    for number, text in enumerate((setup, other)):
        write(tmp_path, **{f"train{number}": HEAD + text})
    assert [each.code for each in lint([tmp_path]).findings] == ["SS301", "SS301"]


def test_a_function_that_is_called_often_still_returns_the_rank(tmp_path):
    calls = "".join(f"x{number} = number()\n" for number in range(30))
    text = f"def number():\n    return dist.get_rank()\n{calls}main = number()\nif main == 0:\n    dist.barrier()\n"
    write(tmp_path, train=HEAD + text)
    assert [each.code for each in lint([tmp_path]).findings] == ["SS301"]


@pytest.mark.parametrize("base", ["torchmetrics.Metric", "object"])
def test_metrics_of_the_project_are_reduced_by_torchmetrics(tmp_path, base):
    (tmp_path / "train.py").write_text(f"""\
import lightning as L
import torch, torchmetrics


class Error({base}):
    def __init__(self):
        super().__init__()
        self.total, self.steps = torch.zeros(1), torch.zeros(1)

    def update(self, outputs, y):
        self.total += (outputs - y).abs().mean()
        self.steps += 1

    def compute(self):
        return 100 * self.total / self.steps, self.steps


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.error = torch.nn.Linear(1, 1), Error()

    def validation_step(self, batch, index):
        self.error.update(self.layer(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        error, _ = self.error.compute()
        self.log("error", error)


L.Trainer(devices=2).validate(Model())
""")
    expected = [] if base == "torchmetrics.Metric" else ["SS403"]
    assert [each.code for each in lint([tmp_path]).findings] == expected
