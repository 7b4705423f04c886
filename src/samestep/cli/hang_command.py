"""`samestep hang`: what the ranks of a live run do now, and which one the others wait for, without stopping it."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import click
import psutil

from samestep.environment.world import run_folder
from samestep.errors import LaunchError
from samestep.launch.hang_exchange import HangFolder, LauncherInfo
from samestep.messages import read_integer, shorten

_ANSWER_SECONDS = 30.0  # the launchers of other nodes get a few seconds, and a shared folder may be slow


@click.command(
    epilog="Examples: samestep hang; samestep hang runs/train-20260131-093005; samestep hang 4411. The launcher of "
    "node 0 answers, so run it on a machine that sees the folder of the run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.argument("run", metavar="[RUN_DIR | PID]", required=False)
def command(run: str | None, as_json: bool) -> int:
    """Show what each rank of a live run does, and which rank the others wait for; the run continues.

    RUN_DIR is the folder of the run, and PID the process of its launcher or of a rank on this machine. The default is
    the newest run in ./runs that is running.
    """
    if sys.platform != "linux":
        raise LaunchError(
            f"`samestep hang` needs Linux, this is {sys.platform}: use `py-spy dump --pid PID` for each rank instead"
        )
    pid = None if run is None else read_integer(run)
    folder = _newest_running() if run is None else Path(run) if pid is None else _folder_of(pid)
    hang = HangFolder(folder)
    launcher = _check(folder, hang)
    answer = hang.ask(_ANSWER_SECONDS, lambda: (info := hang.launcher()) is not None and info.is_running)
    if answer is None:
        _check(folder, hang)  # it may have ended in the meantime
        raise LaunchError(
            f"the launcher of {folder} (process {launcher.pid} on {launcher.host}) has not answered within "
            f"{_ANSWER_SECONDS:.0f} s: check that it runs with `ps {launcher.pid}` there, that it is not stopped "
            "(state T), and that this folder is the same on both machines"
        )
    click.echo(json.dumps(answer["report"], indent=2) if as_json else f"{answer['text']}\n{answer['path']}")
    return 0


def _newest_running() -> Path:
    here = Path("runs")
    folders = sorted((path.parent.parent for path in here.glob("*/hang/launcher.json")), key=_started, reverse=True)
    running, unreadable = dict[Path, LauncherInfo](), list[LaunchError]()
    for folder in folders:
        try:
            launcher = HangFolder(folder).launcher()
        except LaunchError as error:  # another run may be the one that is running
            unreadable.append(error)
            continue
        if launcher is not None and launcher.is_running:
            running[folder] = launcher
    local = [folder for folder, launcher in running.items() if launcher.is_local]
    if found := next(iter([*local, *running]), None):  # one of another host may have been killed
        return found
    if unreadable:
        raise unreadable[0]
    raise LaunchError(
        f"no run in {here.absolute()} is running: pass the folder that `samestep run` prints at its start, as in "
        "`samestep hang runs/train-20260131-093005`, or the process id of a rank"
    )


def _started(folder: Path) -> float:
    return (folder / "hang" / "launcher.json").stat().st_mtime


def _folder_of(pid: int) -> Path:
    """The run's folder of a launcher or a rank on this machine."""
    try:
        process = psutil.Process(pid)
        if (folder := run_folder(process.environ())) is not None:
            return folder
        for child in process.children(recursive=True):  # a launcher sets the variable for its ranks after its own start
            with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                if (folder := run_folder(child.environ())) is not None:
                    return folder
    except psutil.ZombieProcess as error:
        raise LaunchError(f"process {pid} has ended: pass the folder of the run") from error
    except psutil.NoSuchProcess as error:
        raise LaunchError(
            f"there is no process {pid} on this machine: run `samestep hang` on the machine of the process, or pass "
            "the folder of the run"
        ) from error
    except (psutil.AccessDenied, OSError) as error:
        raise LaunchError(
            f"process {pid} cannot be read: it belongs to another user; pass the folder of the run"
        ) from error
    raise LaunchError(
        f"process {pid} was not started by `samestep run`, which watches its ranks: for a process of torchrun use "
        f"`py-spy dump --pid {pid}`, or start the script with `samestep run`"
    )


def _check(folder: Path, hang: HangFolder) -> LauncherInfo:
    """The launcher of a run; raises if the run cannot be asked."""
    if not folder.is_dir():
        raise LaunchError(
            f"there is no folder {shorten(str(folder))}: pass the folder of a run, which `samestep run` prints at its "
            "start, or the process id of a rank"
        )
    launcher = hang.launcher()
    if launcher is None:
        raise LaunchError(
            f"{folder} is not the folder of a run that `samestep run` has started: pass the one that it prints at its "
            "start (runs/SCRIPT-DATE-TIME or --folder); torchrun and srun do not watch their ranks"
        )
    if not launcher.is_running:
        raise LaunchError(
            f"the run in {folder} has ended: its logs are in {folder / 'logs'}, reports of hangs in {hang.path}"
        )
    if launcher.node != 0:
        raise LaunchError(
            f"{folder} is the folder of node {launcher.node} of the run, and the launcher of node 0 answers: run "
            f"`samestep hang` on {launcher.main_host}, or start all nodes with the same --folder on a shared disk"
        )
    return launcher
