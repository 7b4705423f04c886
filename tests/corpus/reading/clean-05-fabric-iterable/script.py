import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, length, rank, world):
        self.length, self.rank, self.world = length, rank, world

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        first = self.rank * workers + worker
        for index in range(first, self.length, self.world * workers):
            g = torch.Generator().manual_seed(index)
            yield torch.randn(4, generator=g)


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(Stream(128, fabric.global_rank, fabric.world_size), batch_size=8)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    total = torch.zeros((), device=fabric.device)
    for batch in loader:
        optimizer.zero_grad()
        loss = (model(batch) - batch).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        total += loss.detach()
    total = fabric.all_reduce(total, reduce_op="mean")
    fabric.print("loss", total.item())
    fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
