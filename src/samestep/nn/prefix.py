"""A frozen causal language model after soft tokens and a deep prefix: what it sees, and what it loses by token."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.errors import SamestepError
from samestep.nn.tokens import next_token_losses


def prefix_shape(config: Any) -> tuple[int, int, int, int]:
    """What one token leaves in a language model: layers, two (key and value), heads of these, and a head's width.

    It comes from the configuration of transformers, so that every rank builds the same generator of prefixes.
    """
    missing = [
        name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(config, name)
    ]
    if missing:
        raise SamestepError(
            f"prefix_shape got a {type(config).__name__} without {', '.join(missing)}: give the configuration of a "
            "causal language model, AutoConfig.from_pretrained(folder)"
        )
    heads, each = config.num_attention_heads, getattr(config, "head_dim", None)
    kept = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, 2, kept, each or config.hidden_size // heads


def embedded(lm: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a language model sees of tokens (rows, length), in fp32, and which of them are there: -1 stands for none."""
    return lm.get_input_embeddings()(tokens.clamp(min=0)).float(), tokens >= 0


def losses_after(lm: Any, tokens: Tensor, before: Tensor, seen: Tensor, deep: Iterable[Tensor] = ()) -> Tensor:
    """The loss of every next token (rows, length - 1), for `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    The model stands after `before`, soft tokens (rows, places, width) of which `seen` says which count, and after a
    `deep` prefix: for every layer keys and values (2, rows, heads, places, width of a head). Gradients pass through
    the model to both; a placement of `run.teacher` that has a `module` gives such a model.
    """
    from transformers import DynamicCache

    text, there = embedded(lm, tokens)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(deep):
        cache.update(keys.to(lm.dtype), values.to(lm.dtype), layer)
    past = cache.get_seq_length()
    mask = torch.cat([there.new_ones(len(there), past), seen, there], dim=1)
    places = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
    given = {"inputs_embeds": torch.cat([before, text], dim=1).to(lm.dtype), "past_key_values": cache}
    said = lm(**given, attention_mask=mask.long(), position_ids=places, logits_to_keep=tokens.shape[1])
    return next_token_losses(said.logits, tokens)
