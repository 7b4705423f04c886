"""What a run is: its command, its code version, its ranks and its configuration, as events for reports of the run."""

import functools
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch

from samestep import __version__
from samestep.context import RunContext, read_hyperparameters
from samestep.environment.hardware import cpu_name
from samestep.environment.processes import LAUNCHER, seconds_from_boot
from samestep.environment.world import LAUNCHER_LINK, World, oom_retries, read_environ, run_folder
from samestep.launch.configuration import (
    config_values,
    describe_command,
    hide_secret_values,
    read_launch,
    recorded_variables,
)
from samestep.loggers.run_files import end_of_text
from samestep.messages import hide_secrets

_GIT_SECONDS: Final = 10.0  # `git status` of a large repository on a shared disk
_CLOSE_SECONDS: Final = 2.0


def describe_start(context: RunContext, hosts: Sequence[str], devices: Sequence[str]) -> dict[str, Any]:
    """The fields of the event `start`; `hosts` and `devices` have a name per rank."""
    config = context.config
    return describe_process(context.world) | {
        "ranks": context.world.size,
        "nodes": context.world.nodes,
        "hosts": dict(Counter(hosts)),
        "devices": dict(Counter(devices)),
        "backend": context.comm.backend,
        "global_batch": config.global_batch,
        "seed": config.seed,
        "ledger": config.ledger,
        "choices": context.acceleration.choices(),
    }


def describe_process(world: World) -> dict[str, Any]:
    """The fields of the event `start` that are about this process and who has started it."""
    environ, launcher_folder = read_environ(), run_folder()
    return {
        "command": hide_secrets(sys.argv),
        "folder": str(Path.cwd()),
        "versions": {"samestep": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_from_boot": round(seconds_from_boot(os.getpid()), 2),
        "launcher": "samestep run" if LAUNCHER in environ else world.launcher,
        "launcher_folder": str(launcher_folder.absolute()) if launcher_folder is not None else None,
        "job": world.job,
        "restart": world.restart,
        "out_of_memory_retries": oom_retries(),
    }


def describe_configuration(context: RunContext) -> dict[str, Any]:
    """The content of config.json: how the run was started, its options and its hyperparameters, as JSON types."""
    environ, config = read_environ(), context.config
    launch = read_launch(run_folder()) if LAUNCHER in environ else {}
    given = {**config_values(environ), **hide_secret_values(read_hyperparameters(config.config))}
    started = {"command": hide_secrets(sys.argv), "folder": str(Path.cwd()), **describe_command()}
    started |= {"launcher": None, "config_file": None, "rerun_of": None, "environment": recorded_variables(environ)}
    run = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in ("loggers", "config")}
    run["loggers"] = None if config.loggers is None else [type(each).__name__ for each in config.loggers]
    own = {"ranks": context.world.size, "nodes": context.world.nodes, "config": given, "run": run}
    versions = {"samestep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found = {**started, **launch, **own, "versions": versions}
    return json.loads(json.dumps(found, default=str))


def device_name(device: torch.device) -> str:
    """The GPU, or the CPU, that a rank computes on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def link_launcher_folder(folder: Path) -> None:
    """Link the folder of the run in that of its launcher, which prints its own at the start, if they differ."""
    launcher = run_folder()
    if launcher is None or launcher.absolute() == folder.absolute():
        return
    link = launcher / LAUNCHER_LINK
    with suppress(OSError):  # a file system without links: `samestep report` then needs the folder of the run
        link.unlink(missing_ok=True)
        link.symlink_to(folder.absolute())


class CodeVersion:
    """Asks git for the commit of the script's folder, in a thread, since that may take seconds.

    It records the event `code`.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        self._record, self._folder = record, Path(sys.argv[0]).absolute().parent
        self._thread = threading.Thread(target=self._ask, name="samestep code version", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for git, but not for long."""
        self._thread.join(_CLOSE_SECONDS)

    def _ask(self) -> None:
        if (found := read_code_version(self._folder)) is not None:
            self._record("code", **found)


@functools.cache  # a process may have many runs
def read_code_version(folder: Path) -> Mapping[str, object] | None:
    """Commit and branch of the repository that a folder is in, and whether tracked files have changed since."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    text = _git(folder, "diff", "HEAD") if changed else ""
    digest = None if text is None or changed is None else hashlib.sha256(text.encode()).hexdigest() if text else ""
    return {
        "commit": commit,
        "branch": branch,
        "is_changed": None if changed is None else bool(changed),
        "changes": digest,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it is not installed, fails, or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="backslashreplace").strip() if done.returncode == 0 else None


def describe_model(model: torch.nn.Module, strategy: str) -> dict[str, Any]:
    """The fields of the event `model`."""
    parameters = list(model.parameters())
    return {
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in parameters),
        "trainable": sum(each.numel() for each in parameters if each.requires_grad),
        "strategy": strategy,
    }


def describe_end(status: str, steps: int, error: BaseException | None) -> dict[str, Any]:
    """The fields of the event `end`."""
    fields: dict[str, Any] = {"status": status, "steps": steps}
    if error is not None:
        text = "".join(traceback.format_exception(error))
        fields |= {"error": f"{type(error).__name__}: {error}", "traceback": end_of_text(text)}
    return fields
