"""How busy a GPU is, as its driver measures it: asked in a thread, so that training never waits for the driver."""

import ctypes
import math
import threading
from typing import Any, Final

_LIBRARY: Final = "libnvidia-ml.so.1"  # NVML: part of NVIDIA's driver, so no package is needed
_SECONDS: Final = 1.0  # between two questions; NVML itself averages over up to a second


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUtilization:
    """The share of time in which kernels ran on one GPU, in percent; NaN where the driver does not say."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self.percent = math.nan
        self._closed = threading.Event()
        try:
            nvml = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError:  # an AMD GPU, or a container without this part of the driver
            return
        threading.Thread(target=self._poll, args=(nvml, uuid), name="samestep gpu", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _poll(self, nvml: Any, uuid: str) -> None:
        handle, found = ctypes.c_void_p(), _Utilization()
        name = uuid.encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(
            name, ctypes.byref(handle)
        ):  # both return 0 for success
            return
        while not self._closed.wait(_SECONDS):
            failed = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found))
            self.percent = math.nan if failed else float(found.gpu)
