"""Next-token losses of causal language models, also behind soft tokens and key-value prefixes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from samestep.errors import SamestepError, StepError


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """The cross entropy of every token but the first: (rows, length - 1), in fp32.

    `logits` are (rows, length, vocabulary) for the `tokens` (rows, length) themselves, not shifted. Padding is -1; its
    losses are meaningless, so exclude them with `step.mean(losses, mask=tokens[:, 1:] >= 0)`.

    >>> import torch
    >>> next_token_losses(torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 4])
    """
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise StepError(
            f"next_token_losses got logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}: "
            "pass (rows, length, vocabulary) and (rows, length) for the same tokens"
        )
    targets = tokens[:, 1:].clamp(min=0).flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none").view(len(tokens), -1)


def embed_tokens(lm: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The input embeddings of tokens (rows, length) in fp32, and the mask of real tokens; padding is -1."""
    return lm.get_input_embeddings()(tokens.clamp(min=0)).float(), tokens >= 0


def losses_with_prefix(
    lm: Any, tokens: Tensor, soft_tokens: Tensor, soft_mask: Tensor, key_values: Iterable[Tensor] = ()
) -> Tensor:
    """Next-token losses (rows, length - 1) of a language model that reads a prefix before the tokens.

    The prefix consists of `soft_tokens`, embeddings (rows, positions, width) with a mask (rows, positions), and of
    `key_values`: for every layer keys and values of shape (2, rows, heads, positions, head width), see `prefix_shape`.
    Gradients reach both through the model, such as the `module` of a `run.teacher` placement.
    """
    from transformers import DynamicCache

    text, text_mask = embed_tokens(lm, tokens)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(key_values):
        cache.update(keys.to(lm.dtype), values.to(lm.dtype), layer)
    cached = cache.get_seq_length()
    mask = torch.cat([text_mask.new_ones(len(text_mask), cached), soft_mask, text_mask], dim=1)
    output = lm(
        inputs_embeds=torch.cat([soft_tokens, text], dim=1).to(lm.dtype),
        past_key_values=cache,
        attention_mask=mask.long(),
        position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, cached:],
        logits_to_keep=tokens.shape[1],
    )
    return next_token_losses(output.logits, tokens)


def prefix_shape(config: Any) -> tuple[int, int, int, int]:
    """The shape of the keys and values of one token: layers, 2, key-value heads, head width.

    It comes from a transformers configuration, so that every rank builds the same prefix, with or without the model.
    """
    required = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    if missing := [name for name in required if not hasattr(config, name)]:
        raise SamestepError(
            f"prefix_shape got a {type(config).__name__} without {', '.join(missing)}: pass the configuration of a "
            "causal language model, AutoConfig.from_pretrained(folder)"
        )
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, 2, key_value_heads, head_width
