import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def linear_decay(optimizer, total):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(8)
    x = torch.randn(128, 10, generator=g)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 20), nn.Mish(), nn.Linear(20, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps_per_epoch = len(loader)
    scheduler = linear_decay(optimizer, EPOCHS * steps_per_epoch)
    for epoch in range(EPOCHS):
        for bx, by in loader:
            accelerator.backward(nn.functional.mse_loss(model(bx), by))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.2e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
