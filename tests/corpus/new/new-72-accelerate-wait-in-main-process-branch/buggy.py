import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def prepare(accelerator):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 6, generator=g), torch.randn(64, 1, generator=g))
    if accelerator.is_main_process:
        torch.save(data.tensors, "cache.pt")
        accelerator.wait_for_everyone()
    return TensorDataset(*torch.load("cache.pt"))


def main():
    accelerator = Accelerator(cpu=True)
    data = prepare(accelerator)
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
    accelerator.end_training()


main()
