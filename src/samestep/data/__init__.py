"""From a dataset to micro-batches: sample order, partition into global steps, loading, per-sample RNG, ledger."""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first access: h5py and Pillow come with extras, and torch takes seconds.
_MODULES = {
    "HDF5Dataset": "samestep.data.hdf5",
    "ImageFiles": "samestep.data.image_datasets",
    "LabeledImages": "samestep.data.image_datasets",
    "convert_pysaliency": "samestep.data.image_datasets",
    "crop_square": "samestep.data.image_datasets",
    "read_images": "samestep.data.image_datasets",
}

if TYPE_CHECKING:
    from samestep.data.hdf5 import HDF5Dataset
    from samestep.data.image_datasets import ImageFiles, LabeledImages, convert_pysaliency, crop_square, read_images

__all__ = ["HDF5Dataset", "ImageFiles", "LabeledImages", "convert_pysaliency", "crop_square", "read_images"]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'samestep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
