"""Rules about collectives and metrics in other spellings than those of their pages, and correct scripts like them."""

import re
import textwrap

import pytest

from samestep.lint.linter import lint

HEAD = """
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
"""
LOOP = """
def train(dataset, val_set):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 8, sampler=sampler)
    val_loader = DataLoader(val_set, 8, sampler=DistributedSampler(val_set, shuffle=False, drop_last=True))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""

FAULTS = {
    "environment": """
dist.init_process_group("nccl")
main = int(os.environ["RANK"]) == 0
if main:
    dist.barrier()  # SS301
""",
    "decorator": """
from lightning.pytorch.utilities import rank_zero_only

dist.init_process_group("nccl")

@rank_zero_only
def report(value):
    dist.all_reduce(value)  # SS301

report(torch.ones(1))
""",
    "short circuit": """
dist.init_process_group("nccl")
value = torch.ones(1)
def total():
    dist.all_reduce(value)
    return value
if dist.get_rank() == 0 and total() > 0:  # SS301
    print("positive")
""",
    "sharded checkpoint": """
import torch.distributed.checkpoint as dcp

dist.init_process_group("nccl")
def save(state):
    if dist.get_rank() == 0:
        dcp.save(state, checkpoint_id="step-1")  # SS301
""",
    "trainer checkpoint": """
import lightning as L

trainer = L.Trainer(devices=2)
if trainer.is_global_zero:
    trainer.save_checkpoint("last.ckpt")  # SS301
""",
    "fabric": """
from lightning.fabric import Fabric

fabric = Fabric(devices=2)
fabric.launch()
if fabric.global_rank == 0:
    fabric.barrier()  # SS301
""",
    "set of names": """
dist.init_process_group("nccl")
names = {"a", "b"} | {"c"}
for name in names:  # SS302
    dist.barrier()
""",
    "early stop by clock": LOOP
    + """
        if time.time() - START > 3600:  # SS304
            break
START = time.time()
""",
    "skipped step": LOOP
    + """
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            if torch.isnan(loss):  # SS305
                continue
            loss.backward()
""",
    "plateau": LOOP
    + """
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        model.eval()
        with torch.no_grad():
            losses = [F.mse_loss(model(x), y).item() for x, y in val_loader]
        scheduler.step(sum(losses) / len(losses))  # SS404
""",
    "logger": LOOP
    + """
        model.eval()
        correct, count = 0, 0
        with torch.no_grad():
            for x, y in val_loader:
                correct += ((model(x) > 0) == y).sum().item()
                count += y.size(0)
        if rank == 0:
            writer.add_scalar("accuracy", correct / count, epoch)  # SS401
""",
    "accelerate": """
from accelerate import Accelerator

def run(model, val_loader):
    accelerator = Accelerator()
    val_loader = DataLoader(val_loader)
    model, val_loader = accelerator.prepare(nn.Linear(4, 1), val_loader)
    total, n = 0.0, 0
    with torch.no_grad():
        for x, y in val_loader:
            total += F.mse_loss(model(x), y).item()
            n += 1
    mean = total / n  # SS401
    accelerator.print(f"loss {mean}")
""",
    "averaged score": LOOP
    + """
    from sklearn.metrics import roc_auc_score
    scores, labels = [], []
    with torch.no_grad():
        for x, y in val_loader:
            scores += model(x).tolist()
            labels += y.tolist()
    auc = torch.tensor(roc_auc_score(labels, scores))
    dist.all_reduce(auc, op=dist.ReduceOp.AVG)  # SS402
""",
    "epoch end": """
import lightning as L

class Model(L.LightningModule):
    def on_validation_epoch_end(self):
        self.log("score", torch.cat(self.scores).mean())  # SS403

    def __init__(self):
        super().__init__()
        self.scores = []

    def validation_step(self, sample, index):
        self.scores.append(self(sample))

L.Trainer(devices=4).fit(Model())
""",
    "sharded state dict": """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
def main():
    dist.init_process_group("nccl")
    model = FSDP(nn.Linear(4, 4))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "m.pt")  # SS301
""",
    "function in a function": LOOP
    + """
        if rank == 0:
            log_metrics(loss)  # SS301
def log_metrics(v):
    print(average(v))
def average(v):
    v = v.detach().clone()
    dist.all_reduce(v)
    return v / dist.get_world_size()
""",
    "early return of a method": """
class T:
    def __init__(self):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
    def save(self):
        if self.rank != 0:
            return
        print("x")
        dist.barrier()  # SS301
T().save()
""",
    "wrapper on rank 0": LOOP
    + """
        if rank == 0:
            validate(model, val_set)  # SS305
@torch.no_grad()
def validate(m, data):
    m.eval()
    for x in DataLoader(data):
        m(x)
""",
    "accelerate barrier": """
