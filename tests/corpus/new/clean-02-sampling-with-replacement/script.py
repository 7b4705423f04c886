import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size = 12
batch_size = 8
vocab = 40
max_iters = 20
eval_interval = 10
eval_iters = 4

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])

# the whole corpus is in memory on every process; batches are random windows
g = torch.Generator().manual_seed(1)
tokens = (torch.arange(3000) * 7 + torch.randint(0, 3, (3000,), generator=g)) % vocab
splits = {"train": tokens[:2700], "val": tokens[2700:]}
torch.manual_seed(1337 + rank)


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Bigramish(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(block_size, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, vocab)

    def forward(self, x, y=None):
        h = self.tok(x) + self.pos(torch.arange(x.size(1)))
        logits = self.head(h + self.mlp(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) if y is not None else logits


@torch.no_grad()
def estimate_loss(net):
    """Random estimate, every process contributes the same number of batches."""
    net.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = net(*get_batch(split))
        mean = losses.mean()
        dist.all_reduce(mean)
        out[split] = mean.item() / world
    net.train()
    return out


raw_model = Bigramish()
model = DDP(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for it in range(max_iters):
    if it % eval_interval == 0:
        est = estimate_loss(raw_model)
        if rank == 0:
            print(f"step {it}: train {est['train']:.3f} val {est['val']:.3f}", flush=True)
    loss = model(*get_batch("train"))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
