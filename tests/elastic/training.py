"""A training that is cheap to start and tells what it is doing: training.py OUT EPOCHS [SECONDS_A_STEP [WAIT_SECONDS]].

Each process appends a line `PHASE STEP RANK SIZE` to OUT/phases/PID at every step, before it saves and while it
restores, so that a killer can choose its moment. Once there is a file OUT/hurry no step waits any more.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from samestep import Run

SAMPLES, GLOBAL_BATCH = 397, 8  # the last step of an epoch has 5 samples: no number of ranks divides all steps
DWELL = 0.05  # seconds that saving and restoring take at least, so that a kill can fall into them


class Teller:
    """Tells the phase; as a part of the checkpoint it also knows when one is taken and given back."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / str(os.getpid())).open("a", buffering=1)
        self.rank = self.size = self.step = 0

    def tell(self, phase: str) -> None:
        self._file.write(f"{phase} {self.step} {self.rank} {self.size}\n")

    def state_dict(self):
        self.tell("saving")
        time.sleep(DWELL)
        return {"step": self.step}

    def load_state_dict(self, state) -> None:
        self.step = state["step"]
        self.tell("restoring")
        time.sleep(DWELL)


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())


def main(out: Path, epochs: int, pause: float, patience: float) -> None:
    torch.set_num_threads(1)
    teller = Teller(out / "phases")
    teller.tell("starting")
    timeouts = {"start_timeout": 60.0, "step_timeout": patience}
    with Run(global_batch=GLOBAL_BATCH, seed=3, folder=out, ledger=True, precision="fp32", **timeouts) as run:
        teller.rank, teller.size = run.rank, run.size
        model = run.wrap(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.995**step)
        train, test = (
            run.shard(data(), shuffle=True, num_workers=0, name="train"),
            run.shard(data(), num_workers=0, name="test"),
        )
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train, "teller": teller}
        checkpoint = run.checkpoint(out / "checkpoints", keep=2, **parts)
        checkpoint.every(steps=4)
        for epoch in train.epochs(epochs):
            for step in epoch:
                teller.step = step.number
                teller.tell("computing")
                if pause and not (out / "hurry").exists():
                    time.sleep(pause)
                for inputs, labels in step:
                    step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with run.evaluate(model) as net:
                accuracy = run.mean(net(inputs).argmax(-1) == labels for inputs, labels in test)
            run.log({"epoch/accuracy": accuracy}, step=epoch.number)
            checkpoint.save()
        weights = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
        run.once((out / "weights.json").write_text, json.dumps(weights))
    teller.tell("done")


if __name__ == "__main__":
    folder, epochs, *rest = sys.argv[1:]
    pause, patience = (*map(float, rest), *(0.0, 30.0)[len(rest) :])
    main(Path(folder), int(epochs), pause, patience)
