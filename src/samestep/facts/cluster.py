"""Whether SLURM is here, and which of its jobs this process belongs to."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_PATIENCE_SECONDS = 3


@dataclass(frozen=True)
class Slurm:
    """What can be told of SLURM without asking its controller."""

    version: str | None
    """As srun tells it, or None where there is no srun."""
    job: str | None
    """The id of the job, or None outside of one."""
    partition: str | None
    """Where the job runs."""
    nodes: int | None
    """How many nodes the job has."""


def read_slurm(environ: Mapping[str, str]) -> Slurm:
    """Ask srun for its version, and the environment for the job."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    return Slurm(
        version=_srun_version(),
        job=environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID")),
        partition=environ.get("SLURM_JOB_PARTITION"),
        nodes=int(nodes) if nodes.isdecimal() else None,
    )


def _srun_version() -> str | None:
    srun = shutil.which("srun")
    if srun is None:
        return None
    try:
        asked = subprocess.run(
            [srun, "--version"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip().splitlines()
        return f"unknown (srun --version: {said[-1] if said else f'exit code {error.returncode}'})"
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return asked.stdout.strip().removeprefix("slurm ").removeprefix("slurm-wlm ")
