import json
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Writer:
    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")

    def add(self, **values):
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()


class Trainer:
    def __init__(self, folder="out"):
        self.rank = int(os.environ.get("RANK", 0))
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self.writer = Writer(os.path.join(folder, "log.jsonl")) if self.is_main else None
        x = torch.randn(150, 5, generator=torch.Generator().manual_seed(0))
        self.sets = TensorDataset(x[:100]), TensorDataset(x[100:])
        torch.manual_seed(0)
        self.net = nn.Linear(5, 5)
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.best = None

    @property
    def is_main(self):
        return self.rank == 0

    def loader(self, training):
        data = self.sets[0 if training else 1]
        sampler = DistributedSampler(data, shuffle=training)
        return DataLoader(data, batch_size=10, sampler=sampler)

    def fit(self, epochs):
        train, val = self.loader(True), self.loader(False)
        for epoch in range(epochs):
            train.sampler.set_epoch(epoch)
            self.model.train()
            for (x,) in train:
                self.step(x)
            self.finish(epoch, self.evaluate(val))

    def step(self, x):
        loss = (self.model(x) - x).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, loader):
        self.net.eval()
        sums = torch.zeros(2)
        for (x,) in loader:
            sums += torch.stack([(self.net(x) - x).pow(2).sum(), torch.tensor(float(len(x)))])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def finish(self, epoch, value):
        self.writer and self.writer.add(epoch=epoch, value=value)
        if self.best is None or value < self.best:
            self.best = value
            if self.is_main:
                torch.save(self.net.state_dict(), os.path.join(self.folder, "best.pt"))
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit(2)
    dist.destroy_process_group()
