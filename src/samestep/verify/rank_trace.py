"""What a rank did, read from its trace: epochs, calls of modules, steps, evaluations, collectives, files."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from samestep.findings import Location
from samestep.verify.recorder.line_trace import read_lines
from samestep.verify.trace_events import (
    Backward,
    Batch,
    Call,
    CollectiveCall,
    Draw,
    Ending,
    Epoch,
    Evaluation,
    FileEvent,
    LoaderInfo,
    OptimizerStep,
    Role,
    Site,
    SyncEvent,
    SyncPoint,
    WorkerTrace,
)
from samestep.verify.worlds import WorldRun

_FOR_ALL: Final = (  # calls that no rank leaves before all have entered
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "all_gather_object",
    "all_gather_into_tensor", "barrier", "monitored_barrier", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip
_FROM_ROOT: Final = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")
_TO_ROOT: Final = ("reduce", "gather", "gather_object")


class RankTrace:
    """Everything that one rank did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank = -1
        self.size = 0
        self.loaders: dict[int, LoaderInfo] = {}
        self.epochs: dict[int, Epoch] = {}
        self.steps: list[OptimizerStep] = []
        self.evaluations: list[Evaluation] = []
        self.collectives: list[CollectiveCall] = []
        self.files: list[FileEvent] = []
        self.sync_events: list[SyncEvent] = []
        self.draws: list[Draw] = []
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.modules: dict[int, dict[str, Any]] = {}
        self.optimizers: dict[int, dict[str, Any]] = {}
        self.names: dict[int, tuple[str, str, int]] = {}  # of parameters: name, wrapper and module
        self.shapes: dict[int, list[int]] = {}
        self.covered: set[int] = set()  # parameters whose gradients DDP exchanges
        self.row_sharded: set[int] = set()  # parameters of which each rank has some rows
        self.eps: dict[int, float] = {}  # of parameters: the rounding of their type
        self.sync_points: list[SyncPoint] = []
        self.missing: set[int] = set()  # parameters of optimizers that are in no module that was called
        self.codes: dict[int, tuple[str, str, int]] = {}
        self.last: dict[str, Any] = {}
        self.frozen_calls: list[Call] = []  # without gradients, of modules without trainable parameters
        self.ending = Ending(None)
        self._sites: dict[int, Site] = {}
        _Reader(self).read(path)
        self._drop_training()

    def _drop_training(self) -> None:
        """Remove calls without gradients that belong to training steps, such as those of a teacher."""
        calls = [call for evaluation in self.evaluations for call in evaluation.calls]
        self.frozen_calls = [call for call in calls if not self.modules.get(call.module, {}).get("trainable")]
        for evaluation in self.evaluations:
            evaluation.calls = [call for call in evaluation.calls if not self._is_in_training(call)]
            evaluation.epochs = [epoch for epoch in evaluation.epochs if self.epochs[epoch].role != "train"]
        self.evaluations = [each for each in self.evaluations if each.calls]

    def _is_in_training(self, call: Call) -> bool:
        if call.epoch is not None:
            return self.epochs[call.epoch].role == "train"
        return not self.modules.get(call.module, {}).get("trainable")

    def site(self, number: int | None) -> Site:
        """The lines of user code by their number."""
        return self._sites.get(-1 if number is None else number, ())

    def add_site(self, number: int, frames: Iterable[Sequence[Any]]) -> None:
        """Note the lines of a number."""
        self._sites[number] = tuple(Location(file, line, function) for file, line, function in frames)

    @property
    def starts_ranks(self) -> bool:
        """Whether this process has failed because one that it has started has failed."""
        return self.ending.error in ("ProcessRaisedException", "ProcessExitedException")

    @property
    def has_exited(self) -> bool:
        """Whether the script has ended this rank by itself with an exit code, as sys.exit(3) does."""
        return bool(self.ending.code and self.ending.details and not self.ending.error)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of other kinds, with their line as `site`."""
        return self.events.get(kind, [])

    def epochs_of(self, role: Role) -> list[Epoch]:
        """The epochs whose batches were used for training or for evaluation."""
        return [epoch for epoch in self.epochs.values() if epoch.role == role]

    @cached_property
    def lines(self) -> tuple[int, list[tuple[int, int]]]:
        """The executed lines of user code: position of the first, then numbers of functions with lines."""
        path = self.path.with_suffix(".lines")
        return read_lines(path) if path.exists() else (0, [])

    def locate(self, entry: tuple[int, int]) -> Location:
        """A line of `lines` as a location."""
        file, name, _ = self.codes.get(entry[0], ("", "", 0))
        return Location(file, entry[1], name)

    @cached_property
    def executed(self) -> set[tuple[str, int]]:
        """Files and lines that were executed."""
        return {(location.file, location.line) for location in map(self.locate, set(self.lines[1]))}

    @property
    def position(self) -> Location | None:
        """The line of user code that was executed last."""
        return self.locate(self.lines[1][-1]) if self.lines[1] else None


def read_worker(path: Path) -> WorkerTrace:
    """Read what a data worker has written."""
    _, rank, number, _ = path.stem.split("-")
    trace = WorkerTrace(int(rank), int(number))
    for line in path.read_bytes().splitlines():
        event = json.loads(line)
        site = tuple(Location(file, line_number, function) for file, line_number, function in event["frames"])
        if event["k"] == "seed":
            trace.seeds.append((event["value"], site))
        else:
            trace.draws.append(event["hash"])
            trace.site = trace.site or site
            trace.has_generator = trace.has_generator or event["generator"]
    return trace


class WorldTrace:
    """All ranks of a world."""

    def __init__(self, run: WorldRun) -> None:
        self.run = run
        self.name = run.settings.world
        traces = [RankTrace(path) for path in sorted(Path(run.settings.folder).glob("*.jsonl"))]
        self.workers = [read_worker(path) for path in sorted(Path(run.settings.folder).glob("worker-*.events"))]
        ranked = {trace.rank: trace for trace in traces if trace.rank >= 0}
        self.ranks: list[RankTrace] = [ranked[rank] for rank in sorted(ranked)]
        self.others = sorted((trace for trace in traces if trace.rank < 0), key=lambda trace: trace.starts_ranks)
        """Processes that have joined no process group: those that were to become ranks first."""
        for rank, code in run.exit_codes.items():
            if rank in ranked and ranked[rank].ending.code is None:
                ranked[rank].ending.code = code

    @property
    def size(self) -> int:
        """The number of ranks, as the script sees it."""
        return max([len(self.ranks), *(trace.size for trace in self.ranks)])

    def __iter__(self) -> Iterator[RankTrace]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> RankTrace:
        return self.ranks[rank]

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the rank that made the most."""
        return max((len(trace.steps) for trace in self.ranks), default=0)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, or the ranks hung."""
        return self.run.hung or self.run.timed_out or any(trace.ending.code for trace in self.ranks)


class _Reader:
    """Builds the trace of a rank, event by event."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._calls: list[Call] = []
        self._backwards: list[Backward] = []
        self._batches: list[Batch] = []
        self._draws: list[Draw] = []
        self._open: list[int] = []
        self._evaluation: Evaluation | None = None
        self._locked: set[str] = set()
        self._read_batches = 0
        self._clips: list[tuple[Site, int, int]] = []  # with the backward passes and collectives before
        self._rng = ""
        self._rng_changes = False
        self._delayed: dict[str, Any] | None = None  # a write to a file that has not begun

    def read(self, path: Path) -> None:
        """Read all events; a rank that was killed may have written half of the last one."""
        for line in path.read_bytes().splitlines():
            event = _decode(line)
            if event is None:
                continue
            read = getattr(self, f"_read_{event['k']}", None)
            if read is not None:
                read(event)
            else:
                event["site"] = self._trace.site(event.get("site"))
                self._trace.events.setdefault(event["k"], []).append(event)
            if event["k"] not in ("site", "code"):
                self._trace.last = event
        if self._delayed is not None:
            self._read_file(self._delayed)

    def _read_start(self, event: dict[str, Any]) -> None:
        if event["rank"] is not None:
            self._trace.rank, self._trace.size = event["rank"], event["size"]

    def _read_init(self, event: dict[str, Any]) -> None:
        if event["state"] == "end":
            self._trace.rank, self._trace.size = event["rank"], event["size"]
            self._synchronize("init", event)
        self._trace.events.setdefault("init", []).append({**event, "site": self._trace.site(event.get("site"))})

    def _read_site(self, event: dict[str, Any]) -> None:
        self._trace.add_site(event["id"], event["frames"])

    def _read_code(self, event: dict[str, Any]) -> None:
        self._trace.codes[event["id"]] = event["file"], event["name"], event["line"]

    def _read_module(self, event: dict[str, Any]) -> None:
        self._trace.modules[event["id"]] = event

    def _read_loader(self, event: dict[str, Any]) -> None:
        distributed = event.get("distributed")
        self._trace.loaders[event["id"]] = LoaderInfo(
            event["id"], self._trace.site(event["site"]), event["dataset"], event["dataset_class"], event["length"],
            event["iterable"], event["batch_size"], event["drop_last"], event["workers"], event["sampler"],
            event["batch_sampler"], event["replacement"], event["steps"], event["samples"], distributed,
            self._trace.site(distributed["site"]) if distributed else (),
        )  # fmt: skip

    def _read_epoch(self, event: dict[str, Any]) -> None:
        loader = self._trace.loaders[event["loader"]]
        site = self._trace.site(event["site"])
        self._trace.epochs[event["id"]] = Epoch(event["id"], loader, site, event["p"], event["settings"])

    def _read_batch(self, event: dict[str, Any]) -> None:
        epoch = self._trace.epochs[event["epoch"]]
        batch = Batch(epoch.number, event["n"], event["s"], event["index"], event["rows"], event["shapes"])
        epoch.batches.append(batch)
        self._batches.append(batch)
        self._read_batches += 1
        self._rng = event["rng"]

    def _read_epoch_end(self, event: dict[str, Any]) -> None:
        epoch = self._trace.epochs[event["epoch"]]
        epoch.is_complete, epoch.ended = event["complete"], True

    def _read_call(self, event: dict[str, Any]) -> None:
        call = Call(
            event["module"], event["wrapper"], self._trace.site(event["site"]), event["training"], event["grad"],
            event["rows"], event["hashes"][0] if event["hashes"] else [], event["weights"], event["rng"], event["s"],
            event["epoch"], event["buffers"],
        )  # fmt: skip
        if call.wrapper == "ddp" and self._trace.modules.get(call.module, {}).get("buffers"):
            self._add_point("DDP forward pass (its buffers)", "world", call.site, event)
        if call.wrapper == "fsdp":
            self._add_point("FSDP forward pass", "world", call.site, event)
        if call.is_evaluation:
            self._add_to_evaluation(call)
        else:
            self._calls.append(call)
            self._note_rng(event["rng"])

    def _add_point(
        self, name: str, group: str, site: Site, event: dict[str, Any], source: list[Any] | None = None
    ) -> None:
        point = SyncPoint(name, group, site, event["p"], event["s"], source, event.get("root"), self._read_batches)
        self._trace.sync_points.append(point)

    def _complete_point(self, prefix: str) -> None:
        if self._trace.sync_points and self._trace.sync_points[-1].name.startswith(prefix):
            self._trace.sync_points[-1].is_complete = True

    def _note_rng(self, state: str) -> None:
        if self._rng and state and state != self._rng:
            self._rng_changes = True
        self._rng = state

    def _add_to_evaluation(self, call: Call) -> None:
        evaluation = self._evaluation
        if evaluation is None or evaluation.step != call.step:
            evaluation = self._evaluation = Evaluation(call.step, [], [])
            self._trace.evaluations.append(evaluation)
        evaluation.calls.append(call)
        if call.epoch is not None:
            self._trace.epochs[call.epoch].evaluated += 1
            if call.epoch not in evaluation.epochs:
                evaluation.epochs.append(call.epoch)

    def _read_call_end(self, event: dict[str, Any]) -> None:
        self._complete_point("DDP forward")
        self._complete_point("FSDP forward")
        if self._calls:
            self._calls[-1].rng_after = event["rng"]
            self._note_rng(event["rng"])

    def _read_backward(self, event: dict[str, Any]) -> None:
        site, rng, position = self._trace.site(event["site"]), event["rng"], event["p"]
        self._backwards.append(
            Backward(site, event["loss"], event["syncs"], event["epoch"], rng=rng, position=position)
        )
        self._note_rng(event["rng"])
        if any(event["syncs"]) and any(call.wrapper == "ddp" for call in self._calls):
            self._add_point("DDP backward pass", "world", self._backwards[-1].site, event)
        if event["epoch"] is not None:
            self._trace.epochs[event["epoch"]].trained += 1

    def _read_backward_end(self, event: dict[str, Any]) -> None:
        self._complete_point("DDP backward")
        if self._backwards:
            self._backwards[-1].scales, self._backwards[-1].restarts = event["scales"], event["restarts"]
            if any(call.wrapper == "fsdp" for call in self._calls) or any(self._backwards[-1].syncs):
                self._synchronize("backward", event)

    def _read_optimizer(self, event: dict[str, Any]) -> None:
        self._trace.optimizers[event["id"]] = {**event, "site": self._trace.site(event["site"])}

    def _read_names(self, event: dict[str, Any]) -> None:
        self._trace.names |= {int(number): tuple(value) for number, value in event["names"].items()}
        self._trace.shapes |= {int(number): value for number, value in event["shapes"].items()}
        self._trace.missing |= set(event["missing"])
        self._trace.covered |= set(event["covered"])
        self._trace.row_sharded |= set(event["row_sharded"])
        self._trace.eps |= {int(number): value for number, value in event["eps"].items()}

    def _read_step(self, event: dict[str, Any]) -> None:
        self._trace.steps.append(
            OptimizerStep(
                len(self._trace.steps),
                event["optimizer"],
                self._trace.site(event["site"]),
                event["lr"],
                {int(number): value for number, value in event["applied"].items()},
                {int(number): value for number, value in event["local"].items()},
                {int(number): value for number, value in event["norms"].items()},
                {int(number): value for number, value in event["exchanged"].items()},
                event["weights"],
                set(event["sharded"]),
                event["clipped"],
                self._calls,
                self._backwards,
                self._batches,
                self._draws,
                event["buffers"],
                self._early_clip(),
                self._rng_changes,
            )
        )
        self._calls, self._backwards, self._batches, self._draws, self._clips = [], [], [], [], []
        self._evaluation, self._rng_changes, self._rng = None, False, ""

    def _read_clip(self, event: dict[str, Any]) -> None:
        self._clips.append((self._trace.site(event["site"]), len(self._backwards), len(self._trace.collectives)))

    def _early_clip(self) -> Site:
        """The line of a clipping that a backward pass or a collective followed."""
        for site, backwards, collectives in self._clips:
            if backwards < len(self._backwards) or collectives < len(self._trace.collectives):
                return site
        return ()

    def _read_collective(self, event: dict[str, Any]) -> None:
        call = CollectiveCall(
            event["n"], event["name"], str(event["group"]), self._trace.site(event["site"]), event["s"], event["p"],
            event["t"], event["shapes"], event["dtypes"], event["source"], event["op"], event["value"],
            root=event["root"], is_needless_copy=event.get("copies", False), needs_grad=event["grad"],
        )  # fmt: skip
        self._trace.collectives.append(call)
        if call.name not in ("send", "recv", "isend", "irecv"):
            self._add_point(call.name, call.group, call.site, event, call.source)
        if self._evaluation is not None and self._evaluation.step == event["s"]:
            self._evaluation.collectives.append(call)

    def _read_group(self, event: dict[str, Any]) -> None:
        if event["is_part"]:
            self._trace.events.setdefault("subgroup", []).append(event)
        if event["is_local"]:  # only its members wait for each other
            return
        self._add_point("new_group", "world", self._trace.site(event["site"]), event)
        self._complete_point("new_group")

    def _read_collective_end(self, event: dict[str, Any]) -> None:
        call = self._trace.collectives[-1]
        call.is_complete, call.result = True, event["value"]
        self._complete_point(call.name)
        if call.group != "world":
            return
        if call.name in _FOR_ALL:
            self._synchronize(call.name, event)
        elif call.name in (*_FROM_ROOT, *_TO_ROOT):
            direction = "from root" if call.name in _FROM_ROOT else "to root"
            self._trace.sync_events.append(SyncEvent("collective", call.name, event["t"], call.root, direction))
        elif call.name in ("send", "isend", "recv", "irecv"):
            kind = "send" if call.name.endswith("send") else "receive"
            self._trace.sync_events.append(SyncEvent(kind, "", event["t"], call.root))

    def _synchronize(self, name: str, event: dict[str, Any]) -> None:
        """Note a call that no rank leaves before all have entered it."""
        self._trace.sync_events.append(SyncEvent("collective", name, event["t"]))

    def _read_store(self, event: dict[str, Any]) -> None:
        for key in event["keys"]:
            self._trace.sync_events.append(SyncEvent(event["action"], f"store {key}", event["t"]))

    def _read_exists(self, event: dict[str, Any]) -> None:
        if event["found"]:
            self._trace.sync_events.append(SyncEvent("exists", event["path"], event["t"]))
        else:
            self._add_file("miss", event)

    def _read_lock(self, event: dict[str, Any]) -> None:
        (self._locked.add if event["held"] else self._locked.discard)(event["path"])
        self._trace.sync_events.append(SyncEvent("lock" if event["held"] else "unlock", event["path"], event["t"]))

    def _read_accelerate(self, event: dict[str, Any]) -> None:
        if self._evaluation is not None and self._evaluation.step == event["s"]:
            self._evaluation.gathers += event["name"] in ("gather", "gather_for_metrics", "reduce")
            self._evaluation.dedups += event["name"] == "gather_for_metrics"
        self._trace.events.setdefault("accelerate", []).append({**event, "site": self._trace.site(event["site"])})

    def _read_torchmetrics(self, event: dict[str, Any]) -> None:
        if self._evaluation is not None and self._evaluation.step == event["s"]:
            self._evaluation.gathers += 1

    def _read_delayed_file(self, event: dict[str, Any]) -> None:
        self._delayed = event

    def _read_file(self, event: dict[str, Any]) -> None:
        self._delayed = None
        action, path = event["action"], event["path"]
        if action == "remove" and path in self._locked:
            self._read_lock({**event, "held": False})
        elif event["exclusive"]:  # only one rank can create it, which serves as a lock until it is removed
            self._read_lock({**event, "held": True})
        elif action in ("write", "rename"):  # who finds that it exists knows what came before
            self._trace.sync_events.append(SyncEvent("set", path, event["t"]))
        self._add_file(action, event)

    def _add_file(self, action: str, event: dict[str, Any]) -> None:
        site, position, locks = self._trace.site(event["site"]), len(self._trace.sync_events), frozenset(self._locked)
        self._trace.files.append(FileEvent(action, event["path"], site, position, event["t"], locks, event["s"]))

    def _read_draw(self, event: dict[str, Any]) -> None:
        draw = Draw(
            event["name"], self._trace.site(event["site"]), event["s"], event["shape"], event["hash"],
            event["generator"],
        )  # fmt: skip
        self._trace.draws.append(draw)
        self._draws.append(draw)

    def _read_seed(self, event: dict[str, Any]) -> None:
        self._rng = ""  # a seed changes the state as well, but nothing is drawn
        self._trace.events.setdefault("seed", []).append({**event, "site": self._trace.site(event["site"])})

    def _read_wrap(self, event: dict[str, Any]) -> None:
        if event["state"] == "end":
            self._synchronize("DDP", event)
            self._complete_point("DDP(")
        else:
            self._add_point("DDP(model)", "world", self._trace.site(event["site"]), event)
        self._trace.events.setdefault("wrap", []).append({**event, "site": self._trace.site(event["site"])})

    def _read_end(self, event: dict[str, Any]) -> None:
        site = tuple(Location(file, line, function) for file, line, function in event.get("frames", []))
        self._trace.ending = Ending(
            event["code"], event["stopped"], event.get("error", ""), event.get("message", ""), site, event
        )


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # the rank was killed while it wrote
        return None
