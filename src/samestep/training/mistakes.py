"""Mistakes of a script that samestep recognizes: wrong objects, a forgotten loop, a loss that compares rows.

Each is answered by a sentence that says what to write instead. Objects and keywords are checked when they are passed.
Errors of Python and torch that such a mistake causes later get a note when the run ends: a check in every step would
cost time.
"""

import dis
import functools
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)

from samestep.errors import DataError, StepError, WrapError
from samestep.torch_private import class_labels, is_compiled, is_fsdp, is_fsdp1, matrix_product_shape

_CANNOT_PICKLE = re.compile("^Can't (pickle|get local)|^cannot pickle")
P = ParamSpec("P")
T = TypeVar("T")
_LOOPS = "for epoch in train.epochs(n): for step in epoch: for inputs, labels in step:"
_UNPACK = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}
_WRAPPERS = (DistributedDataParallel, DataParallel)
_MAX_NODES = 20_000  # of the autograd graph; a graph with more is searched in part
_MAX_CHAIN = 8  # operations between a parameter and the product that uses it: transpose, cast, view

_LOOP_OBJECT = re.compile(r"(?:'|not |got )(Step|Epoch|Shard|Stream)\b")
_LOOP_NOTES = {
    "Step": "a Step is one optimizer step, not a batch: loop over its micro-batches, `for inputs, labels in step:`",
    "Epoch": "an Epoch is a sequence of steps: `for step in epoch:`, and in it `for inputs, labels in step:`",
    "Shard": f"a Shard is not a batch: `{_LOOPS}` trains, and `for inputs, labels in test:` evaluates",
    "Stream": f"a Stream is not a batch: `{_LOOPS}` trains, and `for inputs, labels in test:` evaluates",
}
_BATCH_TYPES = (torch.Tensor, dict, list)
_OTHER_DEVICE = re.compile(
    r"tensors? to be on the same device|is not on the expected device|same device", re.IGNORECASE
)
_OTHER_DTYPE = re.compile(r"same dtype|bias type|weight type|does not match weight dtype|found dtype", re.IGNORECASE)


def check_data(dataset: object, method: str) -> None:
    """Raise if `run.shard` or `run.stream` got a DataLoader or a sampler instead of a dataset."""
    if isinstance(dataset, DataLoader):
        loader: DataLoader[Any] = dataset
        raise DataError(
            f"{method} got a DataLoader with batch_size={loader.batch_size}, and needs its dataset: "
            f"{_instead_of_loader(loader)}"
        )
    if isinstance(dataset, Sampler | BatchSampler):
        raise DataError(
            f"{method} got a {type(dataset).__name__}, which is a sampler, and needs a dataset: pass the dataset, as "
            "in run.shard(dataset, shuffle=True); samestep gives every rank its part by itself, and draws with "
            "weights if you pass sampling_weights="
        )


def _instead_of_loader(loader: "DataLoader[Any]") -> str:
    """The call that replaces a DataLoader, and what becomes of its batch size and its sampler."""
    iterable = isinstance(loader.dataset, IterableDataset)
    options: list[str] = []
    rest = ["Run(global_batch=...) sets the batch size over all ranks"]
    if not iterable and isinstance(loader.sampler, WeightedRandomSampler):
        options.append("sampling_weights=loader.sampler.weights")
    elif not iterable and (isinstance(loader.sampler, RandomSampler) or getattr(loader.sampler, "shuffle", False)):
        options.append("shuffle=True")
    if loader.collate_fn is not default_collate and loader.batch_size is not None:
        options.append("collate_fn=loader.collate_fn")
    if loader.num_workers:
        options.append(f"num_workers={loader.num_workers}")
    if loader.drop_last:
        options.append("drop_last=True")
    kind = type(loader.sampler).__name__
    if not iterable and type(loader.batch_sampler) not in (BatchSampler, type(None)):
        rest.append(f"the {type(loader.batch_sampler).__name__} is not used")
    elif not iterable and kind == "DistributedSampler":
        rest.append("the DistributedSampler is not needed, since samestep gives every rank its part")
    elif kind not in ("RandomSampler", "SequentialSampler", "WeightedRandomSampler") and not iterable:
        rest.append(f"the {kind} is not used")
    call = ", ".join(["loader.dataset", *options])
    return f"pass run.{'stream' if iterable else 'shard'}({call}); {', and '.join(rest)}"


