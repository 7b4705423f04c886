"""A student with the architecture of its teacher and fewer layers, made of the teacher's configuration and file."""

import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from samestep.errors import TeacherError
from samestep.nn.distillation import Projection
from samestep.teacher.frozen_model import called_in
from samestep.teacher.weight_files import open_weights


class Timed:
    """Calls a function and adds up the seconds until what it gives is there.

    >>> timed = Timed(torch.square)
    >>> timed(torch.tensor(3.0)), timed.seconds > 0
    (tensor(9.), True)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        """What is called."""
        self.seconds = 0.0
        """How long all calls took together."""

    def __call__(self, *batch: torch.Tensor) -> Any:
        """What the function gives; on a GPU once it has been computed."""
        began = time.perf_counter()
        given = self.function(*batch)
        if any(tensor.is_cuda for tensor in batch):
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        return given


Learns = Literal["features", "logits"]
_HEAD = 32  # the width of a narrow student's heads
_INNER = ("intermediate_size", "n_inner", "hidden_dim", "ffn_dim")  # what configurations call the width inside a layer


class Student(nn.Module):
    """The model of a Hugging Face folder with fewer layers: as wide and begun from its file, or narrower from nothing.

    It learns `features`, a vector a sentence in the teacher's width, the mean over its tokens, or the `logits` of next
    words. As wide as the teacher (`width=None`) it begins with layers from all over the teacher's depth, and keeps its
    words as they are, of which few come up in training. Every rank builds it alike: from files, never from a live
    teacher, which not all ranks hold. There is no dropout in it. The teacher is an encoder or a decoder of one stack of
    layers, as BERT, GPT-2 and Llama are.
    """

    def __init__(self, folder: str | Path, *, learns: Learns, layers: int, width: int | None = None) -> None:
        super().__init__()
        from transformers import AutoConfig

        folder = Path(folder).expanduser()
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_config(folder, config)
        self.teacher_width, deep = int(config.hidden_size), int(config.num_hidden_layers)
        """What the teacher's vectors have as width."""
        _check(learns, layers, deep, width)
        chosen = [round(i * (deep - 1) / max(1, layers - 1)) for i in range(layers)]
        _shrink(config, chosen, width)
        self.body: Any = _body(folder, config, causal=learns == "logits")
        self.widen = nn.Identity() if width is None or learns == "logits" else Projection(width, self.teacher_width)
        if width is None:
            self._inherit(folder, chosen)

    def blocks(self) -> tuple[type[nn.Module], ...]:
        """The class of its layers, for `run.wrap(student, checkpoint=student.blocks())`."""
        return (type(self.body.get_submodule(f"{self._stack()}.0")),)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Vectors of sentences (rows, the teacher's width), or logits of next words (rows, tokens, words)."""
        given = self.body(input_ids=tokens, attention_mask=mask)
        return given.logits if "logits" in given else self.widen(pooled(given.last_hidden_state, mask))

    def _stack(self) -> str:
        """The name of the list of its layers, whatever its architecture calls it."""
        found = list(_lists(self.body, ""))
        layers = int(self.body.config.num_hidden_layers)
        stacks = [name for name, members in found if len(members) == layers]
        if len(stacks) != 1:
            told = ", ".join(f"{name} of {len(members)}" for name, members in found) or "none at all"
            why = f"its layers should be one list of {layers}, and its lists are {told}"
            raise _strange(self.body.config.name_or_path, self.body.config, why)
        return stacks[0]

    def _inherit(self, folder: str | Path, chosen: list[int]) -> None:
        weights, stack = open_weights(folder), self._stack()
        theirs_of = {name: _renumbered(name, stack, chosen) for name, _ in self.body.named_parameters()}
        called = called_in(set(theirs_of.values()), self.body.base_model_prefix, weights.names())
        weights = weights.renamed(called)
        known = set(weights.names())
        with torch.no_grad():
            for name, parameter in self.body.named_parameters():
                theirs = theirs_of[name]
                if theirs not in known:
                    raise TeacherError(
                        f"{folder} holds no {theirs}, with which a student of {type(self.body).__name__} would begin: "
                        "give width= a number for one that begins from nothing"
                    )
                parameter.copy_(weights.tensor(theirs))
        self.body.get_input_embeddings().requires_grad_(False)


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """One vector a sentence, (rows, width): the mean over its tokens, those that `mask` has, in fp32."""
    return (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _check(learns: str, layers: int, deep: int, width: int | None) -> None:
    if learns not in get_args(Learns):
        raise TeacherError(f"a student does not know learns={learns!r}: use one of {', '.join(get_args(Learns))}")
    if not 1 <= layers <= deep:
        raise TeacherError(f"a student of {layers} layer(s) of a teacher that has {deep}: give layers from 1 to {deep}")
    if width is not None and (width < _HEAD or width % _HEAD):
        raise TeacherError(f"a student of width {width}: give a multiple of {_HEAD}, or None for the teacher's own")


def _check_config(folder: str | Path, config: Any) -> None:
    if config.is_encoder_decoder:
        raise _strange(folder, config, "it has an encoder and a decoder, and a student has one stack of layers")
    for name in ("hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise _strange(folder, config, f"its configuration has no {name}")


def _shrink(config: Any, chosen: list[int], width: int | None) -> None:
    """Let a configuration be that of a student: with the chosen layers, of this width, without dropout."""
    config.update({"num_hidden_layers": len(chosen), "use_cache": False})
    if kinds := getattr(config, "layer_types", None):
        config.update({"layer_types": [kinds[at] for at in chosen]})
    drops = [name for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)]
    config.update(dict.fromkeys(drops, 0.0))  # the names differ: hidden_dropout_prob, resid_pdrop, layerdrop
    if width is not None:
        heads = {"num_attention_heads": width // _HEAD, "num_key_value_heads": width // _HEAD, "head_dim": _HEAD}
        inner = {name: 4 * width for name in _INNER if hasattr(config, name)}
        config.update({"hidden_size": width} | inner | heads)


def _body(folder: str | Path, config: Any, causal: bool) -> Any:
    """The model itself, in fp32."""
    import transformers

    kinds: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING if causal else transformers.MODEL_MAPPING
    auto: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    if type(config) not in kinds:
        raise _strange(folder, config, f"{auto.__name__} of transformers {transformers.__version__} knows none such")
    kind = kinds[type(config)]
    taken = inspect.signature(kind[0] if isinstance(kind, tuple) else kind).parameters
    pools = "add_pooling_layer" in taken  # what it makes would go unused
    body = auto.from_config(config, dtype=torch.float32, **({"add_pooling_layer": False} if pools else {}))
    for part in body.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # what no configuration has a name for
    return body


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of layers, by name."""
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if isinstance(child, nn.ModuleList):
            yield path, child
        else:
            yield from _lists(child, path)


def _renumbered(name: str, stack: str, chosen: list[int]) -> str:
    """What a parameter of the student is called in its teacher."""
    if not name.startswith(f"{stack}."):
        return name
    number, _, rest = name.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{chosen[int(number)]}.{rest}"


def _strange(folder: str | Path, config: Any, why: str) -> TeacherError:
    return TeacherError(
        f"no student can be made of {folder}, a {config.model_type!r}: {why}; give the folder of an encoder or a "
        "decoder such as BERT, GPT-2 or Llama, or build the student yourself, which any module can be"
    )
