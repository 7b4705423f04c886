"""Verify a script: run it in up to three worlds, compare them, and order what was found by cause."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from samestep.findings import Finding, by_severity
from samestep.verify.check import Worlds, counted
from samestep.verify.checks import CHECKS
from samestep.verify.gradient_fit import comparable_steps, why_not_comparable
from samestep.verify.rank_trace import RankTrace, WorldTrace
from samestep.verify.recorder.recorder import RecorderSettings
from samestep.verify.worlds import Interpreters, Progress, Target, WorldRun, run_world

DEFAULT_STEPS: Final = 100
DEFAULT_SECONDS: Final = 300.0
_MARGIN_SECONDS: Final = 30.0  # in which verify ends ranks that wait before torch does
_BATCHES: Final = 32  # of an epoch of a loader
# By code, the codes of findings that it explains if both are there.
_EXPLAINS: Final = {
    "SS101": ("SS109", "SS205", "SS206", "SS209", "SS402", "SS408"),
    "SS106": ("SS205", "SS206", "SS209", "SS402", "SS408"),
    "SS104": ("SS408",),
    "SS105": ("SS408",),
    "SS107": ("SS101", "SS104", "SS105", "SS402", "SS408"),
    "SS108": ("SS301", "SS304", "SS305", "SS306", "SS606", "SS901"),
    "SS110": ("SS108", "SS206", "SS209", "SS303", "SS901"),
    "SS201": ("SS205", "SS206", "SS208", "SS209"),
    "SS202": ("SS201", "SS205", "SS206", "SS208", "SS209", "SS607"),
    "SS203": ("SS201", "SS205", "SS206", "SS208", "SS209"),
    "SS204": ("SS205", "SS301", "SS304", "SS305", "SS306", "SS901"),
    "SS205": ("SS206", "SS208", "SS209"),
    "SS301": ("SS304", "SS306", "SS901"),
    "SS303": ("SS301", "SS305", "SS306", "SS901"),
    "SS304": ("SS401", "SS306", "SS901"),
    "SS305": ("SS304", "SS306", "SS901"),
    "SS207": ("SS209",),
    "SS208": ("SS402", "SS408"),
    "SS211": ("SS205", "SS206", "SS209"),
    "SS402": ("SS401", "SS408"),
    "SS401": ("SS408",),
    "SS403": ("SS301", "SS304", "SS306", "SS402", "SS901"),
    "SS404": ("SS402", "SS201", "SS205", "SS206", "SS208", "SS304", "SS401", "SS408"),
    "SS501": ("SS901",),
    "SS502": ("SS301", "SS304", "SS306", "SS901"),
    "SS607": ("SS201", "SS205", "SS208"),
    "SS606": ("SS201", "SS203", "SS205", "SS208"),
    "SS702": ("SS901",),
    "SS901": ("SS301", "SS304", "SS306"),
}
_NO_GPU: Final = ("cuda", "CUDA", "GPU", "nvidia", "NVIDIA", "NCCL", "nccl")


@dataclass(frozen=True)
class Verdict:
    """What `verify` found, and what it has compared."""

    findings: tuple[Finding, ...]
    scope: tuple[str, ...]
    """What was run and compared, and what was not and why, a sentence each."""
    failure: str = ""
    """Why the script could not be verified; empty if it could."""
    output: str = ""
    """The end of what the script printed, if it failed by itself."""
    steps: int = 0
    seconds: float = 0.0
    worlds: dict[str, int] = field(default_factory=dict[str, int])
    """The number of ranks of each world that was run."""

    @property
    def exit_code(self) -> int:
        """0 if nothing was found, 1 if something was, 2 if the script could not be verified."""
        return 2 if self.failure else int(bool(self.findings))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "scope": list(self.scope),
            "failure": self.failure,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "worlds": self.worlds,
        }


def verify(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    nproc: int = 2,
    steps: int = DEFAULT_STEPS,
    device: str = "cpu",
    strict: bool = False,
    timeout: float = DEFAULT_SECONDS,
    keep: str | os.PathLike[str] | None = None,
    interpreters: Interpreters | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Verdict:
    """Run a script on several ranks and on one, compare what happened, and return what is wrong with it.

    The script is not changed. It runs in mirrors of the current folder, so that its own files are not written to.

    Args:
        script: A Python file, or with `module` the name of a module.
        arguments: The arguments of the script.
        module: Whether `script` is the name of a module, as in `python -m`.
        nproc: The number of ranks that are compared with one.
        steps: Optimizer steps after which the script is stopped, at the end of an epoch.
        device: "cpu" runs everything on the CPU over gloo; "cuda" leaves devices and backends to the script.
        strict: Also report legitimate choices that depend on the number of ranks.
        timeout: Seconds for everything.
        keep: A folder for the traces and the files that the script writes; a temporary one by default.
        interpreters: Processes that have imported torch, to verify several scripts in less time.
        report: Is called with the progress.

    """
    target = Target(str(script), module, tuple(arguments))
    with ExitStack() as stack:
        kept = keep if keep is not None else stack.enter_context(tempfile.TemporaryDirectory("-verify"))
        folder = Path(os.path.abspath(kept))  # noqa: PTH100 - without resolving links
        if interpreters is None:
            interpreters = stack.enter_context(Interpreters(device))
        session = _Session(interpreters, target, folder, nproc, steps, device, time.monotonic() + timeout, report)
        return session.run(strict)


class _Session:
    """The worlds of one verification."""

    def __init__(
        self, interpreters: Interpreters, target: Target, folder: Path, nproc: int, steps: int, device: str,
        deadline: float, report: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        self._interpreters, self._target, self._folder = interpreters, target, folder
        self._nproc, self._device, self._report = nproc, device, report
        self._start, self._deadline = time.monotonic(), deadline
        self._settings = RecorderSettings(
            folder="", world="many", size=nproc, steps=steps, batches=_BATCHES, timeout=DEFAULT_SECONDS, port=0,
            states=str((folder / "states").absolute()), device=device,
        )  # fmt: skip
        self._scope: list[str] = []

    def run(self, strict: bool) -> Verdict:
        """Run the worlds and compare them."""
        self._interpreters.wait_until_ready()
        many = self._run_many()
        failure = self._own_failure(many)
        if failure is not None and not any(trace.steps for trace in many):
            one = self._run_one(many)
            alone = self._own_failure(one) if one is not None else None
            is_own = alone is not None and alone.ending.error == failure.ending.error
            if is_own and not self._compare(Worlds(many, one), strict):
                return self._failed(many, failure)
            return self._verdict(Worlds(many, one), strict)
        one, nodes = self._run_one(many), self._run_nodes(many)
        return self._verdict(Worlds(many, one, nodes), strict)

    def _run_many(self) -> WorldTrace:
        """Run the world of many ranks; again if the script starts its ranks itself, or asks for GPUs."""
        many = self._world("many", self._settings)
        if many.run.needs_spawn:
            self._settings = replace(self._settings, spawns=True)
            many = self._world("many-spawned", self._settings)
        if self._device == "cpu" and _may_need_gpus(many):
            settings = replace(self._settings, claims_cuda=True)
            claimed = self._world("many-claimed", settings)
            if claimed.run.needs_spawn:
                settings = replace(settings, spawns=True)
                claimed = self._world("many-claimed-spawned", settings)
            if _asks_for_gpu(many) or (claimed.size, claimed.steps) > (many.size, many.steps):
                self._settings, many = settings, claimed
        if any(trace.of("mapped") for trace in many):
            self._scope.append("the script asks for GPUs: it was run on the CPU, with gloo instead of NCCL")
        return many

    def _run_one(self, many: WorldTrace) -> WorldTrace | None:
        sizes = dict[str, list[int]]()
        for trace in many:
            for epoch in trace.epochs_of("train"):
                size = epoch.loader.batch_size
                if size is not None and size not in sizes.setdefault(epoch.loader.dataset, []):
                    sizes[epoch.loader.dataset].append(size)
        reference = {"size": max(1, many.size), "batch_sizes": sizes}
        steps = max(1, min(self._settings.steps, many.steps or self._settings.steps))
        one = self._world("one", replace(self._settings, world="one", size=1, reference=reference, steps=steps))
        if one.size > 1:
            self._scope.append(f"one rank was not compared: the script always starts {one.size} ranks")
            return None
        if one.failed:
            self._scope.append(f"one rank was compared until the script failed there ({_why_failed(one)})")
        return one

    def _run_nodes(self, many: WorldTrace) -> WorldTrace | None:
        """Run every rank on a separate node, if the script asks for local ranks and the other worlds have worked."""
        if (
            many.failed
            or self._settings.spawns
            or many.size < 2
            or any(trace.of("trainer") or trace.of("fabric") for trace in many)
        ):
            return None
        files = {file for trace in many for file, _, _ in trace.codes.values()}
        if not any(
            name in _read(file)
            for file in files
            for name in ("LOCAL_RANK", "local_rank", "local_process", "local_main")
        ):
            return None
        nodes = self._world("nodes", replace(self._settings, world="nodes"))
        if nodes.failed:
            self._scope.append(
                f"ranks on separate nodes were not compared: the script failed there ({_why_failed(nodes)})"
            )
            return None
        return nodes

    def _world(self, name: str, settings: RecorderSettings) -> WorldTrace:
        seconds = max(1.0, self._deadline - time.monotonic())
        settings = replace(settings, folder=str((self._folder / name).absolute()), timeout=seconds + _MARGIN_SECONDS)
        return WorldTrace(run_world(self._interpreters, self._target, settings, seconds, self._report))

    def _own_failure(self, world: WorldTrace) -> RankTrace | None:
        """A rank, or a process that was to become one, that failed with an error of the script."""
        return next((trace for trace in (*world.ranks, *world.others) if trace.ending.error), None)

    def _failed(self, many: WorldTrace, failed: RankTrace) -> Verdict:
        message = failed.ending.message.strip().splitlines()
        text = f"{failed.ending.error}: {message[0] if message else ''}".rstrip(": ")
        return Verdict(
            (), tuple(self._scope), f"the script fails on one rank as well: {text}",
            str(failed.ending.details.get("traceback", "")), 0, self._seconds, {"many": many.size, "one": 1},
        )  # fmt: skip

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _compare(self, worlds: Worlds, strict: bool) -> list[Finding]:
        found = list[Finding]()
        for check in CHECKS:
            if strict or not check.is_strict:
                found += check.find(worlds)
        return found

    def _verdict(self, worlds: Worlds, strict: bool) -> Verdict:
        many = worlds.many
        is_alone = bool(many.steps) and not many.failed and not worlds.is_distributed
        findings = self._compare(worlds, strict) if many.size > 1 and not is_alone else []
        self._scope += _compared(worlds)
        counts = {
            "many": many.size,
            **({"one": 1} if worlds.one else {}),
            **({"nodes": many.size} if worlds.nodes else {}),
        }
        failure = "" if findings else self._why_not_verified(many)
        return Verdict(
            tuple(by_severity(fold(findings))), tuple(self._scope), failure, _output(many.run) if failure else "",
            many.steps, self._seconds, counts,
        )  # fmt: skip

    def _why_not_verified(self, many: WorldTrace) -> str:
        """Why nothing was compared although nothing was found; empty if it was."""
        if many.run.timed_out:
            return "the script did not end within the time limit (--timeout)"
        if many.run.hung or many.run.was_ended or any(each.ending.code and not each.has_exited for each in many):
            return _describe_exit(many)
        if many.size < 2:
            hint = (
                "pass it the arguments with which it starts several" if self._settings.spawns else "see its world_size"
            )
            return f"the script ran on 1 rank although --nproc is {self._nproc}: {hint}"
        if not many.failed and many.steps and not any(trace.of("init") for trace in many):
            return (
                "the script creates no process group, so that each rank trains alone: call init_process_group, or pass "
                "the arguments with which it does"
            )
        if not many.steps:
            return "the script made no optimizer step, so that there is nothing to compare"
        has_batches = any(epoch.batches for trace in many for epoch in trace.epochs.values())
        if not has_batches and not any(step.calls for trace in many for step in trace.steps):
            return "the script neither reads a DataLoader nor calls a module, so that no sample was compared"
        return ""


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """Put findings that another one explains, directly or through others, below it.

    The order of the findings counts only if two codes explain each other: then the first one is the cause.
    """
    codes = list(dict.fromkeys(finding.code for finding in findings))
    causes = {
        code: [
            cause
            for position, cause in enumerate(codes)
            if code in _EXPLAINS.get(cause, ())
            and (cause not in _EXPLAINS.get(code, ()) or position < codes.index(code))
        ]
        for code in codes
    }
    roots = {code: _root_cause(code, causes) for code in codes}
    folded = list[Finding]()
    for finding in findings:
        if roots[finding.code] == finding.code:
            is_first = all(each.code != finding.code for each in folded)
            explained = [each for each in findings if each.code != finding.code and roots[each.code] == finding.code]
            folded.append(replace(finding, follows=tuple(explained)) if explained and is_first else finding)
    return folded


def _root_cause(code: str, causes: dict[str, list[str]]) -> str:
    """The code that a chain of explanations begins with."""
    seen = [code]
    while found := next((cause for cause in causes[seen[-1]] if cause not in seen), None):
        seen.append(found)
    return seen[-1]


def _may_need_gpus(world: WorldTrace) -> bool:
    """Whether the script may do more if there are GPUs: it made no step, or ran on one rank, and has counted them."""
    has_queried = any(trace.of("asked_for_gpus") for trace in (*world.ranks, *world.others))
    return (not world.steps and (has_queried or _asks_for_gpu(world))) or (world.size < 2 and has_queried)


def _asks_for_gpu(world: WorldTrace) -> bool:
    """Whether the script has ended because there is no GPU: with an error, or with a message."""
    texts = [f"{each.ending.message} {' '.join(line.source for line in each.ending.site[:1])}" for each in world]
    ended_early = not any(trace.steps or trace.ending.error for trace in world)
    texts += world.run.outputs.values() if ended_early else []
    return any(word in text for text in texts for word in _NO_GPU)


def _compared(worlds: Worlds) -> list[str]:
    """What was compared, with numbers, and what was not, with the reason."""
    many = worlds.many
    if not many.ranks:
        return []
    trace = many[0]
    epochs, evaluated = trace.epochs_of("train"), trace.epochs_of("eval")
    samples = sum(len(epoch.samples) for each in many for epoch in each.epochs_of("train"))
    found = [
        f"compared between {counted(many.size, 'rank')}: {counted(len(epochs), 'epoch')} with "
        f"{counted(samples, 'sample')}, {counted(many.steps, 'optimizer step')}, "
        f"{counted(len(trace.sync_points), 'collective')}, {counted(len(trace.evaluations), 'evaluation')}, "
        f"{counted(len(trace.files), 'file')}"
    ]
    if worlds.one is not None:
        gradients = sum(1 for _ in comparable_steps(worlds))
        found.append(
            f"compared with one rank: the gradients of {counted(gradients, 'step')} for the same samples and weights"
        )
        left, why = why_not_comparable(worlds)
        if left:
            found.append(f"not compared with one rank: the gradients of {counted(left, 'step')}, since {why}")
    cut = [epoch for epoch in (*epochs, *evaluated) if epoch.ended and not epoch.is_complete]
    if cut:
        what = f"{counted(len(cut), 'epoch')} {'was' if len(cut) == 1 else 'were'}"
        found.append(f"{what} cut after {max(len(epoch.batches) for epoch in cut)} batches")
    if exits := [each for each in many if each.has_exited]:
        codes = ", ".join(f"rank {each.rank}: {each.ending.code}" for each in exits)
        found.append(f"the script ended with other exit codes than 0 ({codes})")
    if any(each.ending.is_stopped for each in many):
        found.append(f"the script was stopped after {counted(many.steps, 'optimizer step')} (--steps)")
    if many.run.changed:
        changed = ", ".join(many.run.changed)
        found.append(f"these files of yours have changed meanwhile, by the script or another program: {changed}")
    return found


def _why_failed(world: WorldTrace) -> str:
    errors = [f"{each.ending.error}: {each.ending.message}".splitlines()[0] for each in world if each.ending.error]
    return errors[0][:200] if errors else "it did not end" if world.run.hung or world.run.timed_out else "it crashed"


def _describe_exit(world: WorldTrace) -> str:
    late = [trace for trace in world if trace.of("init") and trace.of("init")[-1]["state"] == "start"]
    if late and all(not trace.steps for trace in world):
        return f"rank {late[0].rank} waited in init_process_group until the timeout: not all ranks have called it"
    codes = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(world.run.exit_codes.items()) if code)
    if codes:
        return f"the script ended with an error on {counted(world.size, 'rank')} (exit codes {codes})"
    positions = ", ".join(f"rank {trace.rank} at {trace.position}" for trace in world if trace.ending.code is None)
    return f"the ranks made no progress, although they call the same collectives, and verify ended them ({positions})"


def _output(run: WorldRun) -> str:
    return next((text for text in run.outputs.values() if text), "")[-4000:]


def _read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""
