"""From a dataset to micro-batches: sample order, partition into global steps, loading, per-sample RNG, ledger."""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first access: h5py and Pillow come with extras, and torch takes seconds.
if TYPE_CHECKING:
    from samestep.data.file_datasets import (
        HDF5Dataset,
        ImageFiles,
        LabeledImages,
        convert_pysaliency,
        crop_square,
        read_images,
    )

__all__ = ["HDF5Dataset", "ImageFiles", "LabeledImages", "convert_pysaliency", "crop_square", "read_images"]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'samestep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("samestep.data.file_datasets"), name)
