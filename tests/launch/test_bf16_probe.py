"""The bfloat16 probe runs real child processes: scripts in place of a Python whose bfloat16 works, crashes or fails."""

import sys
from pathlib import Path

import pytest

from samestep.environment.hardware import Bf16Support, probe_bf16

SUM = "echo 262144.0"
ILL = "kill -ILL $$"


def probe_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[Bf16Support, int]:
    """The result of two probes in a row, and how many child processes they started."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho x >> {tmp_path}/children\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    support = probe_bf16(environ)
    assert probe_bf16(environ) == support
    return support, len((tmp_path / "children").read_text().split())


def test_a_working_cpu_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    support, children = probe_twice(tmp_path, monkeypatch, SUM)
    assert (support.status, support.workaround, children) == ("works", {}, 1)


def test_a_workaround_that_helps_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = f'[ "$ONEDNN_MAX_CPU_ISA" = AVX512_CORE_BF16 ] && {SUM} || {ILL}'
    support, children = probe_twice(tmp_path, monkeypatch, script)
    assert (support.status, children) == ("workaround", 2)
    assert support.workaround == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    assert support.detail == (
        "bfloat16 crashes on this CPU (SIGILL: it advertises AMX but lacks it); "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 prevents this"
    )


def test_a_cpu_that_crashes_in_spite_of_the_workaround_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    support, _ = probe_twice(tmp_path, monkeypatch, ILL)
    assert (support.status, support.workaround) == ("crashes", {})
    assert support.detail.endswith("even with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: use float32 or float16")


@pytest.mark.parametrize(("script", "end"), [("exit 1", "1"), ("kill -SEGV $$", "-11"), ("echo 5", "a wrong sum, 5")])
def test_any_other_end_is_unknown_and_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, end: str
):
    support, children = probe_twice(tmp_path, monkeypatch, script)
    assert (support.status, support.workaround, children) == ("unknown", {}, 2)
    assert support.detail == f"the bfloat16 probe ended with {end}, which does not show a CPU problem"


def test_an_unwritable_cache_folder_still_gives_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    support, children = probe_twice(tmp_path, monkeypatch, SUM)
    assert (support.status, children) == ("works", 2)
