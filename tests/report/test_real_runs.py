"""Reports of real runs: finished, killed and resumed, failed, and one and two ranks compared, in a real browser."""

import json
import time

import psutil
import pytest

from samestep.cli.main import main
from samestep.loggers.run_files import read_records
from tests.launch.launched import start, wait_for

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from samestep import Run

fails, pause = int(sys.argv[1]), float(sys.argv[2])
images = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
data = TensorDataset(images, images[:, :4].argmax(dim=1))
with Run(global_batch=40, seed=0, ledger=True, precision="fp64") as run:
    model = run.wrap(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, test = run.shard(data, shuffle=True, num_workers=0), run.shard(data, num_workers=0)
    checkpoint = run.checkpoint(run.folder / "checkpoints", model=model, optimizer=optimizer, train=train)
    for epoch in train.epochs(6):
        for step in epoch:
            for inputs, labels in step:
                if run.rank == 1 and step.number == fails:
                    raise ValueError("bad sample <7>")
                time.sleep(pause)
                step.mean(cross_entropy(model(inputs), labels, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
        with run.evaluate(model) as net:
            accuracy = run.mean(net(inputs).argmax(-1) == labels for inputs, labels in test)
        run.log({"test/accuracy": accuracy})
        checkpoint.save()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folders of runs on one rank and on two."""
    folder = tmp_path_factory.mktemp("finished")
    names = [f"{ranks}-ranks" for ranks in (1, 2)]
    started = [start_run(folder, ranks, name) for ranks, name in zip((1, 2), names, strict=True)]
    for each in started:
        ended = each.finish()
        assert ended.code == 0, ended.err
    return [folder / name for name in names]


def start_run(folder, ranks, name, fails=-1, pause=0.0):
    """Start the script on so many ranks, with files in a folder of this name."""
    options = ("--nproc-per-node", str(ranks), "--folder", str(folder / name))
    return start(folder, SCRIPT, *options, "train.py", str(fails), str(pause))


@pytest.fixture
def samestep(capsys):
    """`samestep("report", folder)` runs a command in this process; returns its exit code, and what it prints."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def metrics(folder, name):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def test_one_and_two_ranks_are_the_same_and_every_sample_counted_once(finished, open_page, samestep, tmp_path):
    code, out, _ = samestep("report", *finished, "--out", tmp_path / "both.html")
    assert code == 0
    assert "1-ranks: Finished after 60 steps in " in out
    assert f"report: {tmp_path / 'both.html'} (" in out
    page = open_page(tmp_path / "both.html")
    difference = page.page.locator("#difference tbody tr").all_inner_texts()
    loss = next(row.split() for row in difference if row.startswith("train/loss"))
    assert loss[1] == "60"
    assert float(loss[5]) < 1e-12
    assert page.text("#data").count("The ledger proves that every sample counted exactly once.") == 2
    for number, folder in enumerate(finished):
        series = page.data()["charts"]["train/loss"]["series"][number]
        assert dict(zip(series["step"], series["value"], strict=True)) == metrics(folder, "train/loss")
    assert page.colored_pixels("train/loss") > 100
    assert 0 <= int(page.hover("train/loss", 0.5)["step"]) < 60
    shares = page.page.locator("#time tbody").first.inner_text()
    for part in ("forward", "backward", "optimizer", "data", "evaluation", "checkpoint", "communication"):
        assert part in shares, part


def test_the_numbers_for_programs_are_those_of_the_page(finished, samestep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(samestep("report", *finished, "--json")[1])
    assert [run["steps"] for run in found["runs"]] == [60, 60]
    assert [run["ranks"] for run in found["runs"]] == [1, 2]
    assert all(run["audit"] == "sound" and run["status"] == "finished" for run in found["runs"])
    assert all(len(run["checkpoints"]) == 6 and not run["failures"] for run in found["runs"])
    assert not (tmp_path / "report.html").exists()
    for run in found["runs"]:
        assert sum(run["time"]["shares"].values()) == pytest.approx(1.0, abs=1e-4)
    loss = next(each for each in found["differences"] if each["metric"] == "train/loss")
    assert loss["steps"] == 60


def test_runs_are_listed_and_sorted(finished, samestep, tmp_path):
    folder = finished[0].parent
    code, out, _ = samestep("runs", folder, "--sort", "-ranks")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "-ranks" in line]
    assert [row[:2] for row in rows] == [["2-ranks", "finished"], ["1-ranks", "finished"]]
    assert "test/accuracy" in out
    records = json.loads(samestep("runs", folder, "--sort", "train/loss", "--json")[1])
    assert {record["steps"] for record in records} == {60}
    code, _, err = samestep("runs", folder, "--sort", "lost")
    assert code == 2
    assert "--sort lost is not a column (name, status, started, duration, ranks, steps) or a metric" in err
    assert samestep("runs", tmp_path)[1] == f"no runs in {tmp_path}: `samestep run train.py` makes one\n"


def test_a_killed_run_has_all_but_its_last_second_and_its_resumption_is_marked(open_page, samestep, tmp_path):
    out = tmp_path / "out"
    started = start_run(tmp_path, 2, "out", pause=0.05)
    wait_for(lambda: len(list(read_records(out / "metrics.jsonl"))) > 30, seconds=120)
    killed_at = time.time()
    killed = started.processes()
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=60)
    started.finish()
    for name in ("metrics.jsonl", "times.jsonl"):
        last = list(read_records(out / name))[-1]["time"]
        assert killed_at - last < 5, name  # about a second, but a busy machine exchanges metrics late
    assert samestep("report", out)[1].startswith("out: Killed after ")
    assert start_run(tmp_path, 1, "out").finish().code == 0
    assert samestep("report", out)[0] == 0
    page = open_page(out / "report.html")
    assert "Finished after 60 steps in " in page.text("header")
    assert "Before, it was killed; it resumed on 1 rank instead of 2." in page.text("header")
    (mark,) = page.data()["marks"]
    assert mark["text"] == "resumed, 2 \u2192 1 rank"
    assert mark["step"] % 10 == 0  # a checkpoint is saved at the end of an epoch
    assert page.page.locator(".timeline rect.killed").count() == 2
    assert page.page.locator(".timeline rect.finished").count() == 1
    series = page.data()["charts"]["train/loss"]["series"][0]
    assert series["step"] == list(range(60))
    assert dict(zip(series["step"], series["value"], strict=True)) == metrics(out, "train/loss")
    assert "The ledger proves that every sample counted exactly once." in page.text("#data")


def test_a_failed_run_names_the_rank_and_the_exception(open_page, samestep, tmp_path):
    out = tmp_path / "out"
    assert start_run(tmp_path, 2, "out", fails=25).finish().code == 1
    assert "Failed after 25 steps in " in samestep("report", out)[1]
    page = open_page(out / "report.html")
    assert "rank 1: ValueError: bad sample <7>" in page.text("header")
    failure = page.text("#failures")
    assert "<- first failure" in failure
    assert 'raise ValueError("bad sample <7>")' in failure
    assert page.page.locator("#failures a").get_attribute("href") == "logs"


def test_a_plain_script_has_a_page_of_what_its_launcher_saw(open_page, samestep, tmp_path):
    out = tmp_path / "out"
    options = ("--nproc-per-node", "2", "--folder", str(out), "train.py")
    assert start(tmp_path, "import sys; sys.exit(3)", *options).finish().code == 3
    assert samestep("report", out)[0] == 0
    page = open_page(out / "report.html")
    assert "Failed with exit code 3." in page.text("header")
    assert "train.py" in page.text("header")


HANG = """
import time
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
if dist.get_rank() == 1:
    time.sleep(600)
dist.barrier()
"""


def test_a_hang_is_in_the_timeline_with_the_rank_that_caused_it(open_page, samestep, tmp_path):
    out = tmp_path / "out"
    assert start(tmp_path, HANG, "--nproc-per-node", "2", "--folder", str(out), "train.py").finish().code != 0
    (path,) = (out / "logs").glob("launcher-*.jsonl")
    hangs = [record for record in map(json.loads, path.read_text().splitlines()) if record["event"] == "hang"]
    assert [hang["culprits"] for hang in hangs] == [[1]]
    assert samestep("report", out)[0] == 0
    page = open_page(out / "report.html")
    assert "train.py:7: time.sleep(600)" in page.text("#failures")
    assert "hangs" in page.text("#timeline")


def test_what_is_no_run_is_one_line(samestep, tmp_path):
    code, _, err = samestep("report", tmp_path)
    assert (code, err) == (
        2,
        f"samestep: {tmp_path} is not the folder of a run: it has neither events.jsonl nor metrics.jsonl\n",
    )
    assert samestep("runs", tmp_path / "missing")[0] == 2
