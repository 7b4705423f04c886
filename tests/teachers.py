"""Small teachers for tests: modules with tied weights, lists of blocks and unsaved buffers; their weights in files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, VOCABULARY, LENGTH = 16, 31, 6


class Block(nn.Module):
    """Attention and an MLP, with a buffer of frequencies that is computed and not saved."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("frequencies", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        rotated = self.norm(x) * torch.cos(self.frequencies).to(x.dtype)
        q, k, v = self.qkv(rotated).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    """A small language model: tied embedding and head, a parameter outside of layers, dropout, a saved buffer."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.randn(LENGTH, width))
        self.register_buffer("scale", torch.full((width,), 1.5))
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens):
        x = self.dropout(self.embed(tokens) + self.positions) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def random_tokens(n=4, seed=0):
    """Inputs of a TinyLM."""
    return torch.randint(0, VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def tiny_lm(seed=1, **options):
    """A TinyLM in evaluation mode, with the weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyLM(**options).eval()


def state_without_ties(module):
    """The state dict of a module with each tensor once, as safetensors requires."""
    seen, state = set(), {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    return state


def save(module, path, shards=1):
    """Write a module's weights as a file, or as a folder of shards with an index; return the path."""
    path, state = Path(path), state_without_ties(module)
    if path.suffix in (".pt", ".bin"):
        torch.save(module.state_dict(), path)
    elif path.suffix == ".safetensors":
        save_file(state, path)
    else:
        path.mkdir()
        names = sorted(state)
        listed = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {name: state[name] for name in names[number::shards]}
            save_file(part, path / file)
            listed |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return path
