"""A student with the architecture of its teacher and fewer layers, made of the teacher's configuration and file."""

import re
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from samestep.errors import TeacherError
from samestep.nn.distill import Projection
from samestep.teacher.weights import open_weights

Learns = Literal["features", "logits"]
_HEAD = 32  # the width of a narrow student's heads


class Student(nn.Module):
    """The model of a Hugging Face folder with fewer layers: as wide and begun from its file, or narrower from nothing.

    It learns `features`, a vector a sentence in the teacher's width, the mean over its tokens, or the `logits` of next
    words. As wide as the teacher (`width=None`) it begins with layers from all over the teacher's depth, and keeps its
    words as they are, of which few come up in training. Every rank builds it alike: from files, never from a live
    teacher, which not all ranks hold. There is no dropout in it.
    """

    def __init__(self, folder: str | Path, *, learns: Learns, layers: int, width: int | None = None) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.teacher_width, deep = int(config.hidden_size), int(config.num_hidden_layers)
        """What the teacher's vectors have as width."""
        _check(learns, layers, deep, width)
        config.update({"num_hidden_layers": layers, "use_cache": False})
        config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        if width is not None:
            heads = {"num_attention_heads": width // _HEAD, "num_key_value_heads": width // _HEAD, "head_dim": _HEAD}
            config.update({"hidden_size": width, "intermediate_size": 4 * width} | heads)
        causal = learns == "logits"
        kind, more = (AutoModelForCausalLM, {}) if causal else (AutoModel, {"add_pooling_layer": False})
        self.body: Any = kind.from_config(config, dtype=torch.float32, **more)
        self.widen = nn.Identity() if width is None or causal else Projection(width, self.teacher_width)
        if width is None:
            self._inherit(folder, [round(i * (deep - 1) / max(1, layers - 1)) for i in range(layers)])

    def blocks(self) -> tuple[type[nn.Module], ...]:
        """The class of its layers, for `run.wrap(student, checkpoint=student.blocks())`."""
        stacks = [part for part in self.modules() if isinstance(part, nn.ModuleList)]
        return (type(stacks[0][0]),)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Vectors of sentences (rows, the teacher's width), or logits of next words (rows, tokens, words)."""
        given = self.body(input_ids=tokens, attention_mask=mask)
        return given.logits if "logits" in given else self.widen(pooled(given.last_hidden_state, mask))

    def _inherit(self, folder: str | Path, chosen: list[int]) -> None:
        weights = open_weights(folder)
        known = set(weights.names())
        with torch.no_grad():
            for name, parameter in self.body.named_parameters():
                theirs = re.sub(r"(layers?\.)(\d+)", lambda found: f"{found[1]}{chosen[int(found[2])]}", name)
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
