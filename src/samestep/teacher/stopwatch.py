"""The first calls of a teacher, measured beside what was estimated for them."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

import torch

from samestep.teacher.ground import Placed
from samestep.teacher.needs import rows_of
from samestep.units import seconds_text

_WARM_UP: Final = 1  # the first call loads kernels and touches memory
_TIMED: Final = 3


class Stopwatch:
    """Times calls 2 to 4 of a teacher and says once how far the estimate was off; later calls pass through.

    Each rank times its own, the first one says it. A timed call waits for its device before and after.
    """

    def __init__(self, device: torch.device, estimate: Callable[[int], float], say: Callable[[str], None]) -> None:
        self._device, self._estimate, self._say = device, estimate, say
        self._seen: list[tuple[float, int]] = []
        self.found: dict[str, float] = {}
        """Rows, measured and estimated seconds of the call in the middle; empty until it is known."""

    def call(self, placed: Placed, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The outputs of a call, timed while that is of use."""
        if self.found:
            return placed(*args, **kwargs)
        self._wait()
        began = perf_counter()
        outputs = placed(*args, **kwargs)
        self._wait()
        self._seen.append((perf_counter() - began, rows_of((args, dict(kwargs)))))
        if len(self._seen) == _WARM_UP + _TIMED:
            self._tell()
        return outputs

    def _tell(self) -> None:
        seconds, rows = sorted(self._seen[_WARM_UP:])[_TIMED // 2]
        estimated = self._estimate(rows)
        self.found = {"rows": rows, "measured_seconds": seconds, "estimated_seconds": estimated}
        times = seconds / estimated if estimated else float("inf")
        off = f"{times:.3g} times as long" if times >= 1 else f"{1 / times:.3g} times as quick"
        self._say(
            f"teacher: a call with {rows} sample(s) takes {seconds_text(seconds)}, {off} as the estimate of "
            f"{seconds_text(estimated)}"
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