from accelerate import Accelerator
accelerator = Accelerator()
if accelerator.is_main_process:
    print("x")
    accelerator.wait_for_everyone()  # SS301
""",
    "early stopping": LOOP
    + """
        model.eval()
        total, n = 0.0, 0
        with torch.no_grad():
            for x, y in val_loader:
                total += F.mse_loss(model(x), y, reduction="sum").item()
                n += len(y)
        val = total / n
        if val < best:
            best, bad = val, 0
        else:
            bad += 1
        if bad > 3:  # SS304
            return
best, bad = 1e9, 0
""",
    "masked mean": LOOP
    + """
        num, den = torch.zeros(()), torch.zeros(())
        model.eval()
        with torch.no_grad():
            for x, mask in val_loader:
                num += (model(x) * mask).sum()
                den += mask.sum()
        score = num / den
        dist.all_reduce(score)  # SS402
        score /= world
""",
    "shared step": """
import lightning as L
class M(L.LightningModule):
    def shared(self, batch, stage):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(f"{stage}_loss", loss, prog_bar=True)  # SS403
        return loss
    def training_step(self, batch, i):
        return self.shared(batch, "train")
    def validation_step(self, batch, i):
        self.shared(batch, "val")
L.Trainer(devices=2).fit(M())
""",
    "skipped step in a branch": LOOP
    + """
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            if math.isfinite(loss.item()):  # SS305
                loss.backward()
                optimizer.step()
""",
    "out of memory": LOOP
    + """
        for x, y in loader:
            try:
                loss = F.mse_loss(model(x), y)
                loss.backward()  # SS307
                optimizer.step()
            except RuntimeError:
                torch.cuda.empty_cache()
                continue
""",
}

CORRECT = {
    "main first": """
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
if local_rank not in (-1, 0):
    dist.barrier()
print("load")
if local_rank == 0:
    dist.barrier()
""",
    "both branches": """
dist.init_process_group("nccl")
def exchange(value):
    if dist.get_rank() == 0:
        dist.broadcast(value, src=0)
    else:
        value = torch.empty(3)
        dist.broadcast(value, src=0)
    return value
""",
    "subgroup": """
dist.init_process_group("nccl")
members = [0, 1]
group = dist.new_group(members)
if dist.get_rank() in members:
    dist.all_reduce(torch.ones(1), group=group)
""",
    "distributed at all": """
local_rank = int(os.environ.get("LOCAL_RANK", -1))
if local_rank != -1:
    dist.init_process_group("nccl")
    dist.barrier()
""",
    "failing rank": LOOP
    + """
            if not math.isfinite(loss.item()):
                print("the loss is not finite")
                sys.exit(1)
    dist.barrier()
""",
    "raised error": LOOP
    + """
            if torch.isnan(loss):
                raise ValueError("nan")
            dist.barrier()
""",
    "small last batch": LOOP
    + """
        for x, y in loader:
            if len(x) < 8:
                continue
            F.mse_loss(model(x), y).backward()
""",
    "decision together": LOOP
    + """
        model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                total += torch.tensor([F.mse_loss(model(x), y, reduction="sum").item(), len(y)])
        dist.all_reduce(total)
        if total[0] / total[1] < 0.1:
            break
""",
    "decision of rank 0": LOOP
    + """
        stop = torch.zeros(1)
        if rank == 0 and loss.item() < 0.1:
            stop += 1
        dist.broadcast(stop, src=0)
        if stop.item():
            break
""",
    "training loss of rank 0": LOOP
    + """
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
""",
    "all ranks print": LOOP
    + """
        model.eval()
        hits, n = 0, 0
        with torch.no_grad():
            for x, y in val_loader:
                hits += ((model(x) > 0) == y).sum().item()
                n += len(y)
        print(f"[rank {rank}] {hits / n}")
""",
    "bare module on rank 0": LOOP
    + """
        if rank == 0:
            with torch.no_grad():
                print(model.module(torch.ones(8, 4)))
        dist.barrier()
""",
    "handler that raises": """
dist.init_process_group("nccl")
def step(compute):
    for _ in range(3):
        try:
            value = torch.tensor(compute())
            dist.all_reduce(value)
        except RuntimeError:
            print("failed")
            raise
""",
    "result for rank 0": """
dist.init_process_group("nccl")
def report(losses):
    for loss in losses:
        dist.reduce(loss, dst=0)
        if dist.get_rank() == 0:
            if loss.item() > 10:
                print("large", loss)
""",
    "torchmetrics": """
import lightning as L
import torchmetrics

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def validation_step(self, batch, index):
        x, y = batch
        self.accuracy.update(self(x), y)
        self.log("accuracy", self.accuracy)

L.Trainer(devices=4).fit(Model())
""",
    "one device": """
import lightning as L

class Model(L.LightningModule):
    def validation_step(self, batch, index):
        self.log("loss", self(batch).mean())

