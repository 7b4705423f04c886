"""Ranks that save because a node joins: they get the time that a signal gives them, not what torch would leave them."""

import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from samestep.launch.agent import let_save
from samestep.launch.signal_handler import Stop
from tests.launch.started import start, wait_for

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


def saver(seconds: float, written: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", dedent(SAVER), str(seconds), str(written)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def test_ranks_that_live_are_asked_to_save_and_waited_for_no_longer_than_they_need(tmp_path: Path):
    ranks = [saver(seconds, tmp_path / f"{seconds}") for seconds in (0.5, 2.0)]
    stop = Stop(patience=1, grace=60)
    stop.ranks = frozenset(each.pid for each in ranks)
    began = time.monotonic()
    let_save(stop)
    assert [each.wait() for each in ranks] == [75, 75]
    assert len(list(tmp_path.iterdir())) == 2
    assert time.monotonic() - began < 40


def test_ranks_that_save_for_longer_than_the_grace_are_killed_where_a_node_joins(tmp_path: Path):
    rank = saver(60.0, tmp_path / "saved")
    stop = Stop(patience=1, grace=1)
    stop.ranks = frozenset([rank.pid])
    let_save(stop)
    assert rank.wait(30) == -9


LONG = """
    import os, signal, sys, time
    def save(*_):
        time.sleep(34)  # torch kills after 30
        open("saved", "w").close()
        sys.exit(75)
    if os.environ["WORLD_SIZE"] == "1":
        signal.signal(signal.SIGTERM, save)
        open("alone", "w").close()
        time.sleep(100)
    open("up-" + os.environ["RANK"], "w").close()
"""


@pytest.mark.slow
def test_a_save_that_takes_longer_than_torch_would_wait_is_whole_when_a_node_joins(tmp_path: Path):
    options = ("--nproc-per-node", "1", "--rdzv-conf", "last_call_timeout=1")
    with (tmp_path / "said").open("w") as said:
        first = start(tmp_path, LONG, "--nnodes", "1:2", *options, "--folder", "first", "train.py", stderr=said)
    try:
        wait_for((tmp_path / "alone").exists, 60)
        told = (tmp_path / "said").read_text().splitlines()[0]
        joining = told.partition("type on another: samestep run ")[2].removesuffix(" ...").split()
        second = start(tmp_path, LONG, *joining, *options, "--folder", "second", "train.py").finish(150)
    finally:
        ended = first.finish(60)
    assert (tmp_path / "saved").exists()
    assert (second.code, ended.code) == (0, 0), second.err
    assert sorted(path.name for path in tmp_path.glob("up-*")) == ["up-0", "up-1"]
