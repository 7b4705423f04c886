"""Data, files and devices in other spellings than on the pages of the rules, and correct scripts that look alike."""

import re

import pytest

from samestep.lint.linter import lint

HEAD = """\
import os, json, time, random, glob
import numpy as np
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler
def train(model, loader, opt, epochs=2, sampler=None):
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
def data(n=64):
    x = torch.arange(n).float().unsqueeze(1)
    return TensorDataset(x, x)
"""

SCRIPTS = {  # the first line is empty
    "good_501_one_rank_after_the_other": r"""\
from filelock import FileLock
from lightning.fabric import Fabric
fabric = Fabric(devices=2)
fabric.launch()
with fabric.rank_zero_first():
    torch.save({}, "a.pt")
with FileLock("b.lock"):
    torch.save({}, "b.pt")
""",
    "bad_501_without_an_order": r"""\
from lightning.fabric import Fabric
fabric = Fabric(devices=2)
fabric.launch()
torch.save({}, "a.pt")  # SS501
""",
    "good_101_rows_of_a_batch": r"""\
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(nn.Linear(1, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data(), batch_size=8):
    x, y = x[rank::world], y[rank::world]
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "bad_101_accelerate_eval_only": r"""\
from accelerate import Accelerator
class T:
    def __init__(self):
        self.acc = Accelerator()
        self.model = nn.Linear(1, 1)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tl = DataLoader(data(), batch_size=8, shuffle=True)  # SS101
        self.vl = DataLoader(data(), batch_size=8)
        self.model, self.opt, self.vl = self.acc.prepare(self.model, self.opt, self.vl)
    def fit(self):
        for x, y in self.tl:
            loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad(); self.acc.backward(loss); self.opt.step()
T().fit()
""",
    "bad_101_class": r"""\
class Trainer:
    def __init__(self, args):
        self.args = args
        self.model = DDP(nn.Linear(1, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = self.build_loader(data())
    def build_loader(self, ds):
        return DataLoader(ds, batch_size=self.args.bs, shuffle=True, num_workers=self.args.workers)  # SS101
    def run(self):
        for epoch in range(self.args.epochs):
            self.run_epoch()
    def run_epoch(self):
        self.model.train()
        for batch in self.loader:
            x, y = [t.to(self.args.device) for t in batch]
            loss = ((self.model(x) - y) ** 2).mean()
            self.opt.zero_grad(); loss.backward(); self.opt.step()
if __name__ == "__main__":
    import argparse
    p = argparse.ArgumentParser(); p.add_argument("--bs", default=8); args = p.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).run()
""",
    "bad_101_lightning_iterable": r"""\
import lightning as L
class S(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self):
        for i in range(self.n):  # SS101
            yield torch.tensor([float(i)])
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.l = nn.Linear(1, 1)
    def training_step(self, batch, i): return self.l(batch).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
L.Trainer(devices=2, strategy="ddp").fit(M(), DataLoader(S(10), batch_size=2))
""",
    "bad_101_next": r"""\
dist.init_process_group("gloo")
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data(), batch_size=8, shuffle=True)  # SS101
it = iter(loader)
for step in range(100):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "bad_102_batchsampler": r"""\
dist.init_process_group("gloo")
ds = data()
sampler = DistributedSampler(ds, num_replicas=dist.get_world_size(), rank=dist.get_rank())
loader = DataLoader(ds, batch_sampler=BatchSampler(sampler, 8, True))
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while step < 100:  # SS102
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        step += 1
""",
    "bad_104_stride": r"""\
dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"]); world = dist.get_world_size()
files = sorted(glob.glob("*.pt"))
mine = files[local_rank::world]  # SS104
""",
    "bad_105_class": r"""\
class V(Dataset):
    def __init__(self, n): self.x = torch.zeros(n, 1)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], self.x[i]
dist.init_process_group("gloo")
ds = data(); s = DistributedSampler(ds)
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
val = V(37)
vs = DistributedSampler(val, shuffle=False)  # SS105
vl = DataLoader(val, batch_size=4, sampler=vs)
train(model, DataLoader(ds, 8, sampler=s), opt, sampler=s)
model.eval()
tot = torch.zeros(2)
with torch.no_grad():
    for x, y in vl:
        tot[0] += (model(x) - y).abs().sum(); tot[1] += len(x)
dist.all_reduce(tot)
""",
    "bad_106_append": r"""\
class DS(Dataset):
    def __init__(self, root):
        self.items = []
        for cls in sorted(os.listdir(root)):
            for name in os.listdir(os.path.join(root, cls)):  # SS106
                self.items.append((os.path.join(root, cls, name), cls))
    def __len__(self): return len(self.items)
    def __getitem__(self, i):
        p, c = self.items[i]
        return torch.load(p), c
dist.init_process_group("gloo")
ds = DS("x"); s = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=2, sampler=s)
""",
    "bad_106_vocab": r"""\
dist.init_process_group("gloo")
def build(texts):
    words = set()
    for t in texts:
        words.update(t.split())
    ids = {}
    for w in words:  # SS106
        ids[w] = len(ids)
    return ids
v = build(["a b"])
""",
    "bad_107_shuffle": r"""\
dist.init_process_group("gloo")
ds = data()
idx = list(range(64)); random.shuffle(idx)  # SS107
tr, va = Subset(ds, idx[:48]), Subset(ds, idx[48:])
""",
    "bad_108_range": r"""\
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10 + rank):  # SS108
    loss = model(torch.ones(2, 1)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "bad_109": r"""\
def seed_all(s):
    random.seed(s); np.random.seed(s); torch.manual_seed(s)  # SS109
dist.init_process_group("gloo")
seed_all(3)
ds = data(); s = DistributedSampler(ds); loader = DataLoader(ds, 8, sampler=s)
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    s.set_epoch(epoch)
    for x, y in loader:
        z = torch.randn(x.size(0), 1)
        loss = nn.functional.mse_loss(model(x + z), y)
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "bad_110": r"""\
class Crops(Dataset):
    def __init__(self): self.size = 8
    def set_size(self, size): self.size = size
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(3, self.size, self.size), torch.zeros(1)
dist.init_process_group("gloo")
ds = Crops(); s = DistributedSampler(ds); loader = DataLoader(ds, 8, sampler=s)
model = DDP(nn.Flatten()); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    s.set_epoch(epoch)
    if epoch == 1 and dist.get_rank() == 0:
        ds.set_size(16)  # SS110
    for x, y in loader:
        loss = model(x).mean(); opt.zero_grad(); loss.backward(); opt.step()
""",
    "bad_112_perm": r"""\
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(5 + rank)
order = torch.randperm(64, generator=g)
mine = order[rank::world]  # SS112
""",
    "bad_113_lambda": r"""\
dist.init_process_group("gloo")
ds = data()
s = DistributedSampler(ds)
loader = DataLoader(ds, 8, sampler=s, num_workers=4, worker_init_fn=lambda i: np.random.seed(0))  # SS113
""",
    "bad_114": r"""\
dist.init_process_group("gloo")
ds = data(); s = DistributedSampler(ds)
loader = DataLoader(ds, 8, True, sampler=s)  # SS114
""",
    "bad_501_logger": r"""\
class Log:
    def __init__(self, path):
        self.path = path
    def write(self, row):
        with open(self.path, "a") as f:  # SS501
            f.write(json.dumps(row) + "\n")
dist.init_process_group("gloo")
ds = data(); s = DistributedSampler(ds)
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, DataLoader(ds, 8, sampler=s), opt, sampler=s)
Log("log.jsonl").write({"a": 1})
""",
    "bad_502": r"""\
dist.init_process_group("gloo")
rank = dist.get_rank()
def prep(path):
    if rank != 0:
        return
    np.save(path, np.arange(10))
prep("x.npy")
a = np.load("x.npy")  # SS502
""",
    "bad_502_listing": r"""\
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save({"a": 1}, "stats.pt")
stats = torch.load("stats.pt")  # SS502
""",
    "bad_503": r"""\
import datetime
dist.init_process_group("gloo")
now = datetime.datetime.now()  # SS503
out = os.path.join("runs", "exp_{}".format(now.strftime("%H%M%S")))
os.makedirs(out, exist_ok=True)
""",
    "bad_504_505": r"""\
import shutil
dist.init_process_group("gloo")
if not os.path.isdir("ck"):
    os.mkdir("ck")  # SS504
if os.path.exists("old"):
    shutil.rmtree("old")  # SS505
""",
    "bad_704": r"""\
from transformers import AutoModelForCausalLM
from accelerate import Accelerator
acc = Accelerator()
m = AutoModelForCausalLM.from_pretrained("x", device_map="auto", torch_dtype="auto")  # SS704
m = acc.prepare(m)
""",
    "bad_705": r"""\
dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(gpu)
model = DDP(nn.Linear(1, 1).to(gpu), device_ids=[gpu])
def resume(path):
    ckpt = torch.load(path)  # SS705
    model.module.load_state_dict(ckpt["model"])
resume("last.pt")
""",
    "bad_706_cuda": r"""\
dist.init_process_group("nccl")
model = nn.Linear(1, 1).cuda()  # SS706
model = DDP(model)
""",
    "bad_707": r"""\
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DDP(nn.Linear(1, 1).cuda(), device_ids=[0], output_device=0)  # SS707
""",
    "good_101_accelerate": r"""\
from accelerate import Accelerator
acc = Accelerator()
model = nn.Linear(1, 1); opt = torch.optim.SGD(model.parameters(), lr=0.1)
loaders = [DataLoader(data(), batch_size=8, shuffle=True), DataLoader(data(), batch_size=8)]
model, opt, *loaders = acc.prepare(model, opt, *loaders)
train_loader = loaders[0]
for x, y in train_loader:
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad(); acc.backward(loss); opt.step()
acc.wait_for_everyone()
if acc.is_main_process:
    torch.save(acc.unwrap_model(model).state_dict(), "m.pt")
acc.save(model.state_dict(), "n.pt")
""",
    "good_101_lightning": r"""\
import lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.l = nn.Linear(1, 1)
    def training_step(self, batch, i): return self.l(batch[0]).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
ds = data()
w = torch.utils.data.WeightedRandomSampler(torch.ones(64), 64)
L.Trainer(devices=2, strategy="ddp").fit(M(), DataLoader(ds, batch_size=2, sampler=w))
t2 = L.Trainer(devices=2, use_distributed_sampler=False)
t2.fit(M(), DataLoader(ds, batch_size=2, sampler=DistributedSampler(ds)))
""",
    "good_101_maybe_distributed": r"""\
def main(local_rank):
    if local_rank != -1:
        dist.init_process_group("nccl")
    ds = data()
    sampler = DistributedSampler(ds) if local_rank != -1 else torch.utils.data.RandomSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    model = nn.Linear(1, 1)
    if local_rank != -1:
        torch.cuda.set_device(local_rank)
        model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        if local_rank != -1:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
main(int(os.environ.get("LOCAL_RANK", -1)))
""",
    "good_101_own_sampler": r"""\
class Shard(torch.utils.data.Sampler):
    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0
    def set_epoch(self, e): self.epoch = e
    def __len__(self): return self.n // self.world
    def __iter__(self):
        g = torch.Generator(); g.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        yield from order[self.rank:self.n:self.world]
class Mod(torch.utils.data.Sampler):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n // dist.get_world_size()
    def __iter__(self):
        for i in range(self.n):
            if i % dist.get_world_size() == dist.get_rank():
                yield i
dist.init_process_group("gloo")
s = Shard(64, dist.get_rank(), dist.get_world_size())
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, DataLoader(data(), 8, sampler=s), opt, sampler=s)
for x, y in DataLoader(data(), 8, sampler=Mod(64)):
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "good_101_replacement_per_rank": r"""\
dist.init_process_group("gloo")
torch.manual_seed(3 + dist.get_rank())
s = torch.utils.data.WeightedRandomSampler(torch.ones(64), 64)
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, DataLoader(data(), 8, sampler=s), opt)
""",
    "good_102_in_helper": r"""\
