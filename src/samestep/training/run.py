"""`Run`: the live training process, through which a script uses all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.context import RunConfig
from samestep.data.loader import CollateFn, MapDataset
from samestep.environment.world import comparison_folder
from samestep.loggers.logger_thread import Logger
from samestep.parallel.precision import Precision
from samestep.parallel.wrap import Strategy, UnusedParameters, WrapOptions
from samestep.teacher.frozen_model import Build
from samestep.teacher.options import PlacementOptions, TeacherOptions, check_placement_options
from samestep.teacher.teacher import Teacher, open_teacher
from samestep.training.evaluation import EarlyStopping, Evaluation, Mode
from samestep.training.lifecycle import Lifecycle
from samestep.training.mistakes import DATA_HINTS, LOG_HINTS, RUN_HINTS, WRAP_HINTS, explain_keywords
from samestep.training.models import average_model, wrap_model
from samestep.training.shard import EpochSettings, Shard
from samestep.training.stream import Stream

if TYPE_CHECKING:  # torch.distributed.checkpoint is imported by runs that call run.checkpoint
    from samestep.checkpoint.checkpoint import Checkpoint
    from samestep.checkpoint.parts import Stateful


class Run(Evaluation):
    """A training process among its ranks. Use it with `with`, or with `start()` and `close()`.

    A single rank needs no process group. After an exception nothing is destroyed, since that can deadlock the other
    ranks: the exception ends this process, and the launcher ends the others.

    >>> with Run(global_batch=4, seed=0) as run:
    ...     run.print(f"{run.size} rank(s)")
    1 rank(s)
    """

    @explain_keywords("Run(...)", RUN_HINTS)
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
        loggers: Sequence[Logger] | None = None,
        config: object = None,
    ) -> None:
        """Configure a run; the ranks connect at `start()`.

        Args:
            global_batch: Samples per optimizer step, over all ranks.
            seed: The source of initial weights, sample order and keyed random numbers.
            folder: The folder of the run's logs. Default: the launcher's, that of `run.checkpoint`, or a new one in
                `runs/`.
            backend: "nccl" or "gloo". Default: NCCL if each rank has a GPU, gloo otherwise.
            start_timeout: Seconds to wait for other ranks until the first step is complete.
            step_timeout: Seconds to wait for other ranks from then on.
            replica_check_every: Steps between two comparisons of the replicas, which are also compared before each
                checkpoint and when training ends; 0 turns all of them off.
            precision: "fp32", "bf16", "fp16", or "auto": bf16 if every GPU supports it. "fp64" converts weights,
                batches and torch's default dtype to float64, to compare runs. `samestep run --precision` replaces it.
            compile: Whether to compile wrapped models with `torch.compile`.
            ledger: Whether to record every trained sample, for `samestep audit`.
            loggers: Where metrics go besides samestep's own files, such as `[WandbLogger("digits")]`. Default:
                TensorBoard, if it is installed.
            config: Your hyperparameters, for loggers and the run's config.json: a dict, a dataclass, or the result of
                argparse. Values of `samestep run --config` are recorded without it.

        """
        timeouts = start_timeout, step_timeout
        common = global_batch, seed, folder, backend, *timeouts, replica_check_every, precision, compile, ledger
        super().__init__(Lifecycle(RunConfig(*common, loggers, config)))

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._lifecycle.device

    @property
    def folder(self) -> Path:
        """The folder of this run's logs, the same on every rank."""
        return self._lifecycle.folder

    def start(self) -> Self:
        """Connect the ranks; `with Run(...)` calls it."""
        self._lifecycle.start()
        return self

    def close(self) -> None:
        """End after success: write what is pending, wait for all ranks, disconnect. A second call does nothing."""
        self._lifecycle.end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifecycle.leave(error)

    @explain_keywords("run.wrap(...)", WRAP_HINTS)
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
        batch_dim: int | None = None,
        weights: str | Path | None = None,
    ) -> nn.Module:
        """`model` on this rank's device, with rank 0's weights and with gradients averaged over all ranks.

        On a single rank it returns the model itself. `strategy` is "ddp", "fsdp", "zero2" (FSDP that keeps the full
        weights from the forward to the backward pass) or "hybrid" (shard inside a node, replicate between nodes); None
        chooses. With an `example` batch it traces one step and plans strategy, activation checkpointing and micro-batch
        for the `optimizer` of that name. `batch_dim=1` says that the tensors of the model have the batch in dimension 1
        and the time in dimension 0, so that dropout is keyed by sample; samestep knows it of recurrent layers and
        attention layers with `batch_first=False`. A model on the meta device is initialized by the `reset_parameters`
        of its modules; with `weights`, a safetensors file or a Hugging Face folder, each rank reads what it holds.
        """
        memory = cpu_offload, blocks, activation_checkpointing
        options = WrapOptions(strategy, unused_parameters, sync_batchnorm, *memory, channels_last)
        context, plans = self._lifecycle.context, self._lifecycle.plans
        return wrap_model(context, plans, model, options, example, optimizer, batch_dim, weights)

    def average(self, model: nn.Module, decay: float = 0.999) -> AveragedModel:
        """An exponential moving average (EMA) of the weights of a wrapped model, with its buffers: a separate model.

        Call `ema.update_parameters(model)` after `optimizer.step()`, evaluate with `run.evaluate(ema)`, and pass it to
        `run.checkpoint`. With FSDP it is sharded as the model is. After n updates its weights are
        `decay * ema + (1 - decay) * model`; the first update copies the model.
        """
        return average_model(self._lifecycle.context, model, decay)

    @explain_keywords("run.shard(...)", DATA_HINTS)
    def shard(
        self,
        dataset: MapDataset,
        *,
        shuffle: bool = False,
        sampling_weights: torch.Tensor | None = None,
        collate_fn: CollateFn | None = None,
        num_workers: int | None = None,
        drop_last: bool = False,
        micro_batch: int | None = None,
        passes: int = 1,
        epoch_settings: EpochSettings | None = None,
        name: str | None = None,
    ) -> Shard:
        """This rank's part of a map-style dataset; over all ranks every sample counts exactly once.

        With `passes=2` you can loop over the micro-batches of a step twice, for example once per optimizer of a GAN:
        samestep keeps them in memory until the step ends.
        """
        return Shard(
            self._lifecycle.loop,
            dataset,
            shuffle=shuffle,
            sampling_weights=sampling_weights,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
            micro_batch=micro_batch,
            passes=passes,
            epoch_settings=epoch_settings,
            name=name,
        )

    @explain_keywords("run.stream(...)", DATA_HINTS)
    def stream(
        self,
        dataset: Iterable[object],
        *,
        decode: Callable[[object], object] | None = None,
        collate_fn: CollateFn | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        micro_batch: int | None = None,
        passes: int = 1,
    ) -> Stream:
        """This rank's part of an iterable dataset; no record is lost or read twice.

        Every rank reads the full stream, so records should be cheap: put expensive work into `decode`, which samestep
        calls only for the records that this rank keeps. A dataset with `num_shards` and `shard(i)` is read shard by
        shard instead.
        """
        return Stream(
            self._lifecycle.loop,
            dataset,
            decode=decode,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
            micro_batch=micro_batch,
            passes=passes,
        )

    def checkpoint(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_best: str | None = None,
        trainable_only: bool = False,
        **parts: "Stateful",
    ) -> "Checkpoint":
        """Restore `parts` (model=, optimizer=, train=, ...) from the newest valid checkpoint in `folder`, if any.

        The returned object saves them there from now on, and no other run may write to the folder until this one ends.
        The `keep` newest checkpoints are kept, and with `keep_best="val/accuracy"` the one with the best value that was
        logged before its save. With `trainable_only`, for example to train LoRA adapters, checkpoints contain only the
        checksums of frozen weights, and a restart raises if it has others.
        """
        from samestep.checkpoint.restore import resolve_folder, restore

        context, path = self._lifecycle.context, self.once(resolve_folder, folder)
        if (comparison := comparison_folder()) is not None:
            path = comparison / "checkpoints" / path.name
        self._lifecycle.move_folder(path)
        checkpoint = restore(context, path, keep, keep_best, trainable_only, parts)
        self._lifecycle.checkpoint_folders.append(path)
        return checkpoint

    def save_pretrained(
        self, model: nn.Module, folder: str | Path, *, tokenizer: object = None, merge: bool = False
    ) -> None:
        """Write a model of transformers or peft as its `save_pretrained` does; call it on every rank.

        Rank 0 gathers sharded weights in its host memory, writes the folder, and replaces one that holds a model. The
        `tokenizer` is one of transformers or a folder; default: the folder that the model was loaded from. Of a model
        of peft the folder holds the adapter; with `merge`, the weights of the base model with the adapter added.
        """
        from samestep.checkpoint.export import save_pretrained

        save_pretrained(self._lifecycle.context, model, folder, tokenizer, merge)

    def early_stopping(self, patience: int, *, mode: Mode = "min", min_delta: float = 0.0) -> EarlyStopping:
        """Decides, the same on all ranks, when a metric has stopped improving; a part for `run.checkpoint`.

        Call `stopping.update(loss)` after each evaluation and leave the loop `if stopping.stopped`, which is so after
        `patience` updates in a row that are not better than the best by more than `min_delta`. With `mode="max"` a
        higher value is better.
        """
        return EarlyStopping(self._lifecycle.context, patience, mode, min_delta)

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
        **placement_options: Unpack[PlacementOptions],
    ) -> Teacher:
        """A frozen model with the weights of a file, called like a module; it is neither trained nor saved.

        `build` returns the module, or is the folder of a Hugging Face model. `placement` says where it runs ("gpu",
        "cpu", "offload", ...); None or "auto" chooses and prints why, by the work of `example`: a tensor, a tuple of
        arguments or a dict of keyword arguments.
        `temperature` is that of the loss which uses the top-k logits; without `top_k` it has no effect. Options of some
        placements: `device_map` for "custom", `servers` for "served", `cache` for "cached", `inner` for the last two.
        """
        context = self._lifecycle.context  # raises if the run is not started
        check_placement_options(placement_options)
        options = TeacherOptions(dtype or context.convert_to, top_k, temperature, example, **placement_options)
        teacher = open_teacher(context, build, weights, placement, options)
        context.on_close.append(teacher.close)  # also after a failure: other ranks may wait for what this one serves
        self._lifecycle.teachers.append(teacher)
        return teacher

    @explain_keywords("run.log(...)", LOG_HINTS)
    def log(self, values: Mapping[str, object], step: int | None = None, now: bool = False) -> None:
        """Log numbers by name; averaged over the ranks about once per second, or immediately with `now=True`.

        samestep logs the mean of the ranks' values, each with the same weight. A rank that does not log a name does not
        count. For exact means over the samples of a step use `step.log`, for other values `run.mean`. Every rank must
        log a DTensor, such as the gradient norm of an FSDP model: it is put together at once, which is a collective.
        The record has the current step and epoch. `step` is a step number of your own instead; `step=epoch.number` is
        the same as no `step`.
        """
        context, row = self._lifecycle.context, self._lifecycle.loop.log_row(step)
        context.metrics.log(row, values)
        if now:
            context.flush_metrics("run.log(now=True)")

    def profile(
        self,
        steps: Iterable[int],
        ranks: Iterable[int] = (0,),
        *,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        """Write a trace of `steps` of these ranks into the folder of the run, and a table of their slowest operations.

        Call it on all ranks, before the first of the steps. Steps count from 0 over all epochs and restarts, as
        `step.number`. The traces are `profile/rank-R-steps-FIRST-LAST.json.gz`, for https://ui.perfetto.dev; the last
        three options are those of `torch.profiler.profile`. `samestep run --profile 10:13` does it for any script.
        """
        from samestep.training.profiler import open_profiler  # imported by runs that use it

        open_profiler(self._lifecycle.loop, steps, ranks, record_shapes, profile_memory, with_stack)

    def print(self, *values: object, sep: str = " ") -> None:
        """Print on rank 0 only, as `print` does, and keep the text in the text log."""
        self._lifecycle.print(sep.join(map(str, values)))
