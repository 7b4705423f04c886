"""Ranks that save because a node joins get the grace period of a signal, not the shorter time that torch gives."""

import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from samestep.launch.agent import save_and_stop_ranks
from samestep.launch.signal_handler import SignalHandler
from tests.launch.launched import start, wait_for

SAVER = """
    import signal, sys, time
    def save(*_):
        time.sleep(float(sys.argv[1]))
        open(sys.argv[2], "w").close()
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""


def start_saver(seconds: float, written: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", dedent(SAVER), str(seconds), str(written)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


@pytest.mark.slow
def test_running_ranks_save_and_are_not_waited_for_longer_than_needed(tmp_path: Path):
    ranks = [start_saver(seconds, tmp_path / f"{seconds}") for seconds in (0.5, 2.0)]
    signals = SignalHandler(shutdown_timeout=1, grace_period=60)
    signals.rank_pids = frozenset(each.pid for each in ranks)
    start_time = time.monotonic()
    save_and_stop_ranks(signals)
    assert [each.wait() for each in ranks] == [75, 75]
    assert len(list(tmp_path.iterdir())) == 2
    assert time.monotonic() - start_time < 40


def test_ranks_that_save_for_longer_than_the_grace_period_are_killed_when_a_node_joins(tmp_path: Path):
    rank = start_saver(60.0, tmp_path / "saved")
    signals = SignalHandler(shutdown_timeout=1, grace_period=1)
    signals.rank_pids = frozenset([rank.pid])
    save_and_stop_ranks(signals)
    assert rank.wait(30) == -9


LONG = """
    import os, signal, sys, time
    def save(*_):
        time.sleep(34)  # torch would kill after 30 s
        open("saved", "w").close()
        sys.exit(75)
    if os.environ["WORLD_SIZE"] == "1":
        signal.signal(signal.SIGTERM, save)
        open("alone", "w").close()
        time.sleep(100)
    open("up-" + os.environ["RANK"], "w").close()
"""


@pytest.mark.slow
def test_a_save_that_takes_longer_than_torch_waits_is_complete_when_a_node_joins(tmp_path: Path):
    options = ("--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=1")
    with (tmp_path / "stderr").open("w") as stderr:
        first = start(tmp_path, LONG, "--nnodes", "1:2", *options, "--folder", "first", "train.py", stderr=stderr)
    try:
        wait_for((tmp_path / "alone").exists, 150)
        line = (tmp_path / "stderr").read_text().splitlines()[0]
        join = line.partition("run on another node: samestep run ")[2].removesuffix(" ...").split()
        second = start(tmp_path, LONG, *join, *options, "--folder", "second", "train.py").finish(150)
    finally:
        ended = first.finish(60)
    assert (tmp_path / "saved").exists()
    assert (second.code, ended.code) == (0, 0), second.err
    assert sorted(path.name for path in tmp_path.glob("up-*")) == ["up-0", "up-1"]
