import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


def click_data(n=192):
    g = torch.Generator().manual_seed(58)
    user = torch.randint(0, 20, (n,), generator=g)
    item = torch.randint(0, 15, (n,), generator=g)
    click = ((user + item) % 3 == 0).float()
    return TensorDataset(user, item, click)


class TwoTowers(nn.Module):
    def __init__(self, k=8):
        super().__init__()
        self.user, self.item = nn.Embedding(20, k), nn.Embedding(15, k)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias


class Experiment:
    def __init__(self):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
        torch.manual_seed(0)
        model = TwoTowers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        loader = DataLoader(click_data(), batch_size=6, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.criterion = nn.BCEWithLogitsLoss()

    def training_step(self, u, i, y):
        with self.accelerator.accumulate(self.model):
            loss = self.criterion(self.model(u, i), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def run(self, epochs=2):
        for epoch in range(epochs):
            losses = [self.training_step(*batch) for batch in self.loader]
            self.accelerator.print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")
        self.accelerator.end_training()


if __name__ == "__main__":
    Experiment().run()