dist.init_process_group("gloo")
def loaders(ds):
    s = DistributedSampler(ds)
    return {"train": DataLoader(ds, batch_size=8, sampler=s)}
ls = loaders(data())
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    ls["train"].sampler.set_epoch(epoch)
    for x, y in ls["train"]:
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
""",
    "good_104": r"""\
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
n = 101
per = (n + world - 1) // world
idx = list(range(n))[rank * per:(rank + 1) * per]
per2 = n // world
lo = rank * per2
hi = n if rank == world - 1 else lo + per2
part = list(range(n))[lo:hi]
chunks = np.array_split(np.arange(n), world)[rank]
per3 = -(-n // world)
part3 = list(range(n))[rank * per3:(rank + 1) * per3]
""",
    "good_106": r"""\
dist.init_process_group("gloo")
files = glob.glob("*.pt"); files.sort()
names = sorted({f.split("_")[0] for f in files})
ids = {n: i for i, n in enumerate(names)}
class DS(Dataset):
    def __init__(self):
        self.files = sorted(os.path.join("a", f) for f in os.listdir("a"))
        self.seen = set()
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return self.files[i]
ds = DS()
latest = max(glob.glob("ck*.pt"), key=os.path.getmtime)
for f in os.listdir("tmp"):
    print(f)
size = {f: os.path.getsize(f) for f in os.listdir("a")}
labels = torch.tensor([1, 2]); classes = list(set(labels.tolist())); m = {c: i for i, c in enumerate(classes)}
""",
    "good_107": r"""\
dist.init_process_group("gloo")
ds = data()
random.seed(0); np.random.seed(0)
idx = list(range(64)); random.shuffle(idx)
tr, va = Subset(ds, idx[:48]), Subset(ds, idx[48:])
perm = np.random.RandomState(3).permutation(64)
a = Subset(ds, perm[:3])
rng = np.random.default_rng(1); b = Subset(ds, rng.permutation(64)[:4])
c, d = random_split(ds, [32, 32])
""",
    "good_113": r"""\
def seed_worker(worker_id):
    s = torch.initial_seed() % 2**32
    np.random.seed(s); random.seed(s)
def winit(worker_id):
    np.random.seed(int(os.environ["RANK"]) * 100 + worker_id)
dist.init_process_group("gloo")
ds = data()
a = DataLoader(ds, 8, sampler=DistributedSampler(ds), num_workers=4, worker_init_fn=seed_worker)
b = DataLoader(ds, 8, sampler=DistributedSampler(ds), num_workers=4, worker_init_fn=winit)
""",
    "good_501_args": r"""\
import argparse
def is_first(rank): return rank == 0
p = argparse.ArgumentParser(); args = p.parse_args()
dist.init_process_group("gloo")
args.save_logs = bool(args.logs) and is_first(dist.get_rank())
model = DDP(nn.Linear(1, 1))
if args.save_logs:
    torch.save(model.module.state_dict(), "m.pt")
""",
    "good_501_rank_path": r"""\
def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0
def save(obj, path):
    if is_main():
        torch.save(obj, path)
dist.init_process_group("gloo")
ds = data(); s = DistributedSampler(ds)
model = DDP(nn.Linear(1, 1)); opt = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, DataLoader(ds, 8, sampler=s), opt, sampler=s)
save(model.module.state_dict(), "m.pt")
torch.save(torch.get_rng_state(), "rng_{}.pt".format(dist.get_rank()))
torch.save(torch.get_rng_state(), "rng_%d.pt" % dist.get_rank())
rank = dist.get_rank()
path = os.path.join("out", str(rank), "x.json")
json.dump({}, open(path, "w"))
logger = open(os.devnull, "w") if rank else open("log.txt", "w")
""",
    "good_502": r"""\
