"""`samestep rerun`: repeat a run with the same command, options and number of ranks, in a new folder."""

import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from samestep import __version__
from samestep.cli.run_command import command as run_command
from samestep.environment.world import COMPARISON, LAUNCHER_LINK, export, read_environ
from samestep.errors import LaunchError
from samestep.launch import python_launch
from samestep.launch.configuration import (
    CONFIG_FILE,
    HIDDEN,
    REPEATED_VARIABLES,
    KnownConfig,
    read_launch,
    recorded_variables,
)
from samestep.launch.job import count_processes, folder_name, make_folder

_echo = partial(click.echo, err=True)
_REQUIRED: Final = {"script": str, "module": bool, "arguments": list, "folder": str, "ranks": int}


@click.command(
    epilog="Arguments after `--` are added to those of the script, so they win. Examples: samestep rerun "
    "runs/train-20260131-093005; samestep rerun out --nproc-per-node 4; samestep rerun out -- --lr 0.2; "
    "samestep rerun out --resume",
)
@click.option("--nproc-per-node", "processes", metavar="auto|gpu|cpu|N",
              help="Number of ranks; default: that of the run.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path), help="The new folder; default runs/SCRIPT-DATE-TIME.")
@click.option("--resume", is_flag=True,
              help="Continue the run in its own folders, from its last checkpoint.")  # fmt: skip
@click.argument("run_folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.argument("added", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
@click.pass_context
def command(
    context: click.Context,
    run_folder: Path,
    processes: str | None,
    folder: Path | None,
    resume: bool,
    added: tuple[str, ...],
) -> int:
    """Repeat the run of RUN_DIR, as its config.json describes it; the exit code is that of `samestep run`.

    The new run has its own folder, and starts from the beginning: its logs and checkpoints go into the new folder, even
    if the script names other ones. It is started in the same working folder. A message says what has changed since:
    the code, versions, environment variables.
    """
    if resume and folder is not None:
        raise LaunchError("--resume continues in the run's own folder: leave --folder out, or leave --resume out")
    if processes is not None:
        count_processes(processes, gpus=1, cores=1)  # reports a mistake before anything else
    run_folder = run_folder.absolute()
    known = _read(run_folder)
    arguments = _arguments(known, added)
    nodes = known.get("nodes", 1)
    if processes is None and nodes != 1:
        raise LaunchError(
            f"{run_folder} was a run on {nodes} nodes: pass --nproc-per-node {known['ranks']} to repeat it on this "
            f"machine, or start `{shlex.join(_launch_words(known, arguments))}` on each node"
        )
    new = None if folder is None else folder.absolute()
    _enter(Path(known["folder"]))
    _report_differences(known, run_folder)
    launcher = known.get("launcher") or {}
    is_default = False
    if resume:
        new = Path(launcher.get("folder") or run_folder)
        is_default = not launcher.get("folder_is_explicit", False)
        export({COMPARISON: str(new) if known.get("rerun_of") else None})
    else:
        new = make_folder(new, folder_name(known["script"], datetime.now().astimezone())).absolute()
        if any(new.iterdir()):
            raise LaunchError(f"--folder {new} is not empty: pass a new folder, so that no checkpoint is continued")
        export({COMPARISON: str(new)})
    origin = known.get("rerun_of") if resume else str(run_folder)
    words = shlex.join([known["script"], *arguments])
    _echo(f"samestep: {'continues' if resume else 'repeats'} {run_folder}: {words}; folder {new}")
    code = context.invoke(
        run_command,
        script=(known["script"], *arguments),
        module=known["module"],
        processes=processes or str(known["ranks"]),
        config=KnownConfig(known.get("config") or {}, known.get("config_file"), origin),
        folder=new,
        folder_is_default=is_default,
        **_options(launcher),
    )
    assert isinstance(code, int)
    return code


def _read(folder: Path) -> dict[str, Any]:
    known = read_launch(folder)
    if not known:
        raise LaunchError(f"{folder} has no readable {CONFIG_FILE}: pass the folder of a run, or of its launcher")
    wrong = [name for name, kind in _REQUIRED.items() if not isinstance(known.get(name), kind)]
    if wrong:
        raise LaunchError(f"{folder / CONFIG_FILE} lacks {', '.join(wrong)}: it was changed, or is of another version")
    if known["script"] == python_launch.__name__:
        raise LaunchError(
            f"{folder} was a run of samestep.launch, whose function is not recorded: call samestep.launch again, with "
            f"folder={str(folder)!r} to continue the run"
        )
    return known


def _arguments(known: Mapping[str, Any], added: Sequence[str]) -> list[str]:
    """The arguments of the script, with those that are added; raises if one is hidden and not added."""
    arguments = list(map(str, known["arguments"]))
    left = list[str]()
    for number, word in enumerate(arguments):
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        if word == HIDDEN:
            continue
        name, _, value = word.partition("=")
        if HIDDEN not in (value, following):
            left.append(word)
        elif not any(each.partition("=")[0] == name for each in added):
            raise LaunchError(f"the value of {name} is secret and was not recorded: add it, as in `-- {name} VALUE`")
    return [*left, *added]


def _launch_words(known: Mapping[str, Any], arguments: Iterable[str]) -> list[str]:
    module = ["-m"] if known["module"] else []
    nodes = known["nodes"]
    number = ":".join(map(str, nodes)) if isinstance(nodes, list) else str(nodes)
    return ["samestep", "run", "--nnodes", number, "--rdzv-endpoint", "HOST:PORT", *module, known["script"], *arguments]


def _options(launcher: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the launcher that were given."""
    names = ("precision", "max_restarts", "grace", "on_hang", "show", "time_limit")
    return {name: launcher[name] for name in names if launcher.get(name)}


def _enter(folder: Path) -> None:
    """Change to the working folder of the run, to which the paths in its arguments are relative."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"the run was started in {folder}, which cannot be entered ({error.strerror}): relative paths would differ"
        ) from error


def _report_differences(known: Mapping[str, Any], run_folder: Path) -> None:
    """Set the variables of the run that can change results, and print what differs from then."""
    environ = read_environ()
    then, now = known.get("environment") or {}, recorded_variables(environ)
    for name in sorted({*then, *now}):
        if name in REPEATED_VARIABLES and then.get(name) != now.get(name):
            export({name: then.get(name)})
            _echo(f"samestep: sets {name}={then[name]}" if name in then else f"samestep: unsets {name}")
        elif then.get(name) != now.get(name):
            _echo(f"samestep: {name} was {then.get(name, 'not set')} and is {now.get(name, 'not set')}")
    _report_versions(known.get("versions") or {})
    folder = run_folder / LAUNCHER_LINK if (run_folder / LAUNCHER_LINK).exists() else run_folder
    _report_code(folder)


def _report_versions(then: Mapping[str, str]) -> None:
    import torch

    now = {"samestep": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, version in now.items():
        if then.get(name, version) != version:
            _echo(f"samestep: {name} was {then[name]} and is {version}: results can differ by rounding")


def _report_code(folder: Path) -> None:
    """Compare the code version with the one that the run has recorded, and say if the run began from a checkpoint."""
    from samestep.loggers.run_files import EVENTS_FILE, read_records
    from samestep.training.run_description import read_code_version

    events = [each for each in read_records(folder / EVENTS_FILE) if each.get("event") in ("start", "restored", "code")]
    starts = [number for number, each in enumerate(events) if each["event"] == "start"]
    if not starts:
        _echo("samestep: the code is not compared, since the script has no Run that recorded its version")
        return
    of_first = events[: starts[1]] if len(starts) > 1 else events
    for each in of_first:
        if each["event"] == "restored":
            _echo(f"samestep: the run began from {each.get('checkpoint')}, which a rerun only does with --resume")
    then: Mapping[str, Any] = next((each for each in reversed(events) if each["event"] == "code"), {})
    now = read_code_version(Path(events[starts[-1]]["command"][0]).absolute().parent) or {}
    if not then or not now:
        _echo("samestep: the code is not compared, since it is, or was, in no git repository")
    elif then["commit"] != now["commit"]:
        _echo(f"samestep: the code differs: commit {then['commit'][:10]} then, {str(now['commit'])[:10]} now")
    elif then.get("changes") != now["changes"]:
        _echo(f"samestep: the code differs: other uncommitted changes than then, at commit {then['commit'][:10]}")
