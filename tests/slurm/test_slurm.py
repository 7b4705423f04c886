"""Jobs of `samestep submit` on a real SLURM cluster of two nodes."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
import torch

from samestep.environment.world import port_of
from tests.launch.launched import run_script, wait_for
from tests.slurm.cluster import FINAL, Cluster

pytestmark = pytest.mark.slow

SUM = """
    import sys
    from samestep import Run
    from samestep.environment.world import read_world

    world = read_world()
    with Run(global_batch=4, backend="gloo") as run:
        total = run.sum(run.rank + 1)
        run.log({"total": total}, step=0)
    if run.is_main:
        print("SUM", total, world.launcher, world.size, world.nodes, world.address, world.port, sys.argv[1:])
"""


def write(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(dedent(text))


def submit(cluster: Cluster, folder: Path, *arguments: str) -> str:
    done = cluster.samestep("submit", "--folder", "kept", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert done.stderr == f"samestep: submitted job {job}; log: {folder}/kept/slurm-{job}.log\n"
    return job


def log(folder: Path, job: str) -> str:
    path = folder / "kept" / f"slurm-{job}.log"
    return path.read_text() if path.exists() else ""


def job_record(cluster: Cluster, folder: Path, job: str) -> dict[str, object]:
    done = cluster.samestep("jobs", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (entry,) = [each for each in json.loads(done.stdout) if each["job_id"] == job]
    return {name: entry[name] for name in ("state", "ended", "exit_code", "restarts")}


def test_ranks_of_srun_find_each_other_and_concurrent_jobs_do_not_collide(cluster, tmp_path):
    write(tmp_path, SUM)
    ranks = ["--ntasks=2", sys.executable, str(tmp_path / "train.py")]
    jobs = {
        "one": ["srun", "--nodes=1", "--nodelist=node1", *ranks],
        # Both nodes are this machine, so their names do not resolve; on a real cluster nothing needs to be set.
        "two": ["env", "MASTER_ADDR=127.0.0.1", "srun", "--nodes=2", *ranks],
    }
    for name in jobs:
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(cluster.run, *command, cwd=tmp_path / name) for name, command in jobs.items()]
    one, two = (each.result() for each in ended)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    lines = [line.split() for done in (one, two) for line in done.stdout.splitlines() if line.startswith("SUM")]
    assert [line[1:6] for line in lines] == [
        ["3", "slurm", "2", "1", "127.0.0.1"],
        ["3", "slurm", "2", "2", "127.0.0.1"],
    ]
    assert lines[0][6] != lines[1][6]  # the ports


def test_a_job_on_two_nodes_trains_as_one_world_with_unusual_names(cluster, tmp_path):
    script, argument = "a'; echo foo", 'x\n#SBATCH --nodes=7 "$HOME" `id` # not a comment'
    write(tmp_path, SUM, script)
    setup = 'echo "ODD is $ODD, folder is $folder"'
    name, value = 'it\'s "50%" #1 \\ $(id)', "two\nlines # '$HOME'"
    job = submit(
        cluster, tmp_path, "--nodes", "2", "--nproc-per-node", "1", "--time", "5m", "--job-name", name,
        "--env", f"ODD={value}", "--env", "folder=mine", "--setup", setup, script, "--", argument, "--lr",
    )  # fmt: skip
    assert cluster.job(job)["TimeLimit"] == "00:05:00"
    cluster.wait_until(job, FINAL)
    text = log(tmp_path, job)
    assert f"ODD is {value}, folder is mine" in text
    (line,) = [line for line in text.splitlines() if line.startswith("SUM")]
    assert line.startswith("SUM 3 torchrun 2 2 ")
    assert line.endswith(repr([argument, "--lr"]))
    # A static rendezvous: the ranks have the port of the job, where an elastic one would choose any that is free.
    assert line.split()[6] == str(port_of(int(job), 0))
    summary = json.loads((tmp_path / "kept" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("finished", 2)
    assert job_record(cluster, tmp_path, job) == {"state": "COMPLETED", "ended": True, "exit_code": 0, "restarts": 0}
    assert f"JobName={name}\n" in cluster.run("scontrol", "show", "job", job).stdout


TRAINING = """
    import os, time, torch
    from pathlib import Path
    from torch import nn
    from torch.utils.data import TensorDataset
    from samestep import Run

    pause = 0.2 if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and "SLURM_JOB_ID" in os.environ else 0.0
    with Run(global_batch=4, seed=0) as run:
        model = run.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = run.shard(TensorDataset(torch.arange(4000.0).view(-1, 4) / 1000), shuffle=True, num_workers=1)
        run.checkpoint("out", model=model, optimizer=optimizer, train=data)
        for epoch in data.epochs(2):
            for step in epoch:
                for (x,) in step:
                    step.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 3:
                    Path("started").touch()
                time.sleep(pause)
        if run.is_main:
            torch.save([each.detach() for each in model.parameters()], "weights.pt")
"""


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> list[torch.Tensor]:
    """The weights of TRAINING without interruptions."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder, TRAINING)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ranks(2, run_script, folder / "train.py")
    return torch.load(folder / "weights.pt")


