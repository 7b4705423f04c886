import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x, y=None):
        return self.log_probs(x, y) if y is not None else self.net(x)

    def log_probs(self, x, y):
        return F.log_softmax(self.net(x), -1).gather(1, y[:, None])


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=g), torch.randint(0, 3, (64,), generator=g))
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = -accelerator.unwrap_model(model).log_probs(x, y).mean()
            accelerator.backward(loss)
            optimizer.step()
    accelerator.end_training()


main()
