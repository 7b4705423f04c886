"""Probes and descriptions of the data: whether all ranks and all starts of a run read the same samples.

A few samples of a dataset, or the first records of a stream, are reduced to a `Probe`: a checksum of what must be equal
(types, shapes, integers, strings) and two numbers that summarize all floating-point values. Ranks on different CPUs may
round differently, so these two are compared with a tolerance. Ranks compare their probes once, before the first step.
The ledger keeps them, and the audit compares them across ranks and starts.

shard.json describes a shard next to its records. summary.json and checkpoints describe how far the files are written.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from samestep.data.permutation import Purpose, key64, keyed_word, keyed_words
from samestep.errors import DataError

FIRST_RECORDS: Final = 4
"""Records of a stream that are compared."""

_KEYED_SAMPLES: Final = 4  # besides the first and the last
_TOLERANCE: Final = 0.01  # of a sketch: other data changes it by about 1, rounding to float16 by less than 0.007
_COARSE_WEIGHT: Final = (
    0.15  # of values with fewer bits than float16: rounding to bfloat16 changes theirs by up to 0.055
)
_MAX_VALUES: Final = 1 << 16  # floating-point values of an array that are summarized
_MAX_LEAVES: Final = 10_000  # values of a record that are read
_PREVIEW: Final = 60  # characters


@dataclass(frozen=True)
class Probe:
    """The content of one sample, reduced to what fits into a record of the ledger."""

    epoch: int
    index: int  # the dataset index, or the position in a stream
    checksum: int  # 32 bits
    sketch: tuple[float, float]  # of all floating-point values, in the precision of float32
    preview: str = ""
    """The beginning of the content, for messages."""

    def equals(self, other: "Probe") -> bool:
        """Return whether both are the same content, up to rounding of floating-point numbers."""
        close = (abs(a - b) <= _TOLERANCE for a, b in zip(self.sketch, other.sketch, strict=True))
        return self.checksum == other.checksum and all(close)


def probe_indices(n: int, seed: int) -> list[int]:
    """Return the samples to compare: the first, the last and some in between, the same on any number of ranks."""
    key = key64(Purpose.PROBE_INDICES, seed, n)
    return list(dict.fromkeys([0, n - 1, *(keyed_word(key, k) % n for k in range(_KEYED_SAMPLES))]))


def make_probe(epoch: int, index: int, record: object) -> Probe:
    """Reduce a sample to its probe. Objects of unknown classes count with the name of their class only."""
    content = _Content()
    try:
        content.add(record)
    except Exception as error:  # noqa: BLE001 a class of the user that fails here still trains: compare what is known
        content.preview.append(f"a {type(record).__name__} ({type(error).__name__})")
    sketch = float(np.float32(content.sketch[0])), float(np.float32(content.sketch[1]))
    text = ", ".join(content.preview)
    preview = text if len(text) <= _PREVIEW else text[: _PREVIEW - 3] + "..."
    return Probe(epoch, index, int.from_bytes(content.hash.digest(), "little"), sketch, preview)


def failed_probe(epoch: int, index: int, error: Exception) -> Probe:
    """Return the probe of a sample that cannot be read; it differs from that of a rank that can read it."""
    return dataclasses.replace(make_probe(epoch, index, type(error).__name__), preview=f"an error ({error})")


class _Content:
    """Adds up the values of a record."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=4)
        self.sketch = np.zeros(2)
        self.preview: list[str] = []
        self._leaves = 0

    def add(self, value: Any) -> None:
        """Add a value and what is in it."""
        self._leaves += 1
        if self._leaves > _MAX_LEAVES:
            return
        torch = sys.modules.get("torch")  # not imported here: the audit starts without it, and has no tensors
        if torch is not None and isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, Mapping):
            self._add_parts("mapping", [part for item in value.items() for part in item])
        elif isinstance(value, list | tuple):
            self._add_parts("sequence", value)
        elif isinstance(value, set | frozenset):
            # Their order depends on Python's hash seed, which differs between processes.
            self._add_parts("set", sorted(make_probe(0, 0, item).checksum for item in value))
        elif isinstance(value, np.ndarray | np.generic | float) or hasattr(value, "__array_interface__"):
            self._add_array(np.asarray(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            self._add_parts(type(value).__name__, [getattr(value, name, None) for name in names])
        elif isinstance(value, str | bytes | int | complex | None):
            self._add_exact(repr(value).encode(), repr(value))
        else:
            self._add_exact(type(value).__qualname__.encode(), f"a {type(value).__name__}")

    def _add_parts(self, kind: str, parts: Sequence[object]) -> None:
        self.hash.update(f"{kind} {len(parts)}".encode())
        for part in parts:
            self.add(part)

    def _add_exact(self, data: bytes, preview: str) -> None:
        self.hash.update(data + b"\0")
        if len(self.preview) < _PREVIEW:
            self.preview.append(preview)

    def _add_tensor(self, tensor: Any) -> None:
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_meta:
            self._add_exact(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), f"{tensor.dtype} {tuple(tensor.shape)}")
            return
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        self.hash.update(str(tensor.dtype).encode())
        if tensor.is_floating_point():
            coarse = sys.modules["torch"].finfo(tensor.dtype).eps > np.finfo(np.float16).eps
            self._add_array(tensor.double().numpy(), _COARSE_WEIGHT if coarse else 1.0)
        else:
            self._add_array(tensor.numpy())

    def _add_array(self, array: npt.NDArray[Any], weight: float = 1.0) -> None:
        shown = np.array2string(array.reshape(-1)[:3], precision=4, separator=", ", threshold=3)[1:-1]
        more = "" if array.size <= 3 else f", ... of shape {array.shape}"
        if array.dtype.kind in "fc":
            self._add_exact(f"{array.dtype} {array.shape}".encode(), f"{shown}{more}")
            self._add_floats(array.reshape(-1), weight)
        elif array.dtype.kind == "O":
            self._add_parts("objects", array.reshape(-1).tolist())
        else:
            self._add_exact(f"{array.dtype} {array.shape}".encode() + array.tobytes(), f"{shown}{more}")

    def _add_floats(self, values: npt.NDArray[Any], weight: float) -> None:
        """Add two random projections of the values, which small changes of them hardly change."""
        values = values[:: -(-values.size // _MAX_VALUES) or 1]
        values = values.astype(np.complex128).view(np.float64) if values.dtype.kind == "c" else values
        values = np.nan_to_num(values.astype(np.float64), nan=-1.0, posinf=1e300, neginf=-1e300)
        scale = float(np.abs(values).max()) if values.size else 0.0
        if not scale:
            return
        norm = scale * math.sqrt(float(np.square(values / scale).mean()))
        words = keyed_words(key64(Purpose.PROBE_SIGNS, self._leaves), np.arange(values.size))
        for number in range(2):
            signs = ((words >> np.uint64(number)) & np.uint64(1)).astype(np.float64) * 2 - 1
            self.sketch[number] += weight * float((values / norm) @ signs) / math.sqrt(values.size)
        self.sketch[1] += (
            weight * math.log(norm) * (1 + keyed_word(Purpose.PROBE_SIGNS, self._leaves) % 7)
        )  # the scale of this array


def check_same_samples(dataset: object, by_rank: Sequence[Sequence[Probe]], remedy: str = "run.shard does") -> None:
    """Raise `DataError` on every rank if ranks read different samples at the same indices."""
    if (found := _first_difference(by_rank)) is not None:
        rank, own, other, count = found
        raise DataError(
            f"{type(dataset).__name__} differs between ranks: sample {own.index} is {own.preview} on rank 0 and "
            f"{other.preview} on rank {rank} ({count} of {len(by_rank[0])} compared samples differ). Build the dataset "
            "in the same way on every rank: sort the files that it lists, seed what it draws when it is built (inside "
            "`with Run(...)` all ranks have the same seed), draw in __getitem__ only from global generators or "
            f"sample_rng(), and do not select samples by rank, since {remedy} that"
        )


def check_same_records(dataset: object, by_rank: Sequence[Sequence[Probe]]) -> None:
    """Raise `DataError` on every rank if the streams of ranks begin with different records."""
    found = _first_difference(by_rank)
    counts = [len(probes) for probes in by_rank]
    if found is None and len(set(counts)) == 1:
        return
    if found is not None:
        rank, own, other, _ = found
        what = f"record {own.index} is {own.preview} on rank 0 and {other.preview} on rank {rank}"
    else:
        listed = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts[:8]))
        what = f"the first {max(counts)} records are not there on every rank: {listed}"
    raise DataError(
        f"the stream {type(dataset).__name__} differs between ranks: {what}. Yield all records in the same order on "
        "every rank. Do not split the stream by rank (no data[rank::world_size], no split_dataset_by_node) and do not "
        "seed its shuffle with the rank or the clock: run.stream selects the records of each rank"
    )


def check_same_workers(dataset: object, first: Sequence[Probe], other: Sequence[Probe]) -> None:
    """Raise `DataError` if the streams of two data workers begin with different records."""
    if (found := _first_difference([first, other])) is not None:
        _, own, differing, _ = found
        raise DataError(
            f"the stream {type(dataset).__name__} differs between data workers of this rank: record {own.index} is "
            f"{own.preview} in one and {differing.preview} in another. Yield all records in the same order in every "
            "process: do not seed its shuffle with the clock or the process, and shuffle by set_epoch(epoch)"
        )


def _first_difference(by_rank: Sequence[Sequence[Probe]]) -> tuple[int, Probe, Probe, int] | None:
    """Return a rank that differs from rank 0, the two probes, and how many probes of these ranks differ."""
    for rank, probes in enumerate(by_rank):
        pairs = [(own, other) for own, other in zip(by_rank[0], probes, strict=False) if not own.equals(other)]
        if pairs:
            return rank, *pairs[0], len(pairs)
    return None


def check_same_options(call: str, by_rank: Sequence[Mapping[str, object]]) -> None:
    """Raise `DataError` on every rank if ranks passed different options."""
    for rank, options in enumerate(by_rank):
        for name, value in by_rank[0].items():
            if options.get(name) != value:
                raise DataError(
                    f"{call} has {name}={value} on rank 0 and {name}={options.get(name)} on rank {rank}, so the ranks "
                    "would not train the same steps: pass the same arguments on every rank"
                )


def hash_values(values: npt.NDArray[Any] | None) -> str | None:
    """Return a short hash of an array, such as sampling weights, for a comparison of options."""
    return None if values is None else hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()