def resume_and_compare(cluster: Cluster, folder: Path, job: str, weights: list[torch.Tensor]) -> None:
    """Wait until a job that has saved is requeued, let it resume, and compare its final weights."""
    cluster.wait_until(job, FINAL | {"PENDING"})
    pending = ("BeginTime", "Resources", "Priority")
    wait_for(lambda: cluster.job(job)["Reason"] in pending, 150, lambda: cluster.describe(job))
    assert cluster.job(job)["Restarts"] == "1"
    assert job_record(cluster, folder, job)["state"] == "PENDING"
    step = (folder / "out" / "latest").read_text().strip()
    assert step < "step-00000500"
    # SLURM would wait two minutes. Two seconds are needed: a node starts no job in the second in which it ended it.
    time.sleep(2)
    # With the time limit of the first start, a job that takes longer than 30 s would be warned and requeued again.
    updated = cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=60", "StartTime=now")
    assert updated.returncode == 0, updated.stderr
    assert cluster.wait_until(job, FINAL)["JobState"] == "COMPLETED"
    text = log(folder, job)
    assert f"saved {step}; the run ends here, start it again to resume" in text
    assert f"samestep: preempted: saved step {int(step[5:])}; start the job again to resume" in text
    assert f"checkpoint: restored step {int(step[5:])} from " in text
    assert job_record(cluster, folder, job) == {"state": "COMPLETED", "ended": True, "exit_code": 0, "restarts": 1}
    for mine, theirs in zip(torch.load(folder / "weights.pt"), weights, strict=True):
        assert torch.equal(mine, theirs)


def test_a_warned_job_saves_is_requeued_and_ends_with_the_weights_of_an_undisturbed_one(cluster, tmp_path, undisturbed):
    write(tmp_path, TRAINING)
    # SLURM checks time limits twice a minute, and warns half a minute early. This warning is due after 30 s: one that
    # is due at once may be sent before the ranks handle it, and is not sent again.
    job = submit(cluster, tmp_path, "--nproc-per-node", "2", "--time", "3m", "--signal-before", "120", "train.py")
    wait_for((tmp_path / "started").exists, 150, lambda: cluster.describe(job))
    assert job_record(cluster, tmp_path, job) == {"state": "RUNNING", "ended": False, "exit_code": None, "restarts": 0}
    resume_and_compare(cluster, tmp_path, job, undisturbed)
    text = log(tmp_path, job)
    assert text.index("SLURM sent a warning; forwarding it to the ranks") < text.index("SIGUSR1: saved step-")
    assert f"requeueing job {job}" in text


def test_a_preempted_job_saves_and_ends_with_the_weights_of_an_undisturbed_one(cluster, tmp_path, undisturbed):
    write(tmp_path, TRAINING)
    job = submit(cluster, tmp_path, "--nodes", "2", "--nproc-per-node", "1", "train.py")
    wait_for((tmp_path / "started").exists, 150, lambda: cluster.describe(job))
    # SLURM sends SIGTERM to every process of the job, data workers too, and the launchers also forward it.
    urgent = cluster.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", seconds=240)
    assert urgent.returncode == 0, urgent.stderr
    resume_and_compare(cluster, tmp_path, job, undisturbed)
    assert "SIGTERM: saved step-" in log(tmp_path, job)


def test_a_cancelled_job_ends_and_is_not_requeued(cluster, tmp_path):
    write(
        tmp_path,
        """
        import signal, sys, time
        from pathlib import Path

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        Path("started").touch()
        time.sleep(100)
        """,
    )
    job = submit(cluster, tmp_path, "--nproc-per-node", "1", "train.py")
    wait_for((tmp_path / "started").exists, 150, lambda: cluster.describe(job))
    cluster.run("scancel", job)
    state = cluster.wait_until(job, FINAL)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")
    entry = job_record(cluster, tmp_path, job)
    assert (entry["state"], entry["ended"], entry["restarts"]) == ("CANCELLED", True, 0)
    assert entry["exit_code"] != 0
    wait_for(lambda: not processes_in(tmp_path), 150)


def processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] if process.cwd() == str(folder) else []
        except psutil.Error:
            continue
    return found


def test_following_a_job_shows_the_traceback_and_returns_the_exit_code(cluster, tmp_path):
    write(
        tmp_path,
        """
        import os, sys, traceback

        def load():
            raise ValueError("no such table")

        try:
            load()
        except ValueError:
            traceback.print_exc()
            sys.exit(3)
        """,
    )
    done = cluster.samestep("submit", "--nproc-per-node", "1", "--follow", "train.py", cwd=tmp_path)
    assert done.returncode == 3
    job = done.stdout.splitlines()[0]
    assert "ValueError: no such table" in done.stdout
    assert done.stderr.splitlines()[-1] == f"samestep: job {job} ended: FAILED, exit code 3"
    assert job_record(cluster, tmp_path, job) == {"state": "FAILED", "ended": True, "exit_code": 3, "restarts": 0}


def test_an_error_of_sbatch_is_shown(cluster, tmp_path):
    write(tmp_path, "")
    done = cluster.samestep("submit", "--folder", "kept", "--partition", "nowhere", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"samestep: sbatch rejected {tmp_path}/kept/slurm.sbatch: ")
    assert "invalid partition specified: nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