L.Trainer(devices=1).fit(Model())
""",
    "list of handles": """
dist.init_process_group("nccl")
def reduce(values):
    handles = [dist.all_reduce(value, async_op=True) for value in values]
    for handle in handles:
        handle.wait()
""",
    "accumulation per epoch": """
dist.init_process_group("nccl")
def epochs(losses):
    for epoch in range(3):
        total = torch.zeros(1)
        for loss in losses:
            total += loss
        dist.all_reduce(total)
        print(total)
""",
    "wrapper without buffers on rank 0": LOOP.replace("nn.BatchNorm1d(8), ", "")
    + """
        if rank == 0:
            model.eval()
            with torch.no_grad():
                print(model(torch.ones(8, 4)).mean())
""",
    "mean of equal shards": LOOP
    + """
        model.eval()
        with torch.no_grad():
            l = torch.stack([F.mse_loss(model(x), y) for x, y in val_loader]).mean()
        dist.all_reduce(l)
        l /= world
        if rank == 0:
            print("val", l.item())
""",
    "gradients by hand": """
def main(dataset):
    dist.init_process_group("nccl")
    model = nn.Linear(4, 1)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        opt.step()
""",
    "objects for rank 0": """
dist.init_process_group("gloo")
def collect(obj):
    out = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(obj, out, dst=0)
    if dist.get_rank() != 0:
        return None
    return out
""",
    "interrupted by the user": LOOP.replace("def train", "def inner")
    + """
def main(d, v):
    try:
        inner(d, v)
    except KeyboardInterrupt:
        print("stopped")
    finally:
        dist.destroy_process_group()
main(None, None)
""",
    "accelerate": """
from accelerate import Accelerator
def main(ds, val):
    accelerator = Accelerator()
    train, vl = DataLoader(ds, shuffle=True), DataLoader(val)
    model, opt, tl, vl = accelerator.prepare(nn.Linear(4, 1), torch.optim.SGD([], lr=1), train, vl)
    for epoch in range(2):
        for x, y in tl:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        losses = []
        for x, y in vl:
            with torch.no_grad():
                l = F.mse_loss(model(x), y, reduction="none")
            losses.append(accelerator.gather_for_metrics(l))
        ppl = math.exp(torch.cat(losses).mean())
        accelerator.print(f"{epoch}: {ppl}")
        accelerator.log({"ppl": ppl})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.unwrap_model(model)
""",
    "fabric": """
import lightning as L
def main(ds, val):
    fabric = L.Fabric(devices=2)
    fabric.launch()
    model, opt = fabric.setup(nn.Linear(4, 1), torch.optim.SGD([], lr=1))
    vl = fabric.setup_dataloaders(DataLoader(val))
    tot = torch.zeros(2)
    with torch.no_grad():
        for x, y in vl:
            tot += torch.tensor([F.mse_loss(model(x), y, reduction="sum").item(), len(y)])
    tot = fabric.all_reduce(tot, reduce_op="sum")
    fabric.print(tot[0] / tot[1])
""",
    "reduction by an unknown package": LOOP.replace("def train", "from helpers import reduce_tensor\ndef train")
    + """
        model.eval()
        with torch.no_grad():
            acc = sum((model(x) > 0).float().mean() for x, y in val_loader)
        acc = reduce_tensor(acc, world)
        if rank == 0:
            print(acc)
        if acc > 3:
            break
""",
    "lightning": """
import lightning as L
class M(L.LightningModule):
    def validation_step(self, batch, i):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("val", loss, sync_dist=True)
        if self.trainer.is_global_zero:
            self.logger.experiment.add_image("x", x[0])
    def training_step(self, batch, i):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train", loss)
        if torch.isnan(loss):
            return None
        return loss
L.Trainer(devices=2).fit(M())
""",
    "first rank of a node": """
dist.init_process_group("nccl")
rank = dist.get_rank()
group = dist.new_group(list(range(rank // 8 * 8, rank // 8 * 8 + 8)))
dist.broadcast(torch.ones(1), src=rank // 8 * 8, group=group)
""",
}


def found_in(source: str, tmp_path) -> list[tuple[str, int]]:
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(source))
    result = lint([path])
    assert result.problems == {}
    return [
        (each.code, each.location.line)
        for each in result.findings
        if each.code[2] in "34" and each.location is not None
    ]


def marked(source: str) -> list[tuple[str, int]]:
    lines = enumerate((HEAD + textwrap.dedent(source)).splitlines(), 1)
    return [(match[1], number) for number, line in lines if (match := re.search(r"# (SS\d+)$", line))]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_this_spelling(name, tmp_path):
    assert found_in(FAULTS[name], tmp_path) == marked(FAULTS[name])


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_is_not_reported(name, tmp_path):
    assert found_in(CORRECT[name], tmp_path) == []
