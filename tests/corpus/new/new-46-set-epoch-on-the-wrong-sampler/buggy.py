import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Loaders:
    def __init__(self, n_train, n_val):
        self.train, self.train_sampler = self.build(n_train, 0, True)
        self.val, self.val_sampler = self.build(n_val, 1, False)

    @staticmethod
    def build(n, seed, train):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 5, generator=g)
        data = TensorDataset(x, x.abs().sum(1, keepdim=True))
        sampler = DistributedSampler(data, shuffle=train)
        return DataLoader(data, batch_size=6, sampler=sampler), sampler

    def set_epoch(self, epoch):
        for sampler in (self.val_sampler,):
            sampler.set_epoch(epoch)


def main():
    dist.init_process_group("gloo")
    loaders = Loaders(120, 36)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 20), nn.Softplus(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        loaders.set_epoch(epoch)
        for x, y in loaders.train:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            errors = [((model(x) - y) ** 2).sum() for x, y in loaders.val]
        total = torch.stack(errors).sum()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / 36:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
