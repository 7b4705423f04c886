"""Real hangs of real ranks over gloo: what `samestep run` prints, and what `samestep hang` answers."""

import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.launch.launched import Ended, Started, start, wait_for

pytestmark = pytest.mark.slow

# The ranks wait until all have imported torch, so that no timeout has to allow for it: many launches run side by side.
MEET = """
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

meeting = Path(os.environ["MEETING"])
(meeting / f"up-{os.environ['RANK']}").touch()
while len(list(meeting.glob("up-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)


def wait_for_report():
    while not list(meeting.rglob("hang/report-*.json")):
        time.sleep(0.05)


"""


def script(text):
    return MEET + dedent(text)


RANK_1_SLEEPS = """
    dist.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for step in range(9):
        if step == 5 and rank == 1:
            time.sleep(300)  # the cause
        model(torch.ones(3, 4)).sum().backward()
"""


def line_of(script, text):
    return next(f"train.py:{number}" for number, line in enumerate(script.split("\n"), 1) if text in line)


CAUSE = line_of(script(RANK_1_SLEEPS), "# the cause")


@dataclass(frozen=True)
class Script:
    """A script and how it is launched."""

    text: str
    ranks: int = 2
    nodes: int = 1
    options: tuple[str, ...] = ()

    def start(self, folder: Path) -> list[Started]:
        """Start the launcher of each node, in folders below this one, which is where the ranks meet."""
        options = ["--nproc-per-node", str(self.ranks // self.nodes), "--folder", "kept", *self.options]
        if self.nodes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            options += ["--nnodes", str(self.nodes), "--rdzv-endpoint", endpoint]
        folders = [folder / str(node) for node in range(self.nodes)]
        for each in folders:
            each.mkdir(parents=True)
        environ = {"MEETING": str(folder), "OMP_NUM_THREADS": "1"}
        return [start(each, script(self.text), *options, "train.py", env=environ) for each in folders]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """What the launcher of each node has printed, for all scripts: they run side by side, since they mostly wait."""
    folder = tmp_path_factory.mktemp("launches")
    started = {name: each.start(folder / name.replace(" ", "-")) for name, each in SCRIPTS.items()}
    try:
        return {name: [node.finish() for node in nodes] for name, nodes in started.items()}
    finally:
        for process in (process for nodes in started.values() for node in nodes for process in node.processes()):
            process.kill()


def ask(folder, *arguments):
    answer = subprocess.run(
        [sys.executable, "-m", "samestep", "hang", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return answer.returncode, answer.stdout, answer.stderr


def test_a_sleeping_rank_of_a_plain_script_is_named_with_its_line_before_and_after_the_timeout(launches):
    (ended,) = launches["sleeps"]
    assert ended.code == 1
    assert not ended.left
    summary = (
        r"samestep: rank 1 is holding up the other 2 ranks for \d+ s\.\n"
        r"  ranks 0 and 2 wait in all_reduce #\d+ \(DDP gradients, 10 elements\), called from train\.py:\d+: .*\n"
        rf"  rank 1 \(node .*, pid \d+\) has not called it; it is at {CAUSE}: time\.sleep\(300\)"
    )
    assert len(re.findall(summary, ended.err)) == 2, ended.err  # at once, and in the report of the failure
    report = ended.err[ended.err.rindex("samestep: rank 1 is holding up") :].splitlines()
    rows = [line for line in report if line.startswith("  rank") and "  pid " in line]
    assert len(rows) == 3, ended.err
    assert rows[0].endswith("ended by the launcher  <- the cause")
    assert all("victim: " in row for row in rows[1:]), ended.err
    (path,) = re.findall(r"  full report: (.*)", "\n".join(report))
    assert json.loads(Path(path).with_suffix(".json").read_text())["cause"]["culprits"] == [1]


SAMESTEP = """
    import torch
    from pathlib import Path
    from samestep import Run

    with Run(global_batch=4, step_timeout=20, folder="out") as run:
        model = run.wrap(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in run.shard([torch.ones(4)] * 40_000, num_workers=0).epochs(100):
            for step in epoch:
                for x in step:
                    step.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == 3:
                    run.log({"loss": 1.0}, now=True)
                    Path(f"up-{run.rank}").touch()
"""


def test_a_live_run_answers_and_a_stopped_rank_ends_it_at_the_timeout(tmp_path):
    started = start(tmp_path, SAMESTEP, "--nproc-per-node", "2", "train.py")
    try:
        started.wait_for_ranks(2)
        code, out, err = ask(tmp_path)
        assert code == 0, err
        assert out.startswith("samestep: no rank waits"), out
        assert re.search(r"^rank 1 \(node .*, pid \d+\): .*at train\.py:\d+: ", out, re.M), out
        pid = int(re.search(r"^rank 1 \(node .*, pid (\d+)\)", out, re.M)[1])
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        wait_for(lambda: "holding up rank 0" in ask(tmp_path, str(started.process.pid))[1], 120)
        code, out, err = ask(tmp_path, str(pid), "--json")
        assert code == 0, err
        assert json.loads(out)["cause"]["kind"] == "stopped"
    finally:
        ended = started.finish()
    assert ended.code == 1, ended.err
    assert not ended.left
    last = ended.err[ended.err.rindex("samestep: rank 1 is holding up rank 0") :]
    assert f"rank 1 (node {socket.gethostname()}, pid {pid}) is stopped by a signal" in last
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"
    (folder,) = (tmp_path / "runs").iterdir()
    assert ask(tmp_path, str(folder))[2].startswith(f"samestep: the run in {folder} has ended: its logs are in")


DIFFERENT = """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    dist.all_reduce(torch.ones(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.all_reduce(torch.ones(3), group=groups[dist.get_rank()])
    dist.all_reduce(torch.ones(1))
    print("all ranks are here")
"""


def test_ranks_in_different_collectives_are_restarted_before_the_timeout(launches):
    (ended,) = launches["different"]
    assert ended.code == 0, ended.err
    assert "different collectives" in ended.err
    assert "samestep: restarting all ranks" in ended.err
    assert "all ranks are here" in ended.out
    assert "Timed out waiting" not in ended.err


SLOW_START = """
    if os.environ["RANK"] == "1":
        time.sleep(10)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    print("all ranks are here")
"""


def test_a_rank_that_starts_later_than_the_others_ends_no_rank(launches):
    (ended,) = launches["slow start"]
    assert ended.code == 0, ended.err
    assert "all ranks are here" in ended.out
    assert "holding up" not in ended.err


SECOND_FAILURE = """
    import signal
    import threading

    def end():
        wait_for_report()
        os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 2:
        print("the last words of rank 2", flush=True)
        threading.Thread(target=end).start()
    if dist.get_rank() == 0:
        time.sleep(300)
    dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_is_killed_while_all_wait_for_another_one_is_the_failure(launches):
    (ended,) = launches["second failure"]
    assert ended.code == 137, ended.err
    assert "samestep: rank 0 is holding up the other 2 ranks" in ended.err
    report = ended.err[ended.err.rindex("rank(s) on") :]
    assert re.search(r"  rank 2 +pid \d+ +killed by SIGKILL.*  <- first failure", report), ended.err
    assert "the last words of rank 2" in report


RESOLVED = """
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        wait_for_report()
    dist.all_reduce(torch.ones(1))
    time.sleep(12)  # until after the timeout, at which the ranks would be ended
    print("all ranks have computed")
"""


def test_a_wait_on_two_nodes_that_is_over_before_the_timeout_ends_no_rank(launches):
    ended = launches["resolved on two nodes"]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    assert "samestep: rank 0 is holding up rank 1" in ended[0].err + ended[1].err
    assert all("all ranks have computed" in "".join(each.logs().values()) for each in ended)


def test_two_nodes_find_the_cause_together_and_both_end_with_it(launches):
    ended = launches["sleeps on two nodes"]
    assert [each.code for each in ended] == [1, 1]
    counts = [each.err.count("samestep: rank 1 is holding up rank 0") for each in ended]
    assert sorted(counts) == [1, 2], [each.err for each in ended]  # node 0 says it before the timeout, too
    for each in ended:
        report = each.err[each.err.rindex("samestep: rank 1 is holding up rank 0") :]
        assert re.search(rf"has not called it; it is at .*{CAUSE}: time\.sleep\(300\)", report), report
        assert "  <- the cause" in report or "victim: " in report


SCRIPTS = {
    "sleeps": Script(RANK_1_SLEEPS.format(timeout=12), ranks=3),
    "different": Script(DIFFERENT, options=("--on-hang", "restart", "--max-restarts", "1")),
    "slow start": Script(SLOW_START),
    "second failure": Script(SECOND_FAILURE, ranks=3),
    "resolved on two nodes": Script(RESOLVED, nodes=2),
    "sleeps on two nodes": Script(RANK_1_SLEEPS.format(timeout=25), nodes=2),
}
