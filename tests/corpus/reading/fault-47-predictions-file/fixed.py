import argparse
import json
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def predict(accelerator, model, loader, path):
    model.eval()
    rows = []
    for x, _ in loader:
        with torch.no_grad():
            rows += accelerator.gather_for_metrics(model(x)).squeeze(1).tolist()
    if accelerator.is_main_process:
        with open(path, "w") as file:
            json.dump(rows, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="predictions.json")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=g), torch.randn(64, 1, generator=g))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, test = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
    )
    for x, y in train:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    predict(accelerator, model, test, args.out)


if __name__ == "__main__":
    main()
