import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, data):
        self.model = DDP(model)
        self.sampler = DistributedSampler(data, shuffle=True, seed=1)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.start_epoch = 0

    def one_epoch(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    def fit(self, epochs):
        for epoch in range(self.start_epoch, epochs):
            self.sampler.set_epoch(epoch)
            self.one_epoch()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    Trainer(nn.Linear(3, 1), TensorDataset(torch.randn(32, 3, generator=g), torch.randn(32, 1, generator=g))).fit(3)
    dist.destroy_process_group()
