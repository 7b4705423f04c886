"""The moments of a step that can be its worst: two traces of different micro-batches joined into lines."""

from collections.abc import Iterator, Sequence

from samestep.facts.model import Moment, Peak
from samestep.measure.tracker import Notes

_SHARDS = (1, 2, 3, 4, 8, 16, 64, 1024)


def peak_of(small: Notes, large: Notes, sizes: tuple[int, int], standing: int, gradients: int, extra: Moment) -> Peak:
    """Join what was noted with two micro-batches of `sizes` samples.

    `standing` are the bytes of weights and optimizer state, `gradients` those of all gradients; `extra` is added to
    every moment.
    """
    if small.names == large.names:
        at = list(zip(range(len(small.names)), range(len(large.names)), strict=True))
    else:  # what runs depends on the micro-batch: the two peaks alone can be joined
        at = [(_highest(small), _highest(large))]
    moments = [_line(sizes, small, large, a, b, standing, extra) for a, b in at]
    return Peak(tuple(_worst(moments)), gradients)


def _highest(notes: Notes) -> int:
    return max(range(len(notes.used)), key=notes.used.__getitem__)


def _line(sizes: tuple[int, int], small: Notes, large: Notes, a: int, b: int, standing: int, extra: Moment) -> Moment:
    """The line through two moments; what rounding swallows of small tensors still grows with the micro-batch."""
    rounded, exact = large.used[b] - small.used[a], large.exact[b] - small.exact[a]
    per_sample = -(-max(rounded, exact) // (sizes[1] - sizes[0]))
    fixed = large.used[b] - large.gradients[b] - per_sample * sizes[1] - standing
    return Moment(fixed + extra.fixed, per_sample + extra.per_sample, large.gradients[b])


def _worst(moments: Sequence[Moment]) -> list[Moment]:
    """Those that are the worst for some micro-batch, with gradients whole, in shards, or standing all the time."""
    kept: dict[Moment, None] = {}
    for shards in (*_SHARDS, 0):
        kept.update(dict.fromkeys(_upper(moments, shards)))
    return list(kept)


def _upper(moments: Sequence[Moment], shards: int) -> Iterator[Moment]:
    """The upper envelope of the lines, from the micro-batch of one sample on."""

    def height(moment: Moment, samples: float) -> float:
        """Bytes at so many samples."""
        return moment.fixed + moment.per_sample * samples + (moment.gradients / shards if shards else 0)

    current, samples = max(moments, key=lambda m: (height(m, 1), m.per_sample)), 1.0
    while True:
        yield current
        steeper = [m for m in moments if m.per_sample > current.per_sample]
        if not steeper:
            return
        meets = [(height(current, 0) - height(m, 0)) / (m.per_sample - current.per_sample) for m in steeper]
        samples = min(meets)
        current = max((m for m, at in zip(steeper, meets, strict=True) if at == samples), key=lambda m: m.per_sample)
