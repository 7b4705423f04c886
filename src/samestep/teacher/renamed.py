"""What a model of transformers calls the tensors of a file that has other names for them: as from_pretrained does."""

import importlib
import re
from collections.abc import Callable, Collection, Sequence

from torch import nn


def called_by(module: nn.Module, own: Collection[str], names: Sequence[str]) -> dict[str, str]:
    """For names in a file those of the module, which has these of its own; none where it is not of transformers."""
    body = getattr(module, "base_model_prefix", None)
    return called_in(own, body, names, _spelling(module)) if body and isinstance(body, str) else {}


def called_in(
    own: Collection[str], body: str, names: Sequence[str], spelt: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """For names in a file those of a model whose body is called `body`, where the two differ.

    The file may hold the body alone, without the name that it has in a model with a head, or be of a model with a head
    where the module is the body; old ones say gamma and beta; and `spelt` tells what has been renamed since.

    >>> called_in({"bert.norm.weight", "head.weight"}, "bert", ["norm.gamma", "head.weight"])
    {'norm.gamma': 'bert.norm.weight'}
    """
    taken, called = set(names), dict[str, str]()
    for stored in names:
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", spelt(stored)))
        found = next((each for each in (name, f"{body}.{name}", name.removeprefix(f"{body}.")) if each in own), stored)
        if stored not in own and found not in taken:
            called[stored] = found
            taken.add(found)
    return called


def _spelling(module: nn.Module) -> Callable[[str], str]:
    """What transformers, from 5 on, calls a tensor that it has saved under the name of an earlier version.

    These are no public names of transformers: without them only what is said above is understood.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        changes = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
        renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    except (ImportError, AttributeError, TypeError):  # an earlier version, or no model of transformers after all
        return lambda name: name
    return lambda name: loading.rename_source_key(name, renamings, [])[0]
