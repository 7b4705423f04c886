"""The live training process: one object through which a script speaks to all of its ranks."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep import __version__
from samestep.checkpoint.checkpoint import Checkpoint
from samestep.checkpoint.ground import Ground, Stateful
from samestep.checkpoint.restoring import restore
from samestep.data.ledger import next_generation
from samestep.data.loader import Collate, MapDataset
from samestep.errors import GroupError
from samestep.facts.world import read_world, run_folder
from samestep.log import Voice
from samestep.run.device import choose_device, see_accelerators
from samestep.run.engine import RunEngine
from samestep.run.evaluate import evaluate
from samestep.run.group import Group
from samestep.run.link import Link
from samestep.run.logs import Writer
from samestep.run.precision import Precision, check_wish, see_arithmetic
from samestep.run.seed import seed_alike, seed_anew, seed_apart
from samestep.run.shard import Reading, Settings, Shard, open_shard
from samestep.run.speed import Speed
from samestep.run.stream import Stream, StreamSource, open_stream
from samestep.run.terms import Terms
from samestep.run.wrap import Strategy, Unused, Wish, wrap
from samestep.sinks.console import open_console
from samestep.sinks.sinks import open_sinks


class Run(Group):
    """A training process among its ranks; use it with `with`, or with `start()` and `close()`.

    One rank needs no process group. After an exception nothing is destroyed, since that can deadlock the other ranks:
    the exception ends this process, and the launcher the others.

    >>> with Run(global_batch=4, seed=0) as run:
    ...     run.say(f"{run.size} rank(s)")
    1 rank(s)
    """

    def __init__(
        self,
        *,
        global_batch: int,
        seed: int = 0,
        folder: str | Path | None = None,
        backend: str | None = None,
        start_timeout: float = 1800.0,
        step_timeout: float = 300.0,
        check_every: int = 100,
        precision: Precision = "auto",
        compile: bool = False,
        ledger: bool = False,
    ) -> None:
        if global_batch < 1:
            raise GroupError(
                f"global_batch={global_batch} is not a number of samples: pass 1 or more, e.g. global_batch=256"
            )
        self.global_batch, self.seed, self._check_every = global_batch, seed, check_every
        self._ledger = ledger
        world = read_world()
        self._choice = choose_device(world, see_accelerators(), backend)
        self._precision: Precision = check_wish(precision)
        self._compile = compile
        super().__init__(Link(world, self._choice.backend, start_timeout, step_timeout))
        self._wished_folder = Path(folder) if folder is not None else run_folder()
        self._folder: Path | None = None
        self._voice = Voice()
        self._engine: RunEngine | None = None
        self._writer: Writer | None = None
        self._began = time.monotonic()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._choice.device

    @property
    def folder(self) -> Path:
        """Where this run's logs lie, the same on every rank."""
        self._started()
        assert self._folder is not None
        return self._folder

    def start(self) -> Self:
        """Connect the ranks; `with Run(...)` does it by itself."""
        if self._engine is not None:
            raise GroupError("this run was started already: a Run is started once, by `with` or by start()")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # before anything is allocated, or it would land on the first GPU
        self._link.open(self.device)
        self._check_alike()
        seed_alike(self.seed)
        self._folder = self.once(_choose_folder, self._wished_folder)
        if self.first:
            console = open_console(sys.stdout)
            self._writer = Writer(lambda: open_sinks(self.folder, console, self._voice.warn_once), console)
        speed = Speed(self._link, see_arithmetic(self.device, self._precision, self._compile), self.say)
        self._engine = RunEngine(self._link, self.device, self._writer, self._check_every, speed)
        if self._choice.warning:
            self._voice.warn_once(self._choice.warning)
        return self

    def close(self) -> None:
        """End after success: write what is pending, wait for all ranks, disconnect."""
        engine = self._started()
        engine.close()
        if self._writer is not None:
            self._writer.close(self._summary("finished") if self._writer.opened else {})
        self._link.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        if self._engine is not None:
            self._engine.detach(failed=True)
        if isinstance(error, RuntimeError) and (told := self._link.tell_peers()):
            error.add_note(told)  # torch does not know which rank it waited for
        self._link.abandon(f"{type(error).__name__}: {error}".splitlines()[0])
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # for the launcher, which shows it last
        if self._writer is not None:
            self._writer.close(self._summary("failed") if self._writer.opened else {})

    def wrap(
        self,
        model: nn.Module,
        strategy: Strategy | None = None,
        *,
        unused: Unused = "error",
        sync_batchnorm: bool = False,
        offload: bool = False,
        blocks: tuple[type[nn.Module], ...] = (),
        checkpoint: tuple[type[nn.Module], ...] = (),
        channels_last: bool = False,
    ) -> nn.Module:
        """`model` on this rank's device, with the first rank's weights, its gradients joined with those of all ranks.

        One rank: the model itself. `strategy` is "ddp", "fsdp" or "hybrid" (shard in a node, replicate between nodes);
        None chooses.
        """
        engine = self._started()
        engine.speed.tell()
        wish = Wish(strategy, unused, sync_batchnorm, offload, blocks, checkpoint, channels_last)
        in_step, numbers = (lambda: engine.in_step), engine.speed.numbers
        wrapped = wrap(self._link, model, self.device, wish, numbers, in_step, self.say)
        engine.models.append(wrapped)
        seed_apart(self.seed, self.rank)
        return wrapped.model

    def shard(
        self,
        dataset: MapDataset,
        *,
        shuffle: bool = False,
        weights: "torch.Tensor | None" = None,
        collate: Collate | None = None,
        workers: int | None = None,
        drop_tail: bool = False,
        micro_batch: int | None = None,
        settings: Settings | None = None,
        name: str | None = None,
    ) -> Shard:
        """This rank's part of a map-style dataset, every sample exactly once over all ranks."""
        wish = Reading(shuffle, weights, collate, workers, drop_tail, micro_batch, settings, name)
        return open_shard(self._terms(), dataset, wish)

    def stream(
        self,
        dataset: Iterable[object],
        *,
        decode: Callable[[object], object] | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        drop_tail: bool = False,
        micro_batch: int | None = None,
    ) -> Stream:
        """This rank's part of an iterable dataset, nothing twice or lost; `decode` sees only what this rank keeps.

        Every rank reads the whole stream, so records should be cheap and the costly part be left to `decode`. A dataset
        that declares shards (`num_shards`, `shard(i)`) is read shard by shard instead.
        """
        source = StreamSource(dataset, decode, collate, workers, micro_batch, drop_tail)
        return open_stream(self._terms(), source)

    def restore(
        self, folder: str | Path, *, keep: int = 3, keep_best: str | None = None, **parts: Stateful
    ) -> Checkpoint:
        """Bring `parts` (model=, optimizer=, train=, ...) to the newest sound checkpoint in `folder`, if there is one.

        What it gives saves them there from now on. Of the checkpoints the `keep` newest stay, and with
        `keep_best="val/accuracy"` the one that had the best value when it was saved.
        """
        engine, place = self._started(), self.once(Path(folder).absolute)
        self._move_to(place)
        own = {} if engine.speed.scale is None else {"loss_scale": engine.speed.scale}
        facts = partial(self._summary, "saved")
        follow, reseed = engine.pulse.riders.append, partial(seed_anew, self.seed, self.rank)
        ground = Ground(self._link, engine, self.device, follow, reseed, self.say, self.once, facts, own)
        return restore(ground, place, keep, keep_best, parts)

    def evaluate(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """`model` in evaluation mode and without gradients, inside `with run.evaluate(model) as net:`.

        What it gives needs no other rank in its forward pass, so that ranks with more test samples than others cannot
        hang; a sharded model does, and then all ranks pass over equally many batches, whose padding does not count.
        """
        return evaluate(self._link, self._started(), model)

    def log(self, values: Mapping[str, object], step: int | None = None, now: bool = False) -> None:
        """Log numbers by name; they are averaged over the ranks about once a second, or at once with `now=True`."""
        engine = self._started()
        for name, value in values.items():
            engine.pulse.pending.add(engine.step_number if step is None else step, name, value)
        if now:
            engine.flush("run.log(now=True)")

    def say(self, text: str) -> None:
        """Print once, whatever the number of ranks, and keep it in the text log."""
        if self._writer is not None:
            self._writer.say(text)

    def _keep_real(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._engine is None else self._engine.padding.leave_out(values)

    def _terms(self) -> Terms:
        return Terms(
            self.global_batch,
            self.seed,
            self._link.world,
            self.device,
            self._started(),
            self.folder,
            self._ledger,
            self.say,
            self.once,
        )

    def _move_to(self, folder: Path) -> None:
        """Let logs and ledgers lie beside the checkpoints, unless the user chose a place or something is written."""
        engine = self._started()
        opened = self._writer is not None and self._writer.opened
        if self._wished_folder is not None or self.once(lambda: opened):
            return
        self._folder = self._wished_folder = folder
        for account in engine.accounts:
            account.folder, account.generation = folder, self.once(next_generation, folder, account.name)

    def _started(self) -> RunEngine:
        if self._engine is None:
            raise GroupError("this run is not started: use `with Run(...) as run:`, or call run.start() first")
        return self._engine

    def _check_alike(self) -> None:
        mine = [float(self.global_batch), float(self.seed)]
        for rank, theirs in enumerate(self._link.exchange("Run.start", mine)):
            if theirs.tolist() != mine:
                raise GroupError(
                    f"rank {self.rank} has Run(global_batch={self.global_batch}, seed={self.seed}) and rank {rank} has "
                    f"Run(global_batch={theirs[0]:.0f}, seed={theirs[1]:.0f}): a step is global, so both must be alike "
                    "on all ranks"
                )

    def _summary(self, status: str) -> dict[str, object]:
        engine, world = self._engine, self._link.world
        return {
            "status": status,
            "version": __version__,
            "torch": torch.__version__,
            "world_size": world.size,
            "nodes": world.nodes,
            "backend": self._choice.backend,
            "device": str(self.device),
            "global_batch": self.global_batch,
            "seed": self.seed,
            "steps": engine.steps if engine else 0,
            "samples": engine.samples if engine else 0,
            "seconds": round(time.monotonic() - self._began, 3),
            "metrics": self._writer.last if self._writer else {},
            "choices": engine.speed.choices() if engine else {},
        }


def _choose_folder(wish: Path | None) -> Path:
    if wish is not None:
        return wish.absolute()
    script = Path(sys.argv[0]).stem or "run"
    return Path("runs").absolute() / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
