"""How many ranks a launcher has started, in the words of a Trainer, and whether the Trainer knows of them."""

from typing import TypedDict

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from samestep.errors import WorldError
from samestep.facts.world import World, environment, read_world


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
    world = _launched()
    if world.size == 1:
        return Layout(devices="auto" if world.launcher == "none" else 1, num_nodes=1, strategy="auto")
    # Variables set by hand as torchrun sets them are not recognised by Lightning, which would take them for its own
    # and delete some when a training ends.
    environment = TorchElasticEnvironment() if world.launcher == "torchrun" else None
    strategy = DDPStrategy(cluster_environment=environment)
    return Layout(devices=world.local_size, num_nodes=world.nodes, strategy=strategy)


def check_layout(trainer: Trainer) -> None:
    """Refuse a Trainer that does not know of the ranks a launcher has started: each of them would train alone."""
    world = _launched()
    if world.size != trainer.world_size and world.launcher != "none":
        raise WorldError(
            f"{world.size} rank(s) were started and the Trainer has a world of {trainer.world_size}, so that each rank "
            "would train for itself: pass Trainer(..., **layout()), with `from samestep.lightning import layout`"
        )


def _launched() -> World:
    """The world that a launcher made. Processes that Lightning starts by itself know no RANK: it counts them alone."""
    found = environment()
    if "RANK" not in found and {"LOCAL_RANK", "WORLD_SIZE"} & found.keys() and "SLURM_PROCID" not in found:
        return World()
    return read_world()