def check_not_wrapped(model: nn.Module) -> None:
    """Raise if a model that `run.wrap` got is compiled, or is or contains one in DDP, FSDP or DataParallel."""
    if is_compiled(model):
        raise WrapError(
            "the model is already compiled by torch.compile: pass the module itself, and Run(compile=True), which "
            "compiles it for the strategy and keeps random numbers keyed by sample outside of the compiled code"
        )
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS) or is_fsdp1(module):
            which = f"submodule {name!r} of the model" if name else "the model"
            raise WrapError(
                f"{which} is a {type(module).__name__}, and run.wrap averages gradients over the ranks by "
                "itself: pass the module inside of it, model.module, or build the model without the wrapper"
            )
        if is_fsdp(module):
            raise WrapError(
                f"{type(model).__name__} is already sharded by fully_shard (at {name or 'the model itself'!r}): build "
                "it without fully_shard, and pass run.wrap(model, 'fsdp', blocks=(Block,))"
            )


def unpacking_problem(what: str) -> str | None:
    """What is wrong if the script unpacks an epoch or a step: `for inputs, labels in epoch:`. Call it in `__iter__`.

    Python does not tell an iterator who asks for its items, but the instruction at which the caller of `__iter__`
    stands is either that of a loop or that of an assignment to several names.
    """
    # not from its own frame: a frame that refers to itself keeps what its callers hold, such as a batch
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    if frame.f_lasti < 0 or frame.f_code.co_code[frame.f_lasti] not in _UNPACK:
        return None
    return (
        f"{what} was unpacked like a batch, so one loop is missing: training has three, "
        f"`{_LOOPS}`; a step may have several micro-batches"
    )


def add_hint(error: BaseException, device: torch.device, precision: str) -> None:
    """Add a note to an error of Python or torch whose cause is a known mistake in the script."""
    text = str(error)
    note = _dead_worker(error)
    if isinstance(error, TypeError | AttributeError) and (found := _LOOP_OBJECT.search(text)):
        note = _other_attribute(error, found[1]) or _LOOP_NOTES[found[1]]
    elif isinstance(error, RuntimeError) and _OTHER_DEVICE.search(text):
        note = (
            f"this rank computes on {device}: run.wrap moves the model there and micro-batches arrive there, so remove "
            ".cuda() and .to(...) from the script, and create other tensors with device=run.device"
        )
    elif isinstance(error, RuntimeError | ValueError) and precision == "fp64" and _OTHER_DTYPE.search(text):
        note = (
            "this run computes in float64, and the script makes tensors of another type: remove .float() and "
            "dtype=torch.float32, or use x.to(weight.dtype)"
        )
    elif _CANNOT_PICKLE.search(text):
        note = (
            "if this happens when data workers start: the dataset, its transforms or collate_fn cannot be sent to them"
            "; define functions and classes at the top of a module instead of lambdas, open files in __getitem__, or "
            "pass num_workers=0"
        )
    if note is not None and note not in getattr(error, "__notes__", []):
        error.add_note(note)


def check_setting(setting: object, num_workers: int) -> object:
    """Return a setting of an epoch; raise if it cannot be sent to data workers: torch would wait for them forever."""
    try:
        if num_workers:
            pickle.loads(pickle.dumps(setting))
    except Exception as error:
        raise DataError(
            f"epoch_settings returned a {type(setting).__name__} that cannot be sent to data workers "
            f"({type(error).__name__}: {error}): return numbers, strings, tensors, or tuples, lists and dicts of them, "
            "or pass num_workers=0"
        ) from error
    return setting