dist.init_process_group("gloo")
rank = dist.get_rank()
def prep(path):
    if rank == 0 and not os.path.exists(path):
        np.save(path, np.arange(10))
    dist.barrier()
prep("x.npy")
a = np.load("x.npy")
if rank == 0:
    torch.save({}, "ck.pt")
if os.path.exists("other.pt"):
    torch.load("other.pt", map_location="cpu")
""",
    "good_503": r"""\
dist.init_process_group("gloo")
start = time.time()
out = None
if dist.get_rank() == 0:
    out = os.path.join("runs", time.strftime("%H%M%S"))
    os.makedirs(out, exist_ok=True)
print(time.time() - start)
""",
    "good_704": r"""\
from transformers import AutoModelForCausalLM
from accelerate import Accelerator
acc = Accelerator()
m = AutoModelForCausalLM.from_pretrained("x", device_map={"": acc.process_index})
m2 = AutoModelForCausalLM.from_pretrained("x", device_map="cpu")
m = acc.prepare(m)
""",
    "good_706": r"""\
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = nn.Linear(1, 1).cuda()
model = DDP(model, device_ids=[local_rank])
ck = torch.load("x.pth", map_location=f"cuda:{local_rank}")
model.module.load_state_dict(ck["model"])
""",
    "good_files": r"""\
