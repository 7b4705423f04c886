"""Check in a child process whether bfloat16 crashes on this CPU.

Some virtual machines advertise AMX instructions that they do not have. oneDNN then uses them, and the first bfloat16
matrix product ends the process with SIGILL. Limiting the instruction set that oneDNN may use works around it.
"""

import hashlib
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from samestep.disk import write_atomically
from samestep.environment.world import cache_folder, read_environ

WORKAROUND = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

_SIZE = 64
_PRODUCT = f"import torch; a = torch.ones({_SIZE}, {_SIZE}, dtype=torch.bfloat16); print(float((a @ a).float().sum()))"


@dataclass(frozen=True)
class Bf16Support:
    """The result of one bfloat16 matrix product on this CPU."""

    status: Literal["works", "workaround", "crashes", "unknown"]
    """`workaround`: crashes with SIGILL unless WORKAROUND is set. `crashes`: WORKAROUND does not help either."""
    detail: str

    @property
    def workaround(self) -> dict[str, str]:
        """Environment variables that prevent the crash; empty if none are needed or none help."""
        return dict(WORKAROUND) if self.status == "workaround" else {}


def probe_bf16(environ: Mapping[str, str] | None = None) -> Bf16Support:
    """Run one bfloat16 product in a child process, which takes seconds; the result is cached per CPU and torch."""
    if find_spec("torch") is None:
        return Bf16Support("unknown", "not probed, since torch is not installed")
    variables = read_environ() if environ is None else environ
    cache = _cache_path(variables)
    try:
        return Bf16Support(**json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError):  # not probed yet, or not our file
        support = _probe(variables)
    if support.status != "unknown":
        with suppress(OSError):  # without a writable home the next launch probes again, which costs two seconds
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache, json.dumps(asdict(support)))
    return support


def _probe(environ: Mapping[str, str]) -> Bf16Support:
    first = _multiply(environ)
    if first == 0:
        return Bf16Support("works", "a bfloat16 product works on this CPU")
    if first != -signal.SIGILL:
        return Bf16Support("unknown", f"the bfloat16 probe ended with {first}, which does not show a CPU problem")
    workaround = " ".join(f"{name}={value}" for name, value in WORKAROUND.items())
    if _multiply({**environ, **WORKAROUND}) == 0:
        detail = f"bfloat16 crashes on this CPU (SIGILL: it advertises AMX but lacks it); {workaround} prevents this"
        return Bf16Support("workaround", detail)
    detail = f"bfloat16 crashes on this CPU (SIGILL), even with {workaround}: use float32 or float16"
    return Bf16Support("crashes", detail)


def _multiply(environ: Mapping[str, str]) -> int | str:
    """The child's exit code (negative: the signal that ended it), or what went wrong instead."""
    command, variables = [sys.executable, "-c", _PRODUCT], {**environ, "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if child.returncode == 0 and child.stdout.strip() != str(float(_SIZE**3)):
        return f"a wrong sum, {child.stdout.strip()}"
    return child.returncode


def _cache_path(environ: Mapping[str, str]) -> Path:
    """One file per kind of CPU, since nodes with different CPUs may share a home directory."""
    key = (_cpu(), version("torch"), platform.python_version(), environ.get("ONEDNN_MAX_CPU_ISA", ""))
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    return cache_folder(environ) / f"bf16-{digest}.json"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in names}))