def _dead_worker(error: BaseException | None) -> str | None:
    """What to do if a data worker has died: torch raises it from a signal, in the middle of anything."""
    while error is not None and not str(error).startswith("DataLoader worker"):
        error = error.__context__
    if error is None:
        return None
    how = str(error).splitlines()[0].rstrip(" .")
    return (
        f"a data worker of this rank was killed or has crashed ({how}): usual causes are too little memory (the kernel "
        "kills the worker), too little shared memory (/dev/shm), or a crash of native code in the dataset; run with "
        "num_workers=0 to see the line"
    )


def _other_attribute(error: TypeError | AttributeError, kind: str) -> str | None:
    """Which attribute of a Step, Epoch, Shard or Stream the script means; None if it means one of a batch."""
    name, owner = getattr(error, "name", None), getattr(error, "obj", None)
    if not isinstance(name, str) or type(owner).__name__ != kind or any(hasattr(each, name) for each in _BATCH_TYPES):
        return None
    known = [each for each in dir(owner) if not each.startswith("_")]
    if close := get_close_matches(name, known, n=1):
        return f"did you mean {kind.lower()}.{close[0]}?"
    return f"{'an' if kind == 'Epoch' else 'a'} {kind} has {', '.join(known)}"


def explain_keywords(name: str, hints: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown keyword raises a TypeError that says which one to use.

    `hints` maps keywords of other libraries to what to write here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [each for each in inspect.signature(function).parameters if each != "self"]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for keyword in kwargs:
                if keyword not in known:
                    close = get_close_matches(keyword, known, n=1)
                    hint = hints.get(keyword) or (
                        f"did you mean {close[0]}=?" if close else f"it has {', '.join(known)}"
                    )
                    raise TypeError(f"{name} has no argument {keyword!r}: {hint}")
            return function(*args, **kwargs)

        return call

    return decorate


_PRECISION_HINT = "pass Run(precision='fp32', 'bf16', 'fp16' or 'fp64')"
_GLOBAL_BATCH = "use global_batch=, the number of samples per optimizer step over all ranks"
_BATCH = "Run(global_batch=...) sets the samples per step over all ranks, and micro_batch= limits the rows at once"
_LEARNING_RATE = "the optimizer has the learning rate, as in torch.optim.AdamW(model.parameters(), lr=...)"
_DEVICE = "samestep chooses the device of each rank: read it from run.device"
_AUTOMATIC = "remove it, samestep chooses it"

RUN_HINTS = {
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), _GLOBAL_BATCH),
    **dict.fromkeys(("lr", "learning_rate"), _LEARNING_RATE),
    **dict.fromkeys(
        ("dtype", "amp", "mixed_precision", "fp16", "bf16"), "use precision='fp32', 'bf16', 'fp16' or 'fp64'"
    ),
    **dict.fromkeys(("workers", "num_workers"), "pass run.shard(dataset, num_workers=...)"),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "write `for epoch in train.epochs(10):`"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "micro_batch"),
        "pass run.shard(dataset, micro_batch=...), which does not change the result",
    ),
    **dict.fromkeys(("device", "devices", "accelerator"), _DEVICE),
    **dict.fromkeys(
        ("world_size", "num_processes", "nproc"), "the launcher sets it: `samestep run --nproc-per-node 4`"
    ),
    **dict.fromkeys(("output_dir", "log_dir", "logdir", "out_dir"), "use folder="),
    "strategy": "pass run.wrap(model, strategy=...)",
}
DATA_HINTS = {
    "batch_size": _BATCH,
    "workers": "use num_workers=",
    "collate": "use collate_fn=",
    **dict.fromkeys(("sampler", "weights"), "use shuffle=True, or sampling_weights= for weighted draws"),
    "batch_sampler": "samestep partitions the global batch by itself",
    **dict.fromkeys(("pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn"), _AUTOMATIC),
    **dict.fromkeys(("seed", "generator"), "Run(seed=...) is the source of the order"),
    "device": _DEVICE,
}
LOG_HINTS = {
    "epoch": "leave it out, since every record has its step and its epoch",
    **dict.fromkeys(("global_step", "iteration"), "use step=, or leave it out for the current step"),
    **dict.fromkeys(
        ("commit", "sync_dist", "on_step", "on_epoch", "prog_bar"), "remove it, or use now=True to write at once"
    ),
}
WRAP_HINTS = {
    "find_unused_parameters": "use unused_parameters='allow'",
    **dict.fromkeys(("device", "device_ids", "device_id"), _DEVICE),
    **dict.fromkeys(("precision", "dtype", "mixed_precision", "mp_policy"), _PRECISION_HINT),
    "compile": "pass Run(compile=True)",
    **dict.fromkeys(("lr", "learning_rate"), _LEARNING_RATE),
    **dict.fromkeys(("auto_wrap_policy", "transformer_layer_cls"), "use blocks=(Block,)"),
    **dict.fromkeys(("gradient_as_bucket_view", "broadcast_buffers", "static_graph", "bucket_cap_mb"), _AUTOMATIC),
    "gradient_checkpointing": "use activation_checkpointing=(Block,)",
}


