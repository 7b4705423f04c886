import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATION_STEPS = 4
MICRO_BATCH = 4


class Decoder(nn.Module):
    def __init__(self, vocab=36, d=20, heads=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.block = nn.TransformerEncoderLayer(d, heads, 2 * d, dropout=0.0, batch_first=True)
        self.lm = nn.Linear(d, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.lm(self.block(self.tok(ids), src_mask=mask, is_causal=True))


def text(n=128, length=9):
    g = torch.Generator().manual_seed(21)
    start = torch.randint(0, 36, (n, 1), generator=g)
    return TensorDataset((start + torch.arange(length) * 3) % 36)


def lm_loss(model, ids):
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main():
    dist.init_process_group("gloo")
    ds = text()
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DDP(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.zero_grad(set_to_none=True)
        for i, (ids,) in enumerate(loader):
            last = (i + 1) % ACCUMULATION_STEPS == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = lm_loss(model, ids) / ACCUMULATION_STEPS
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item() * ACCUMULATION_STEPS:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
