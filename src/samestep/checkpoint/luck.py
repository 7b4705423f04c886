"""The random numbers that each rank draws for itself, such as dropout's, kept across a restart on as many ranks."""

import json
import random

import numpy as np
import torch

from samestep.checkpoint.encode import decode, encode

PREFIX = "luck"


def name_of(rank: int) -> str:
    """Under which name a rank's state is saved."""
    return f"{PREFIX}/rank-{rank:05}"


def take(device: torch.device) -> torch.Tensor:
    """All generators of this process as bytes: Python's, numpy's and torch's."""
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    text = json.dumps(encode(state, PREFIX, {})).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def give_back(saved: torch.Tensor, device: torch.device) -> None:
    """Let all generators go on from where they were."""
    state = decode(json.loads(saved.numpy().tobytes()), _no_tensor)
    assert isinstance(state, dict)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_words(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_words(state["cuda"]), device)


def _numpy_state() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return (kind, keys.tobytes(), *rest)


def _words(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)
