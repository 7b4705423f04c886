"""What a rank reads: its DataLoaders and samplers, the samples of every batch, and where each epoch begins.

Batches are observed at the iterators, since Accelerate prefetches and Lightning builds loaders again.
"""

import inspect
import linecache
import sys
from collections import deque
from types import FrameType
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, Subset, dataloader
from torch.utils.data.distributed import DistributedSampler

from samestep.verify.recorder.fingerprints import hash_rows, rng_state, shapes
from samestep.verify.recorder.recorder import Recorder, StopScript, wrap

ITERATOR: Final = "_BaseDataLoaderIter"  # of torch.utils.data.dataloader
ITERATOR_METHODS: Final = ("__next__", "_next_index")
_MAX_SETTINGS: Final = 32  # attributes of a dataset
_MAX_SETTING: Final = 80  # characters of the value of one
_NAME: Final = "_samestep_verify"  # attribute that an observed object gets


class DataObserver:
    """Follows the loaders of this process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loaders = 0
        self._epochs = 0
        self._keys: dict[int, tuple[str, int]] = {}  # of loaders: dataset and line
        self._trained: set[tuple[str, int]] = set()  # keys of loaders whose batches were trained on
        self._open: list[Any] = []  # iterators that are not exhausted, the innermost last

    def install(self) -> None:
        """Observe every loader and sampler from now on."""
        iterator = getattr(dataloader, ITERATOR)
        wrap(DataLoader, "__init__", self._create_loader)
        wrap(DataLoader, "__iter__", self._start_epoch)
        wrap(iterator, "__next__", self._next)
        wrap(iterator, "_next_index", self._next_index)
        wrap(DistributedSampler, "__init__", self._create_sampler)
        wrap(DistributedSampler, "set_epoch", self._set_epoch)
        wrap(DistributedSampler, "__iter__", self._draw_order)

    @property
    def current(self) -> int | None:
        """The number of the epoch whose batches are used: the innermost loop over a loader."""
        return getattr(self._open[-1], _NAME).number if self._open else None

    def note_training(self) -> None:
        """Note that the model is trained on the batches of the innermost loop."""
        if self._open:
            self._trained.add(self._keys[getattr(self._open[-1], _NAME).loader.__dict__[_NAME]])

    def _create_sampler(self, original: Any, sampler: Any, *args: Any, **kwargs: Any) -> None:
        original(sampler, *args, **kwargs)
        if not self._recorder.is_quiet:
            sampler.__dict__[_NAME] = self._recorder.site()

    def _set_epoch(self, original: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._recorder.is_quiet:
            self._recorder.write("set_epoch", epoch=str(args[:1] or kwargs), site=self._recorder.site())
        return original(sampler, *args, **kwargs)

    def _draw_order(self, original: Any, sampler: Any) -> Any:
        if not self._recorder.is_quiet:
            self._recorder.write("order", site=self._recorder.site())
        return original(sampler)

    def _create_loader(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.is_quiet:
            original(loader, *args, **kwargs)
            return
        if recorder.settings.is_reference:
            args, kwargs = self._scale(args, kwargs)
        original(loader, *args, **kwargs)
        number, self._loaders = self._loaders, self._loaders + 1
        loader.__dict__[_NAME] = number
        with recorder.quiet():
            values = _describe_loader(loader)
        self._keys[number] = values["dataset"], recorder.site()
        recorder.write("loader", id=number, site=self._keys[number][1], **values)

    def _scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a loader of the training data the batch size of all ranks together, unless the script has done so."""
        reference = self._recorder.settings.reference
        dataset = args[0] if args else kwargs.get("dataset")
        size = args[1] if len(args) > 1 else kwargs.get("batch_size", 1)
        key = dataset_key(dataset)
        if key not in reference["batch_sizes"] or size not in reference["batch_sizes"][key]:
            return args, kwargs
        self._recorder.write("scaled", dataset=key, size=size)
        if len(args) > 1:
            return (args[0], size * reference["size"], *args[2:]), kwargs
        if kwargs.get("batch_sampler") is None:
            kwargs = {**kwargs, "batch_size": size * reference["size"]}
        return args, kwargs

    def _start_epoch(self, original: Any, loader: Any) -> Any:
        recorder = self._recorder
        if recorder.is_quiet or _NAME not in loader.__dict__:
            return original(loader)
        if recorder.steps >= recorder.settings.steps and self._keys[loader.__dict__[_NAME]] in self._trained:
            raise StopScript  # an evaluation at the end of an epoch still runs
        iterator = original(loader)
        number, self._epochs = self._epochs, self._epochs + 1
        iterator.__dict__[_NAME] = _Epoch(number, loader)  # persistent workers return the same iterator again
        if iterator in self._open:
            self._open.remove(iterator)
        self._open.append(iterator)
        sampler = getattr(loader, "sampler", None)
        recorder.write(
            "epoch", id=number, loader=loader.__dict__[_NAME], site=recorder.site(),
            sampler_epoch=getattr(sampler, "epoch", None), settings=_settings(loader.dataset),
        )  # fmt: skip
        return iterator

    def _next_index(self, original: Any, iterator: Any) -> Any:
        index = original(iterator)
        if (epoch := iterator.__dict__.get(_NAME)) is not None:
            epoch.indices.append(index)
        else:  # workers read ahead before __iter__ returns
            iterator.__dict__.setdefault(f"{_NAME}_early", deque()).append(index)
        return index

    def _next(self, original: Any, iterator: Any) -> Any:
        recorder, epoch = self._recorder, iterator.__dict__.get(_NAME)
        if recorder.is_quiet or epoch is None:
            return original(iterator)
        if (early := iterator.__dict__.pop(f"{_NAME}_early", None)) is not None:
            epoch.indices.extendleft(reversed(early))
        if epoch.batches >= recorder.settings.batches and not self._must_continue(epoch):
            self._end_epoch(iterator, is_complete=False)
            raise StopIteration
        try:
            data = original(iterator)
        except StopIteration:
            self._end_epoch(iterator, is_complete=True)
            raise
        index = epoch.indices.popleft() if epoch.indices else None
        with recorder.quiet():
            rows, data_shapes, rng = hash_rows(data), shapes(data), rng_state()
        recorder.write(
            "batch", epoch=epoch.number, n=epoch.batches, index=resolve(epoch.loader.dataset, index), rows=rows,
            shapes=data_shapes, rng=rng,
        )  # fmt: skip
        epoch.batches += 1
        return data

    def _must_continue(self, epoch: "_Epoch") -> bool:
        """Whether an epoch cannot be cut: it ends here, or the script calls next(), as often as the loader is long."""
        if _length(epoch.loader) == epoch.batches:
            return True
        frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if self._recorder.is_user_code(frame.f_code):
                if "next(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                    return True
                if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                    return False
            frame = frame.f_back
        return False

    def _end_epoch(self, iterator: Any, is_complete: bool) -> None:
        epoch = iterator.__dict__[_NAME]
        if iterator in self._open:
            self._open.remove(iterator)
        if not epoch.ended:
            epoch.ended = True
            self._recorder.write("epoch_end", epoch=epoch.number, batches=epoch.batches, complete=is_complete)


