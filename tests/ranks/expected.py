"""Warnings that tests expect although they are not about them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignore_batchnorm_warning() -> Iterator[None]:
    """Ignore the warning that BatchNorm uses the rows of one rank; another test checks the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ BatchNorm layer\(s\)")
        yield
