import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = nn.Linear(4, 4)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x), 8, shuffle=True)
    )
    for epoch in range(2):
        for (b,) in loader:
            optimizer.zero_grad()
            accelerator.backward((model(b) - b).pow(2).mean())
            optimizer.step()
        accelerator.wait_for_everyone()
        weights = accelerator.unwrap_model(model).state_dict()
        if accelerator.is_main_process:
            torch.save(weights, f"epoch-{epoch}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
