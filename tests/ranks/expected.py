"""Warnings that a test's own setting brings and that are not its subject."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def batchnorm_of_one_rank() -> Iterator[None]:
    """Let BatchNorm see the rows of its own rank without that being an error; a test of its own has the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ BatchNorm layer\(s\)")
        yield
