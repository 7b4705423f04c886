"""A small training with dropout that records what it does: training.py OUT EPOCHS [SECONDS_PER_STEP [STEP_TIMEOUT]].

Each process appends a line `PHASE STEP RANK SIZE` to OUT/phases/PID at every step, before it saves and while it
restores, so that tests can kill it in a chosen phase. Steps no longer pause once the file OUT/hurry exists.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from samestep import Run

SAMPLES, GLOBAL_BATCH = 397, 8  # the last step of an epoch has 5 samples, so no number of ranks divides all steps
MIN_SECONDS = 0.05  # that saving and restoring take, so that a kill can hit them


class PhaseRecorder:
    """Records the phase; as a part of the checkpoint it notices saving and restoring."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / str(os.getpid())).open("a", buffering=1)
        self.rank = self.size = self.step = 0

    def record(self, phase: str) -> None:
        self._file.write(f"{phase} {self.step} {self.rank} {self.size}\n")

    def state_dict(self):
        self.record("saving")
        time.sleep(MIN_SECONDS)
        return {"step": self.step}

    def load_state_dict(self, state) -> None:
        self.step = state["step"]
        self.record("restoring")
        time.sleep(MIN_SECONDS)


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())


def main(out: Path, epochs: int, pause: float, step_timeout: float) -> None:
    torch.set_num_threads(1)
    phases = PhaseRecorder(out / "phases")
    phases.record("starting")
    timeouts = {"start_timeout": 60.0, "step_timeout": step_timeout}
    with Run(global_batch=GLOBAL_BATCH, seed=3, folder=out, ledger=True, precision="fp32", **timeouts) as run:
        phases.rank, phases.size = run.rank, run.size
        layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
        model = run.wrap(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.995**step)
        train, test = (
            run.shard(data(), shuffle=True, num_workers=0, name="train"),
            run.shard(data(), num_workers=0, name="test"),
        )
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train, "phases": phases}
        checkpoint = run.checkpoint(out / "checkpoints", keep=2, **parts)
        checkpoint.every(steps=4)
        for epoch in train.epochs(epochs):
            for step in epoch:
                phases.step = step.number
                phases.record("computing")
                if pause and not (out / "hurry").exists():
                    time.sleep(pause)
                for inputs, labels in step:
                    noisy = inputs + 0.1 * torch.randn_like(inputs)  # a step that is trained again draws the same
                    step.mean(cross_entropy(model(noisy), labels, reduction="none")).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with run.evaluate(model) as net:
                accuracy = run.mean(net(inputs).argmax(-1) == labels for inputs, labels in test)
            run.log({"epoch/accuracy": accuracy}, step=epoch.number)
            checkpoint.save()
        weights = {name.removeprefix("module."): value.tolist() for name, value in model.state_dict().items()}
        run.once((out / "weights.json").write_text, json.dumps(weights))
    phases.record("done")


if __name__ == "__main__":
    folder, epochs, *rest = sys.argv[1:]
    pause, step_timeout = (*map(float, rest), *(0.0, 30.0)[len(rest) :])
    main(Path(folder), int(epochs), pause, step_timeout)
