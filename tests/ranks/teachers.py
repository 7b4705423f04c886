"""A small teacher with difficult features, its weights in a file, and a student that learns from it."""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.nn import distill_loss
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights

CLASSES, WIDTH = 13, 8


class Layer(nn.Module):
    """A layer with dropout, which must be off, a saved buffer and an unsaved one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.tensor(0.7))  # a scalar cannot be sharded
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("turn", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x):
        return x + self.gain * self.drop(self.mlp(self.norm(x) * self.turn.to(x.dtype) + self.shift))


class Teacher(nn.Module):
    """Tokens to logits, with the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Student(nn.Module):
    """A much smaller model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def write_teacher(path, seed=3):
    """Write the weights of a teacher, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher = Teacher()
        for layer in teacher.layers:
            layer.shift.normal_()
            layer.gain.data.fill_(0.3)
    state = {name: tensor.clone() for name, tensor in teacher.state_dict().items() if name != "head.weight"}
    save_file(state, path)
    return teacher.eval().requires_grad_(False)


def tokens(n=23):
    """Sequences of six tokens."""
    return torch.randint(0, CLASSES, (n, 6), generator=torch.Generator().manual_seed(5))


def plain(path):
    """The plain module with the weights of the file."""
    return FrozenModel(Teacher, open_weights(path)).load(torch.device("cpu"))


def train_with(path, options, build=Teacher, epochs=2, micro_batch=2, submit=False):
    """The weights of a student after training with a teacher placed with these options."""
    with Run(global_batch=7, seed=0, start_timeout=30, step_timeout=30) as run:
        teacher = run.teacher(build, weights=path, **options)
        model = run.wrap(Student())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = run.shard(TensorDataset(tokens()), shuffle=True, micro_batch=micro_batch)
        for epoch in data.epochs(epochs):
            for step in epoch:
                for (batch,) in step:
                    pending = teacher.submit(batch) if submit else None
                    scores = model(batch)
                    target = teacher(batch) if pending is None else pending.result()
                    step.mean(distill_loss(scores, target, temperature=2.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        state = getattr(model, "module", model).state_dict()
        return {name: value.detach().clone() for name, value in state.items()}