import tempfile, io, shutil
from pathlib import Path
dist.init_process_group("gloo")
buf = io.BytesIO(); torch.save({}, buf)
with tempfile.TemporaryDirectory() as d:
    torch.save({}, os.path.join(d, "x.pt"))
os.makedirs("out", exist_ok=True); Path("out").mkdir(parents=True, exist_ok=True)
rank = int(os.environ["RANK"])
if rank:
    sink = None
else:
    sink = open("log.txt", "w")
for r in range(dist.get_world_size()):
    if r == rank:
        with open("shared.txt", "a") as f:
            f.write("x")
    dist.barrier()
class Saver:
    def __init__(self, enabled): self.enabled = enabled
    def save(self, obj):
        if not self.enabled:
            return
        torch.save(obj, "model.pt")
Saver(rank == 0).save({})
main = rank == 0
main and torch.save({}, "b.pt")
try:
    os.remove("x")
except FileNotFoundError:
    pass
shutil.rmtree("cache", ignore_errors=True)
""",
}

MARK = re.compile(r"# (SS\d+)$")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_findings_that_its_comments_name_and_no_others(name, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEAD + SCRIPTS[name])
    expected = {
        (match[1], number)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := MARK.search(line)) is not None
    }
    result = lint([path], workers=1)
    assert result.problems == {}
    assert {(finding.code, finding.location.line) for finding in result.findings} == expected
