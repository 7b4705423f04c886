"""Real trackers in a real run that is killed and restarted: W&B in offline mode, MLflow with SQLite, CSV."""

import csv
import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.launch.launched import IMPORT_PATH, start
from tests.wandb_files import config_of, exit_code, history, run_of

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch.utils.data import TensorDataset
    from samestep import Run
    from samestep.loggers import CSVLogger, MLflowLogger, WandbLogger

    class Counting:
        '''Passes everything on, and counts what has been written.'''
        written = 0
        def __init__(self, logger):
            self.open, self.close, self._write = logger.open, logger.close, logger.write
        def write(self, *record):
            self._write(*record)
            self.written += 1

    def saved_rows(folder):
        # W&B's own process writes its file every few seconds; each row comes with a summary of the same names
        return sum(path.read_bytes().count(b"val/step") for path in folder.glob("wandb/*-run-*/run-*.wandb")) // 2

    store = f"sqlite:///{Path('store.db').absolute()}"
    trackers = [WandbLogger("digits", mode="offline"), MLflowLogger("digits", tracking_uri=store), CSVLogger()]
    loggers = [Counting(each) for each in trackers]
    with Run(global_batch=4, seed=0, loggers=loggers, config={"lr": 0.1, "model": {"depth": 2}}) as run:
        model = run.wrap(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = run.shard(TensorDataset(torch.ones(48, 1)), num_workers=0)
        checkpoint = run.checkpoint("out", model=model, optimizer=optimizer, train=train)
        for epoch in train.epochs(1):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x)[:, 0] ** 2).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"val/step": float(step.number)}, now=True)
                if step.number == 3:
                    checkpoint.save()
                    checkpoint.wait()
                if step.number == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.rank == 0:
                    end = time.monotonic() + 120
                    while time.monotonic() < end and (
                        min(each.written for each in loggers) < 8 or saved_rows(run.folder) < 7
                    ):
                        time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
"""
FIRST, SECOND = list(range(8)), list(range(4, 12))  # the steps of the two starts


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """The folder of a run that was killed after step 7 and continued after step 3."""
    folder = tmp_path_factory.mktemp("trackers")
    home = {f"WANDB_{name}_DIR": str(folder / "home") for name in ("CACHE", "CONFIG", "DATA")}
    home |= {"XDG_CACHE_HOME": str(folder / "home"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    options = "--nproc-per-node", "1", "--max-restarts", "1", "--folder", "kept", "train.py"
    script = SCRIPT.replace('"out"', '"kept/checkpoints"')
    ended = start(folder, script, *options, env=home, fresh=True).finish()
    assert ended.code == 0, ended.err
    assert ended.left == [], ended.err
    assert "failed, training continues" not in ended.err
    return folder / "kept"


def test_a_killed_run_continues_the_same_run_of_wandb(killed_run):
    files = sorted(killed_run.glob("wandb/offline-run-*/run-*.wandb"))
    first, second = sorted(files, key=lambda path: history(path)[0]["_step"])
    known = json.loads((killed_run / "trackers.json").read_text())["wandb/digits"]
    assert {run_of(path).run_id for path in files} == {known}
    assert {run_of(path).project for path in files} == {"digits"}
    assert [row["step"] for row in history(second)] == SECOND
    assert {row["step"]: row["val/step"] for row in history(second)} == {step: float(step) for step in SECOND}
    before = [row["step"] for row in history(first)]
    assert before == FIRST[: len(before)]
    assert len(before) >= len(FIRST) - 1  # W&B keeps the last row until the next one comes
    assert (exit_code(first), exit_code(second)) == (None, 0)


def test_steps_of_wandb_itself_never_come_again(killed_run):
    rows = [row for path in killed_run.glob("wandb/offline-run-*/run-*.wandb") for row in history(path)]
    steps = [row["_step"] for row in rows]
    assert len(set(steps)) == len(steps)
    assert len([row for row in rows if row["step"] == 5]) == 2  # of training


def test_wandb_knows_the_hyperparameters(killed_run):
    for path in killed_run.glob("wandb/offline-run-*/run-*.wandb"):
        config = config_of(path)
        assert (config["lr"], config["model"]) == (0.1, {"depth": 2})
        assert config["samestep"]["global_batch"] == 4
        assert config["samestep"]["ranks"] == 1


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow with SQLAlchemy 2.1
def test_a_killed_run_continues_the_same_run_of_mlflow(killed_run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{killed_run.parent / 'store.db'}")
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((killed_run / "trackers.json").read_text())["mlflow/digits"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "kept")
    assert run.data.params == {"lr": "0.1", "model.depth": "2"}
    assert run.data.tags["samestep.global_batch"] == "4"
    points = client.get_metric_history(run.info.run_id, "val/step")
    assert sorted((point.step, point.value) for point in points) == sorted((step, step) for step in FIRST + SECOND)
    assert [point.value for point in client.get_metric_history(run.info.run_id, "epoch")] == [0, 0]


def test_a_killed_run_continues_the_same_table(killed_run):
    rows = list(csv.DictReader((killed_run / "metrics.csv").read_text().splitlines()))
    assert [(int(row["step"]), float(row["val/step"])) for row in rows] == [(step, step) for step in FIRST + SECOND]
    assert all(float(row["train/loss"]) >= 0 for row in rows)
    assert not (killed_run / "tensorboard").exists()  # the list does not have it


ONLINE = """
    import sys
    from pathlib import Path
    from samestep.loggers import RunInfo, WandbLogger

    logger = WandbLogger("digits", mode="online")
    try:
        logger.open(RunInfo(Path("run"), "run", {}, False, print))
    except RuntimeError as error:
        print(error)
"""


def test_without_a_key_wandb_is_refused_and_asks_for_nothing(tmp_path):
    names = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    environ |= {**IMPORT_PATH, **names, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    command = [sys.executable, "-c", dedent(ONLINE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, input="3\n", check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no API key found: run `wandb login`, set WANDB_API_KEY, or pass mode='offline'\n"
    assert not (tmp_path / "run").exists()
