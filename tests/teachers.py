"""Teachers for tests: small modules with ties, lists of blocks and buffers that no file holds; weights in files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, WORDS, LENGTH = 16, 31, 6


class Block(nn.Module):
    """Attention and an MLP, with rotary-like frequencies that are computed and not saved."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("frequencies", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        turned = self.norm(x) * torch.cos(self.frequencies).to(x.dtype)
        q, k, v = self.qkv(turned).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Speaker(nn.Module):
    """A small language model: tied embedding and head, a parameter of its own, dropout, a saved buffer."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.places = nn.Parameter(torch.randn(LENGTH, width))
        self.register_buffer("scale", torch.full((width,), 1.5))
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, words):
        x = self.dropout(self.embed(words) + self.places) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(n=4, seed=0):
    """Inputs of a Speaker."""
    return torch.randint(0, WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def speaker(seed=1, **settings):
    """A Speaker with weights that another seed would give otherwise, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Speaker(**settings).eval()


def untied(module):
    """The state of a module with each tensor once, as files of safetensors want it."""
    seen, state = set(), {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous()
    return state


def save(module, path, shards=1):
    """Write a module's weights as a file, or a folder of shards with an index; what was written."""
    path, state = Path(path), untied(module)
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
