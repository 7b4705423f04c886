"""Which sample, where, with which luck."""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported when first asked for: h5py and Pillow come with extras, and torch costs seconds.
_HOMES = {
    "HDF5Dataset": "samestep.data.hdf5",
    "ImageFiles": "samestep.data.image_datasets",
    "LabelledImages": "samestep.data.image_datasets",
    "cut_square": "samestep.data.image_datasets",
    "pair_fixations": "samestep.data.image_datasets",
    "read_images": "samestep.data.image_datasets",
}

if TYPE_CHECKING:
    from samestep.data.hdf5 import HDF5Dataset
    from samestep.data.image_datasets import ImageFiles, LabelledImages, cut_square, pair_fixations, read_images

__all__ = ["HDF5Dataset", "ImageFiles", "LabelledImages", "cut_square", "pair_fixations", "read_images"]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
