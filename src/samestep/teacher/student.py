"""A student with the architecture of its teacher and fewer layers, built from the teacher's configuration and file."""

import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from samestep.errors import TeacherError
from samestep.nn.losses_and_metrics import Projection
from samestep.teacher.model_files import match_names, open_weights

Target = Literal["features", "logits"]
_HEAD_WIDTH: Final = 32  # of a narrow student
_MLP_WIDTHS: Final = ("intermediate_size", "n_inner", "hidden_dim", "ffn_dim")  # its names in configurations


class Student(nn.Module):
    """The model of a Hugging Face folder with fewer layers: of the same width with its weights, or narrower without.

    It learns `features`, one vector per sentence in the teacher's width (the mean over its tokens), or the `logits` of
    the next token. With the teacher's width (`width=None`) it starts with layers from all over the teacher's depth and
    keeps the token embeddings frozen, because training uses few of them. Every rank builds the same student from files,
    never from a live teacher, which not all ranks hold. It has no dropout. The teacher must be an encoder or a decoder
    with one stack of layers, such as BERT, GPT-2 or Llama.
    """

    def __init__(self, folder: str | Path, *, learns: Target, layers: int, width: int | None = None) -> None:
        super().__init__()
        from transformers import AutoConfig

        folder = Path(folder).expanduser()
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_config(folder, config)
        self.teacher_width, depth = int(config.hidden_size), int(config.num_hidden_layers)
        """The width of the teacher's vectors."""
        _check_arguments(learns, layers, depth, width)
        chosen = [round(number * (depth - 1) / max(1, layers - 1)) for number in range(layers)]
        _shrink_config(config, chosen, width)
        self.body: Any = _build_body(folder, config, causal=learns == "logits")
        self.widen = nn.Identity() if width is None or learns == "logits" else Projection(width, self.teacher_width)
        if width is None:
            self._load_teacher_layers(folder, chosen)

    def blocks(self) -> tuple[type[nn.Module], ...]:
        """Return the class of its layers, for `run.wrap(student, activation_checkpointing=student.blocks())`."""
        return (type(self.body.get_submodule(f"{self._stack()}.0")),)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return sentence vectors (rows, teacher's width), or next-token logits (rows, tokens, vocabulary)."""
        outputs = self.body(input_ids=tokens, attention_mask=mask)
        return outputs.logits if "logits" in outputs else self.widen(mean_pool(outputs.last_hidden_state, mask))

    def _stack(self) -> str:
        """Return the name of the list of its layers."""
        config = self.body.config
        lists = list(_layer_lists(self.body, ""))
        layers = int(config.num_hidden_layers)
        stacks = [name for name, members in lists if len(members) == layers]
        if len(stacks) != 1:
            found = ", ".join(f"{name} of {len(members)}" for name, members in lists) or "none"
            reason = f"its layers must be one list of {layers}, but its lists are {found}"
            raise _unsupported(config.name_or_path, config, reason)
        return stacks[0]

    def _load_teacher_layers(self, folder: str | Path, chosen: list[int]) -> None:
        weights, stack = open_weights(folder), self._stack()
        teacher_names = {name: _teacher_name(name, stack, chosen) for name, _ in self.body.named_parameters()}
        wanted = set(teacher_names.values())
        weights = weights.renamed(match_names(wanted, self.body.base_model_prefix, weights.names()))
        stored = set(weights.names())
        with torch.no_grad():
            for name, parameter in self.body.named_parameters():
                if teacher_names[name] not in stored:
                    raise TeacherError(
                        f"{folder} does not hold {teacher_names[name]}, which a {type(self.body).__name__} student "
                        "starts with: pass width= a number for a student that starts from random weights"
                    )
                parameter.copy_(weights.tensor(teacher_names[name]))
        self.body.get_input_embeddings().requires_grad_(False)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return one vector per sentence, (rows, width): the mean in fp32 over the tokens that `mask` selects."""
    return (hidden.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Timed:
    """Calls a function and adds up the seconds until its results are computed.

    >>> timed = Timed(torch.square)
    >>> timed(torch.tensor(3.0)), timed.seconds > 0
    (tensor(9.), True)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds = 0.0
        """The time of all calls together."""

    def __call__(self, *batch: torch.Tensor) -> Any:
        """Call the function and wait until the GPU has computed its result."""
        start = time.perf_counter()
        result = self.function(*batch)
        if any(tensor.is_cuda for tensor in batch):
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return result


def _check_arguments(learns: str, layers: int, depth: int, width: int | None) -> None:
    if learns not in get_args(Target):
        raise TeacherError(f"Student got learns={learns!r}: use one of {', '.join(get_args(Target))}")
    if not 1 <= layers <= depth:
        raise TeacherError(f"Student got layers={layers} for a teacher with {depth} layers: pass 1 to {depth}")
    if width is not None and (width < _HEAD_WIDTH or width % _HEAD_WIDTH):
        raise TeacherError(
            f"Student got width={width}: pass a multiple of {_HEAD_WIDTH}, or None for the teacher's width"
        )


def _check_config(folder: str | Path, config: Any) -> None:
    if config.is_encoder_decoder:
        raise _unsupported(folder, config, "it has an encoder and a decoder, but a student has one stack of layers")
    for name in ("hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise _unsupported(folder, config, f"its configuration has no {name}")


def _unsupported(folder: str | Path, config: Any, reason: str) -> TeacherError:
    return TeacherError(
        f"cannot make a student of {folder}, a {config.model_type!r} model: {reason}; pass the folder of an encoder or "
        "a decoder such as BERT, GPT-2 or Llama, or build the student yourself: it can be any module"
    )


def _shrink_config(config: Any, chosen: list[int], width: int | None) -> None:
    """Change a configuration to that of a student: with the chosen layers, of this width, without dropout."""
    config.update({"num_hidden_layers": len(chosen), "use_cache": False})
    if layer_types := getattr(config, "layer_types", None):
        config.update({"layer_types": [layer_types[number] for number in chosen]})
    # The names of dropout rates differ: hidden_dropout_prob, resid_pdrop, layerdrop.
    dropouts = [name for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)]
    config.update(dict.fromkeys(dropouts, 0.0))
    if width is not None:
        count = width // _HEAD_WIDTH
        heads = {"num_attention_heads": count, "num_key_value_heads": count, "head_dim": _HEAD_WIDTH}
        mlp = {name: 4 * width for name in _MLP_WIDTHS if hasattr(config, name)}
        config.update({"hidden_size": width} | mlp | heads)


def _build_body(folder: str | Path, config: Any, causal: bool) -> Any:
    """Build the transformers model in fp32, without dropout and pooling layer."""
    import transformers

    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING if causal else transformers.MODEL_MAPPING
    auto: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    if type(config) not in classes:
        reason = f"{auto.__name__} of transformers {transformers.__version__} does not support it"
        raise _unsupported(folder, config, reason)
    found = classes[type(config)]
    parameters = inspect.signature(found[0] if isinstance(found, tuple) else found).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}  # its output would be unused
    body = auto.from_config(config, dtype=torch.float32, **options)
    for part in body.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # some are not in the configuration
    return body


def _layer_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of layers, with their names."""
    for leaf, child in module.named_children():
        name = f"{path}.{leaf}" if path else leaf
        if isinstance(child, nn.ModuleList):
            yield name, child
        else:
            yield from _layer_lists(child, name)


def _teacher_name(name: str, stack: str, chosen: list[int]) -> str:
    """Return the teacher's name of a parameter of the student."""
    if not name.startswith(f"{stack}."):
        return name
    number, _, rest = name.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{chosen[int(number)]}.{rest}"
