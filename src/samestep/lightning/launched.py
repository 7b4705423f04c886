"""How many ranks a launcher has started, in the words of a Trainer."""

from typing import TypedDict

from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from samestep.facts.world import read_world


class Layout(TypedDict):
    """Arguments of a Trainer that say where it runs."""

    devices: int | str
    """Ranks on each node."""
    num_nodes: int
    """Nodes."""
    strategy: str | Strategy
    """How ranks share the work."""


def layout() -> Layout:
    """`Trainer(**layout())`: as many ranks as `samestep run`, torchrun or srun has started; else what Lightning finds.

    Lightning refuses to start where its own count differs from the launcher's, so a script would have to be told
    twice. Another strategy: `Trainer(**{**layout(), "strategy": "fsdp"})`.
    """
    world = read_world()
    if world.size == 1:
        return Layout(devices="auto" if world.launcher == "none" else 1, num_nodes=1, strategy="auto")
    # Variables set by hand as torchrun sets them are not recognised by Lightning, which would take them for its own
    # and delete some when a training ends.
    environment = TorchElasticEnvironment() if world.launcher == "torchrun" else None
    strategy = DDPStrategy(cluster_environment=environment)
    return Layout(devices=world.local_size, num_nodes=world.nodes, strategy=strategy)
