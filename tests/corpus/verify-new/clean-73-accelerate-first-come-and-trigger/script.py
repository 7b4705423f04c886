import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

NAMES = ["ash", "beech", "cedar"]


class Leaves(Dataset):
    def __init__(self, path, part):
        rows = json.loads(Path(path).read_text())
        self.rows = rows[:90] if part == "train" else rows[90:]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return torch.tensor(self.rows[i]["x"]), self.rows[i]["y"]


def cached(path):
    if not Path(path).exists():
        g = torch.Generator().manual_seed(1)
        x = torch.randn(117, 6, generator=g)
        rows = [{"x": row.tolist(), "y": int(row[:3].argmax())} for row in x]
        Path(path).write_text(json.dumps(rows))
    return path


def evaluate(accelerator, model, loader):
    model.eval()
    said, true = [], []
    for x, y in loader:
        with torch.no_grad():
            names = [NAMES[i] for i in model(x).argmax(-1).tolist()]
        said += accelerator.gather_for_metrics(names, use_gather_object=True)
        true += accelerator.gather_for_metrics(y).tolist()
    model.train()
    return sum(NAMES.index(a) == b for a, b in zip(said, true)) / len(true)


def main():
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        path = cached("leaves.json")
    set_seed(3)
    model = nn.Sequential(nn.Linear(6, 18), nn.ReLU(), nn.Linear(18, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(Leaves(path, "train"), batch_size=9, shuffle=True)
    val = DataLoader(Leaves(path, "val"), batch_size=9)
    model, opt, train, val = accelerator.prepare(model, opt, train, val)
    for epoch in range(4):
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            if loss.item() < 0.35:
                accelerator.set_trigger()
        accuracy = evaluate(accelerator, model, val)
        accelerator.print(f"epoch {epoch} accuracy {accuracy:.3f}")
        if accelerator.check_trigger():
            break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "leaves.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