def coupling_warning(losses: torch.Tensor, rows: int, ranks: int, micro_batches: int) -> str | None:
    """The warning for a loss that compares rows of the micro-batch, if other ranks or micro-batches have more rows.

    No shape shows it: the usual cross entropy of a similarity matrix has one loss per row. The autograd graph does, as
    the product of two computed matrices whose result has a row and a column for each row of the micro-batch.
    """
    if rows < 2 or ranks * micro_batches == 1 or (found := _row_by_row(losses, rows)) is None:
        return None
    return (
        f"the loss compares the {rows} rows of a micro-batch with each other (in a {found} x {found} matrix), but not "
        f"with the other rows of the global batch ({ranks} rank(s) with {micro_batches} micro-batch(es) each), so the "
        "result depends on their number: gather the rows of all ranks with run.gather, as in "
        "`cross_entropy(z1 @ run.gather(z2).T, step.rows, reduction='none')`"
    )


def check_gathered_labels(losses: torch.Tensor, rows: int, first_row: int) -> None:
    """Raise if a loss over rows of `run.gather` has the labels 0, 1, 2, ..., which are right on rank 0 only."""
    nodes = list(_nodes(losses)) if first_row and rows > 1 else []
    if not any(node.name().startswith("_Gather") for node in nodes):
        return
    for node in nodes:
        labels = class_labels(node)
        if labels is not None and labels.shape == (rows,) and labels.tolist() == list(range(rows)):
            raise StepError(
                f"the loss compares rows with run.gather(...) and has the labels 0 to {rows - 1}, but the first row of "
                f"this rank is row {first_row} of the global batch: use step.rows instead of torch.arange(...), as in "
                "`cross_entropy(z1 @ run.gather(z2).T, step.rows, reduction='none')`"
            )


def _row_by_row(losses: torch.Tensor, rows: int) -> int | None:
    """The size of a square matrix with the rows of the micro-batch, or two views of them, along both dimensions."""
    for node in _nodes(losses):
        shape, operands = matrix_product_shape(node), (each for each, _ in node.next_functions)
        if shape in ((rows, rows), (2 * rows, 2 * rows)) and not any(map(_is_constant, operands)):
            return shape[0]
    return None


def _nodes(losses: torch.Tensor) -> Iterator[Node]:
    """The nodes of the autograd graph that computed `losses`."""
    pending, seen = [losses.grad_fn], set[Node]()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [each for each, _ in node.next_functions]


def _is_constant(node: Node | None) -> bool:
    """Whether an operand is a parameter, or has no gradient: then the product is that of a layer, row by row."""
    for _ in range(_MAX_CHAIN):
        inputs = [] if node is None else list(node.next_functions)
        if not inputs:  # no gradient, or the node that accumulates a parameter's gradient
            return True
        if len(inputs) > 1:
            return False
        node = inputs[0][0]
    return False