class _Epoch:
    def __init__(self, number: int, loader: Any) -> None:
        self.number, self.loader = number, loader
        self.batches, self.ended = 0, False
        self.indices = deque[Any]()


def dataset_key(dataset: Any) -> str:
    """The name and the length of a dataset without the subsets around it: the same on all ranks and in all worlds."""
    root = _root(dataset)
    length = len(root) if hasattr(root, "__len__") and not isinstance(root, IterableDataset) else -1
    return f"{type(root).__name__}:{length}"


def resolve(dataset: Any, index: Any) -> list[int] | None:
    """Indices of a batch as those of the dataset without subsets around it; None if there are none."""
    if not isinstance(index, list):
        index = [index]
    if any(not hasattr(each, "__index__") for each in index):
        return None
    indices = [int(each) for each in index]
    while isinstance(dataset, Subset):
        indices = [int(dataset.indices[each]) for each in indices]
        dataset = dataset.dataset
    return indices


def _describe_loader(loader: Any) -> dict[str, Any]:
    dataset: Any = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    sampler = getattr(loader, "sampler", None)
    values: dict[str, Any] = {
        "dataset": dataset_key(dataset),
        "dataset_class": f"{type(_root(dataset)).__module__}.{type(_root(dataset)).__qualname__}",
        "length": len(dataset) if not is_iterable and hasattr(dataset, "__len__") else None,
        "iterable": is_iterable,
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "drop_last": bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)),
        "workers": loader.num_workers,
        "sampler": type(sampler).__name__,
        "batch_sampler": type(getattr(loader, "batch_sampler", None)).__name__,
        "replacement": bool(getattr(sampler, "replacement", False)),
        "steps": _length(loader) if not is_iterable else None,
        "samples": _length(sampler) if not is_iterable else None,
    }
    if isinstance(sampler, DistributedSampler):
        values["distributed"] = {
            "replicas": sampler.num_replicas, "rank": sampler.rank, "shuffle": sampler.shuffle, "seed": sampler.seed,
            "drop_last": sampler.drop_last, "site": sampler.__dict__.get(_NAME), "length": _length(sampler.dataset),
        }  # fmt: skip
    return values


def _settings(dataset: Any) -> dict[str, str]:
    """The numbers and texts that a dataset has as attributes, which may change from epoch to epoch."""
    root = _root(dataset)
    values = {**vars(type(root)), **getattr(root, "__dict__", {})}
    simple = [(name, value) for name, value in values.items() if isinstance(value, int | float | str)]
    return {name: str(value)[:_MAX_SETTING] for name, value in simple[:_MAX_SETTINGS] if not name.startswith("__")}


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _root(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
