"""The live training process: one object through which a script speaks to all of its ranks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import torch
from torch import nn

from samestep.checkpoint.checkpoint import Checkpoint
from samestep.checkpoint.parts import Ground, Stateful
from samestep.checkpoint.restore import folder_of, restore
from samestep.data.loader import CollateFn, MapDataset
from samestep.distributed.collectives import Collectives
from samestep.parallel.precision import Precision
from samestep.parallel.wrap import Strategy, UnusedParameters, WrapOptions
from samestep.teacher import options as teaching
from samestep.teacher.frozen_model import Build
from samestep.teacher.options import check_placement_options
from samestep.teacher.teacher import Teacher
from samestep.training.data_config import Terms
from samestep.training.evaluation import evaluate, setting_here, take_teacher
from samestep.training.lifecycle import Lifecycle, RunConfig, reseed_per_rank
from samestep.training.shard import Reading, Settings, Shard, open_shard
from samestep.training.stream import Stream, StreamSource, open_stream
from samestep.training.wrapping import wrap_model


class Run(Collectives):
    """A training process among its ranks; use it with `with`, or with `start()` and `close()`.

    One rank needs no process group. After an exception nothing is destroyed, since that can deadlock the other ranks:
    the exception ends this process, and the launcher the others.

    >>> with Run(global_batch=4, seed=0) as run:
    ...     run.print(f"{run.size} rank(s)")
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
        replica_check_every: int = 100,
        precision: Precision = "auto",
        compile: bool = False,
        ledger: bool = False,
    ) -> None:
        self._life = Lifecycle(
            RunConfig(
                global_batch,
                seed,
                folder,
                backend,
                start_timeout,
                step_timeout,
                replica_check_every,
                precision,
                compile,
                ledger,
            )
        )
        super().__init__(self._life.link)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._life.choice.device

    @property
    def folder(self) -> Path:
        """Where this run's logs lie, the same on every rank."""
        return self._life.folder

    def start(self) -> Self:
        """Connect the ranks; `with Run(...)` does it by itself."""
        self._life.start(self.once)
        return self

    def close(self) -> None:
        """End after success: write what is pending, wait for all ranks, disconnect."""
        self._life.end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.leave(error)

    def wrap(
        self,
        model: nn.Module,
        strategy: Strategy | None = None,
        *,
        unused_parameters: UnusedParameters = "error",
        sync_batchnorm: bool = False,
        cpu_offload: bool = False,
        blocks: tuple[type[nn.Module], ...] = (),
        activation_checkpointing: tuple[type[nn.Module], ...] = (),
        channels_last: bool = False,
        example: object = None,
        optimizer: str = "AdamW",
    ) -> nn.Module:
        """`model` on this rank's device, with the first rank's weights, its gradients joined with those of all ranks.

        One rank: the model itself. `strategy` is "ddp", "fsdp", "zero2" (weights stay whole from the forward to the
        backward pass) or "hybrid" (shard in a node, replicate between nodes); None chooses. With an `example` batch it
        plans: strategy, recomputation and micro-batch by what a traced step takes, for the `optimizer` of that name.
        """
        wish = WrapOptions(
            strategy, unused_parameters, sync_batchnorm, cpu_offload, blocks, activation_checkpointing, channels_last
        )
        return wrap_model(self._life, self.once, model, wish, example, optimizer)

    def shard(
        self,
        dataset: MapDataset,
        *,
        shuffle: bool = False,
        sampling_weights: "torch.Tensor | None" = None,
        collate_fn: CollateFn | None = None,
        num_workers: int | None = None,
        drop_last: bool = False,
        micro_batch: int | None = None,
        epoch_settings: Settings | None = None,
        name: str | None = None,
    ) -> Shard:
        """This rank's part of a map-style dataset, every sample exactly once over all ranks."""
        wish = Reading(shuffle, sampling_weights, collate_fn, num_workers, drop_last, micro_batch, epoch_settings, name)
        return open_shard(self._terms(), dataset, wish)

    def stream(
        self,
        dataset: Iterable[object],
        *,
        decode: Callable[[object], object] | None = None,
        collate_fn: CollateFn | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        micro_batch: int | None = None,
    ) -> Stream:
        """This rank's part of an iterable dataset, nothing twice or lost; `decode` sees only what this rank keeps.

        Every rank reads the whole stream, so records should be cheap and the costly part be left to `decode`. A dataset
        that declares shards (`num_shards`, `shard(i)`) is read shard by shard instead.
        """
        source = StreamSource(dataset, decode, collate_fn, num_workers, micro_batch, drop_last)
        return open_stream(self._terms(), source)

    def checkpoint(
        self, folder: str | Path, *, keep: int = 3, keep_best: str | None = None, **parts: Stateful
    ) -> Checkpoint:
        """Bring `parts` (model=, optimizer=, train=, ...) to the newest sound checkpoint in `folder`, if there is one.

        What it gives saves them there from now on, and no other run may until this one ends. Of the checkpoints the
        `keep` newest stay, and with `keep_best="val/accuracy"` the one with the best value logged before its save.
        """
        engine, place = self._life.engine, self.once(folder_of, folder)
        self._life.move_to(place, self.once)
        own = {} if engine.speed.scale is None else {"loss_scale": engine.speed.scale}
        facts, times = partial(self._life.summary, "saved"), self._life.times_logged
        riders, reseed = engine.pulse.riders, partial(reseed_per_rank, self._life.asked.seed, self.rank)
        ground = Ground(self._link, engine, self.device, riders, reseed, self.print, self.once, facts, times, own)
        return restore(ground, place, keep, keep_best, parts)

    def teacher(
        self,
        build: Build | str | Path,
        *,
        weights: str | Path | None = None,
        placement: str | None = None,
        dtype: torch.dtype | None = None,
        top_k: int | None = None,
        temperature: float = 1.0,
        example: object = None,
        **special: Unpack[teaching.PlacementOptions],
    ) -> Teacher:
        """A frozen model with the weights of a file, called like a module; nothing of it trains or is saved.

        `build` makes the module, or is the folder of a Hugging Face model. `placement` says where it is to be ("gpu",
        "cpu", "offload", ...); None or "auto" chooses and says why, by the work of `example`: a tensor, a tuple of
        arguments or a dict of keywords, such as it will be called with.
        `temperature` is that of the loss which top-k logits are for; without `top_k` it changes nothing. What only some
        placements know: `device_map` of "custom", `servers` of "served", `cache` of "cached", `inner` of the last two.
        """
        check_placement_options(special)
        engine = self._life.engine  # first: it says so where the run is not started
        wish = teaching.TeacherOptions(dtype, top_k, temperature, example, **special)
        around = partial(setting_here, self._link.world, self._life.asked.global_batch)
        ground = teaching.Ground(self._link, self.device, self.folder, self.print, self.once, around)
        return take_teacher(engine, ground, build, weights, placement, wish)

    def evaluate(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """`model` in evaluation mode and without gradients, inside `with run.evaluate(model) as net:`.

        What it gives needs no other rank in its forward pass, so that ranks with more test samples than others cannot
        hang; a sharded model does, and then all ranks pass over equally many batches, whose padding does not count.
        """
        return evaluate(self._link, self._life.engine, model)

    def log(self, values: Mapping[str, object], step: int | None = None, now: bool = False) -> None:
        """Log numbers by name; they are averaged over the ranks about once a second, or at once with `now=True`."""
        engine = self._life.engine
        for name, value in values.items():
            engine.pulse.pending.add(engine.step_number if step is None else step, name, value)
        if now:
            engine.flush("run.log(now=True)")

    def print(self, text: str) -> None:
        """Print once, whatever the number of ranks, and keep it in the text log."""
        self._life.say(text)

    def _keep_real(self, values: torch.Tensor) -> torch.Tensor:
        return self._life.engine.padding.leave_out(values)

    def _terms(self) -> Terms:
        life, asked = self._life, self._life.asked
        batch, seed, ledger = asked.global_batch, asked.seed, asked.ledger
        return Terms(batch, seed, life.world, self.device, life.engine, self.folder, ledger, self.print, self.once)
