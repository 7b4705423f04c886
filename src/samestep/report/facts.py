"""The facts about a run that the head of its page shows, as names and short texts."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from samestep.loggers.run_files import WAIT_PREFIX, is_learning_rate
from samestep.messages import format_bytes, format_list, format_seconds, format_span
from samestep.report.run_data import RunData
from samestep.report.run_records import Record
from samestep.report.time_shares import peak, sum_times
from samestep.report.verdict import active_seconds, has_gpus, rank_hours, steps_done

_SHOWN = 4
_RESULTS = 3  # of evaluations
_PER_SECOND = " samples/s"
_COMMIT_DIGITS = _JOB_DIGITS = 12
_LEAST_HOURS = 0.01  # of all ranks, that are shown


def facts_of(run: RunData) -> dict[str, str]:
    """All facts that are known."""
    if not run.starts:
        return {name: text for name, text in _launch_facts(run).items() if text}
    last = run.last.fields
    facts = {
        "command": shlex.join(last["command"]),
        "code": _code(run),
        "started": _time(run.first.time),
        "duration": _duration(run),
        "GPU-hours" if has_gpus(run) else "rank-hours": _hours(run),
        "starts": str(len(run.starts)) if run.starts[1:] else "",
        "ranks": _ranks(run),
        "hardware": _hardware(run),
        "backend": last["backend"].replace("none", ""),
        "model": _models(run),
        "strategy": "; ".join(dict.fromkeys(each["strategy"] for each in run.last.named("model"))),
        "precision": _precision(last["choices"]),
        "global batch": f"{last['global_batch']:,}" if last.get("global_batch") else "",
        "micro-batch": _micro_batch(run),
        "seed": str(last["seed"]) if last.get("seed") is not None else "",
        "steps": f"{steps_done(run):,}",
        "epochs": str(run.epochs) if run.epochs else "",
        "throughput": _throughput(run),
        "peak memory": _memory(run),
        "plan": _plan(run),
        "versions": ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
        "launched by": ", job ".join(filter(None, (last["launcher"], str(last.get("job") or "")[:_JOB_DIGITS]))),
    }
    return {name: text for name, text in facts.items() if text}


def tiles_of(run: RunData) -> dict[str, str]:
    """The few facts that are shown first, and the last results."""
    seconds, used = active_seconds(run), peak(run.times, "memory_bytes")
    tiles = {
        "duration": format_span(seconds) if seconds else "",
        "steps": f"{steps_done(run):,}" if run.starts or run.curves else "",
        "samples per second": _throughput(run).removesuffix(_PER_SECOND),
        "GPU-hours": _hours(run) if has_gpus(run) else "",
        "peak memory per GPU" if has_gpus(run) else "peak memory per process": format_bytes(used) if used else "",
    }
    found = last_metrics(run)
    others = [name for name in found if not name.startswith(("train/", WAIT_PREFIX))]
    results = [name for name in others if is_result(name) and not is_learning_rate(name)]
    chosen = [*(["train/loss"] if "train/loss" in found else []), *results[:_RESULTS]]
    return {name: text for name, text in tiles.items() if text} | {name: f"{found[name]:.4g}" for name in chosen}


def is_result(name: str) -> bool:
    """Whether a metric is a result of the training, and no measurement, which differs from run to run."""
    return name.rpartition("/")[2] not in ("samples_per_s", "memory_bytes", "seconds")


def lost_values(run: RunData) -> Iterator[str]:
    """A sentence about each loss that has been NaN or infinite."""
    for name, curve in run.curves.items():
        lost = curve.steps[~np.isfinite(curve.values)]
        if len(lost) and "loss" in name:
            yield f"{name} was NaN or infinite at {len(lost):,} of {len(curve):,} steps, first at step {lost[0]:,}."


def last_metrics(run: RunData) -> dict[str, float]:
    """The last value of each metric."""
    return {name: float(curve.values[-1]) for name, curve in run.curves.items() if len(curve)}


def planned(run: RunData) -> Record | None:
    """The plan of the last start that made one: forecast memory and time by part."""
    return next((event for start in reversed(run.starts) for event in reversed(start.named("plan"))), None)


def _launch_facts(run: RunData) -> dict[str, str]:
    launch: Mapping[str, Any] = next((event for event in run.launches if event["event"] == "launch"), {})
    return {
        "command": shlex.join(launch.get("command", [])),
        "started": _time(run.launches[0]["time"]) if run.launches else "",
        "duration": format_span(active_seconds(run)) if run.attempts else "",
        "starts": str(len(run.attempts)) if run.attempts[1:] else "",
        "ranks": str(run.attempts[-1].ranks if run.attempts else launch.get("ranks", "")),
        "epochs": str(run.epochs) if run.epochs else "",
    }


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def _code(run: RunData) -> str:
    code = next((event for start in reversed(run.starts) for event in start.named("code")), None)
    if code is None:
        return ""
    changed = code.get("is_changed")  # None if git took too long
    state = "" if changed is None else ", dirty: uncommitted changes" if changed else ", clean"
    branch = f" on {code['branch']}" if code.get("branch") not in (None, "", "HEAD") else ""
    return f"commit {code['commit'][:_COMMIT_DIGITS]}{branch}{state}"


def _duration(run: RunData) -> str:
    active, whole = active_seconds(run), run.last.until - run.first.time
    pauses = f", {format_span(whole)} with pauses" if whole > 1.05 * active else ""
    return f"{format_span(active)}{pauses}"


def _hours(run: RunData) -> str:
    hours = rank_hours(run)
    return f"{hours:.3g}" if hours >= _LEAST_HOURS else f"< {_LEAST_HOURS}" if has_gpus(run) else ""


def _hardware(run: RunData) -> str:
    """The GPUs, with their numbers; ranks on CPUs share the cores of their nodes."""
    devices: Mapping[str, int] = run.last.fields["devices"]
    return ", ".join(f"{count} \u00d7 {name}" if has_gpus(run) else f"CPU: {name}" for name, count in devices.items())


def _ranks(run: RunData) -> str:
    last = run.last.fields
    earlier = [start.ranks for start in run.starts[:-1] if start.ranks != run.last.ranks]
    nodes = f"{last['nodes']} nodes: " if last["nodes"] > 1 else ""
    hosts = format_list(list(last["hosts"]), _SHOWN)
    before = f"; {format_list(list(dict.fromkeys(earlier)), _SHOWN)} before" if earlier else ""
    return f"{last['ranks']} on {nodes}{hosts}{before}"


def _models(run: RunData) -> str:
    models = run.last.named("model")
    return "; ".join(f"{each['model']}, {each['parameters']:,} parameters{_trainable(each)}" for each in models)


def _trainable(model: Record) -> str:
    return f" ({model['trainable']:,} of them trained)" if model["trainable"] != model["parameters"] else ""


def _precision(choices: Record) -> str:
    more = [name for name in ("tf32", "compile") if choices.get(name)]
    return ", ".join([str(choices.get("precision", "")), *more])


def _micro_batch(run: RunData) -> str:
    data = next((event for event in run.last.named("data") if event.get("rows")), None)
    if data is None:
        return ""
    count = data["micro_batches"]
    return f"{data['rows']:,} rows per rank" + (f", {count} per step" if count > 1 else "")


def _throughput(run: RunData) -> str:
    """Samples per second in the steps of all starts: the time between two steps counts, as that of evaluations."""
    shares = sum_times(run.times)
    if not run.starts or shares is None or not shares.seconds:
        return ""
    return f"{run.last.fields['global_batch'] * shares.steps / shares.seconds:,.0f}{_PER_SECOND}"


def _memory(run: RunData) -> str:
    used = peak(run.times, "memory_bytes")
    if used is None:
        return ""
    return f"{format_bytes(used)} per {'GPU' if has_gpus(run) else 'process'}"


def _plan(run: RunData) -> str:
    plan = planned(run)
    if plan is None:
        return ""
    chosen = plan["chosen"]
    memory, seconds = chosen["memory"]["total"] - chosen["memory"]["overhead"], chosen["seconds"]["total"]
    return f"{chosen['name']}, {format_bytes(memory)} and {format_seconds(seconds)} per step forecast"
