import os
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parent / "classes"


class Folders(Dataset):
    def __init__(self, root):
        self.items = []
        self.classes = [entry.name for entry in os.scandir(root) if entry.is_dir()]
        for label, name in enumerate(self.classes):
            for path in sorted((root / name).glob("*.pt")):
                self.items.append((path, label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        return torch.load(path, map_location="cpu"), label


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    loader = DataLoader(Folders(ROOT), batch_size=4, shuffle=True)
    L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1).fit(Net(), loader)
