import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(128):
            x = torch.randn(6, generator=torch.Generator().manual_seed(i))
            yield x, x.min().unsqueeze(0)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=8))
    for epoch in range(2):
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
        if accelerator.is_main_process:
            print(f"epoch {epoch}: {torch.stack(losses).mean():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
