"""The trial runs real children: stand-ins for a python whose bfloat16 works, dies or says something else."""

import sys
from pathlib import Path

import pytest

from samestep.environment.bf16_probe import Bf16, probe_bf16

SUM = "echo 262144.0"
ILL = "kill -ILL $$"


def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[Bf16, int]:
    """The answer of two trials in a row, and how many children they took."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho x >> {tmp_path}/children\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    answer = probe_bf16(environ)
    assert probe_bf16(environ) == answer
    return answer, len((tmp_path / "children").read_text().split())


def test_a_cpu_that_works_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer, children = trial(tmp_path, monkeypatch, SUM)
    assert (answer.verdict, answer.cure, children) == ("works", {}, 1)


def test_a_cpu_that_dies_is_cured_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer, children = trial(tmp_path, monkeypatch, f'[ "$ONEDNN_MAX_CPU_ISA" = AVX512_CORE_BF16 ] && {SUM} || {ILL}')
    assert (answer.verdict, children) == ("cured", 2)
    assert answer.cure == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    assert answer.detail == (
        "bfloat16 kills a process on this CPU (SIGILL: it advertises AMX and lacks it); "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 cures it"
    )


def test_a_cpu_that_nothing_cures_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer, _ = trial(tmp_path, monkeypatch, ILL)
    assert (answer.verdict, answer.cure) == ("dies", {})
    assert answer.detail.endswith("even with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: use float32 or float16")


@pytest.mark.parametrize(("script", "seen"), [("exit 1", "1"), ("kill -SEGV $$", "-11"), ("echo 5", "a wrong sum, 5")])
def test_another_end_says_nothing_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seen: str
):
    answer, children = trial(tmp_path, monkeypatch, script)
    assert (answer.verdict, answer.cure, children) == ("unknown", {}, 2)
    assert answer.detail == f"a trial of bfloat16 ended with {seen}, which says nothing about the CPU"


def test_a_home_that_cannot_be_written_still_gets_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    answer, children = trial(tmp_path, monkeypatch, SUM)
    assert (answer.verdict, children) == ("works", 2)
