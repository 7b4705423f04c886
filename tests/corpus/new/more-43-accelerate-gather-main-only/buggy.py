from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def clouds(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, 3, generator=g)
    y = (x.norm(dim=-1).mean(1) > 1.6).long()
    return TensorDataset(x, y)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.rho = nn.Linear(16, 2)

    def forward(self, pts):
        return self.rho(self.phi(pts).amax(dim=1))


class Runner:
    def __init__(self):
        kwargs = InitProcessGroupKwargs(timeout=timedelta(seconds=6))
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
        torch.manual_seed(3)
        model = PointNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        train = DataLoader(clouds(160, 0), batch_size=10, shuffle=True)
        val = DataLoader(clouds(60, 1), batch_size=10)
        self.model, self.optimizer, self.train, self.val = self.accelerator.prepare(model, optimizer, train, val)

    def train_epoch(self):
        self.model.train()
        for pts, y in self.train:
            loss = nn.functional.cross_entropy(self.model(pts), y)
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = []
        for pts, y in self.val:
            correct.append(self.model(pts).argmax(1) == y)
        return torch.cat(correct)

    def fit(self, epochs=2):
        for epoch in range(epochs):
            self.train_epoch()
            correct = self.evaluate()
            if self.accelerator.is_main_process:
                correct = self.accelerator.gather(correct)
                print(f"epoch {epoch}: accuracy {correct.float().mean():.3f} of {len(correct)}", flush=True)
        self.accelerator.end_training()


if __name__ == "__main__":
    Runner().fit()
