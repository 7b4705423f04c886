"""Which sample, where, with which luck."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.data.hdf5 import HDF5Dataset

__all__ = ["HDF5Dataset"]


def __getattr__(name: str) -> object:
    """Import HDF5Dataset when it is asked for: h5py comes with an extra."""
    if name != "HDF5Dataset":
        raise AttributeError(f"module 'samestep.data' has no attribute {name!r}")
    from samestep.data.hdf5 import HDF5Dataset

    return HDF5Dataset
