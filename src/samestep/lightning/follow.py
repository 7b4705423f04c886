"""A hook of the user's module with something of ours after it, for as long as a Trainer runs."""

from collections.abc import Callable
from functools import wraps

from lightning.pytorch import LightningModule


def follow(module: LightningModule, hook: str, after: Callable[..., None]) -> Callable[[], None]:
    """Call `after` with the arguments of `hook` when the module's own is done; what is returned undoes it.

    A callback's hooks come before the module's, so a callback alone never sees what the module logs in its own. Only
    this one object is changed, not its class.
    """
    own, kept = getattr(module, hook), vars(module).get(hook)

    @wraps(own)  # Lightning reads the signature, and whether the hook is overridden
    def _both(*args: object) -> object:
        value = own(*args)
        after(*args)
        return value

    def _undo() -> None:
        if kept is None:
            delattr(module, hook)
        else:
            setattr(module, hook, kept)

    setattr(module, hook, _both)
    return _undo
