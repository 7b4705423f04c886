"""Whether bfloat16 kills a process on this CPU, tried out in a child.

Some virtual machines advertise AMX instructions that they do not have. oneDNN believes them, and the first bfloat16
product ends the process with SIGILL. A limit on the instructions that oneDNN may use cures it.
"""

import hashlib
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from samestep.disk import write_atomically
from samestep.environment.world import read_environ

Verdict = Literal["works", "cured", "dies", "unknown"]
CURE = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

_SIZE = 64
_PRODUCT = f"import torch; a = torch.ones({_SIZE}, {_SIZE}, dtype=torch.bfloat16); print(float((a @ a).float().sum()))"
_SECONDS = 120.0


@dataclass(frozen=True)
class Bf16:
    """What became of one bfloat16 product on this CPU."""

    verdict: Verdict
    """It works; it kills with SIGILL but works with the cure; it kills even so; or nobody knows."""
    detail: str
    """What was seen, in words for a person."""

    @property
    def cure(self) -> dict[str, str]:
        """Variables to set for processes that are to survive bfloat16; empty where nothing is needed or helps."""
        return dict(CURE) if self.verdict == "cured" else {}


def probe_bf16(environ: Mapping[str, str] | None = None) -> Bf16:
    """Try one product; the answer for this CPU, torch and environment is kept, since trying costs seconds."""
    variables = read_environ() if environ is None else environ
    kept = _answer_path(variables)
    answer = _read(kept)
    if answer is None:
        answer = _try(variables)
        if answer.verdict != "unknown":
            _keep(kept, answer)
    return answer


def _try(environ: Mapping[str, str]) -> Bf16:
    first = _multiply(environ)
    if first == 0:
        return Bf16("works", "a bfloat16 product works on this CPU")
    if first != -signal.SIGILL:
        return Bf16("unknown", f"a trial of bfloat16 ended with {first}, which says nothing about the CPU")
    told = " ".join(f"{name}={value}" for name, value in CURE.items())
    if _multiply({**environ, **CURE}) == 0:
        return Bf16(
            "cured", f"bfloat16 kills a process on this CPU (SIGILL: it advertises AMX and lacks it); {told} cures it"
        )
    return Bf16("dies", f"bfloat16 kills a process on this CPU (SIGILL), even with {told}: use float32 or float16")


def _multiply(environ: Mapping[str, str]) -> int | str:
    """Exit status of the child (negative: the signal that ended it), or what went wrong instead."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PRODUCT],
            env={**environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if child.returncode == 0 and child.stdout.strip() != str(float(_SIZE**3)):
        return f"a wrong sum, {child.stdout.strip()}"
    return child.returncode


def _answer_path(environ: Mapping[str, str]) -> Path:
    """Where the answer is kept: one file for each kind of CPU, since a home folder is shared by unlike nodes."""
    asked = (_cpu(), version("torch"), platform.python_version(), environ.get("ONEDNN_MAX_CPU_ISA", ""))
    name = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
    return Path(cache) / "samestep" / f"bf16-{name}.json"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in wanted}))


def _read(path: Path) -> Bf16 | None:
    try:
        kept = json.loads(path.read_text())
        return Bf16(kept["verdict"], kept["detail"])
    except (OSError, ValueError, KeyError, TypeError):  # not tried yet, or not our file: try again
        return None


def _keep(path: Path, answer: Bf16) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"verdict": answer.verdict, "detail": answer.detail}))
    except OSError:  # a home that cannot be written costs the next launch two seconds, no more
        return
