import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
MILESTONES = [3, 5]


def sunspots(n=120):
    g = torch.Generator().manual_seed(12)
    t = torch.rand(n, 1, generator=g) * 20
    return TensorDataset(torch.cat([t.sin(), t.cos(), t / 20], 1), (t * 0.57).sin() + 0.1 * torch.randn(n, 1, generator=g))


def build_model():
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(2)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = MultiStepLR(optimizer, milestones=MILESTONES, gamma=0.1)
    loader = DataLoader(sunspots(), batch_size=10, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    history = []
    for epoch in range(EPOCHS):
        lr = optimizer.param_groups[0]["lr"]
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        scheduler.step()  # once per epoch
        history.append(lr)
        accelerator.print(f"epoch {epoch}: lr {lr:.4f} loss {total / len(loader):.4f}")
    accelerator.print("schedule", [round(v, 4) for v in history])
    accelerator.end_training()


if __name__ == "__main__":
    main()
