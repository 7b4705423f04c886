"""A stream read whole inside a DataLoader worker, although the dataset would split itself there.

Many iterable datasets ask torch's `get_worker_info()` and yield only a part of themselves in each worker, as torch's
own pages advise. `StreamCut` gives every worker whole steps of the whole stream; with both splits at work samples would
be lost. torch has no public way to read a dataset as if there were no workers.
"""

from collections.abc import Generator
from contextlib import contextmanager

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.errors import DataError


@contextmanager
def unsplit() -> Generator[None]:
    """While the block lasts, `get_worker_info()` says that this is no worker."""
    info = get_worker_info()
    if info is None:
        yield
        return
    torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage]  # see the module's docstring
    try:
        if get_worker_info() is not None:
            raise DataError(
                "this version of torch does not let a stream be read whole in a worker, and one that splits itself "
                "over workers would lose samples: read it with workers=0"
            )
        yield
    finally:
        torch_worker._worker_info = info  # pyright: ignore[reportPrivateUsage]
