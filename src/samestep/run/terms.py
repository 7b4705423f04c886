"""What the data of a run must keep to: its global batch, seed, ranks and device, and whether it is written down."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from samestep.data.ledger import Description, next_generation
from samestep.data.loader import choose_workers
from samestep.errors import DataError
from samestep.facts.hardware import read_hardware
from samestep.facts.world import World
from samestep.run.account import Account
from samestep.run.engine import RunEngine


@dataclass(frozen=True)
class Terms:
    """The terms of a run, for its shards and streams."""

    global_batch: int
    """Samples in a step, over all ranks."""
    seed: int
    """Where all luck comes from."""
    world: World
    """This rank among all."""
    device: torch.device
    """Where batches are wanted."""
    engine: RunEngine
    """What follows the steps."""
    folder: Path
    """The run's folder."""
    ledger: bool
    """Whether every sample that counts is written down."""
    say: Callable[[str], None]
    """Prints once."""
    once: Callable[..., int]
    """Runs a function on the first rank and gives its value to all."""

    def workers_for(self, dataset: object, wish: int | None) -> int:
        """The wish, or a choice that is said."""
        if wish is not None:
            return wish
        workers, reason = choose_workers(dataset, read_hardware().cores.usable, self.world.local_size)
        text = f"data workers: {workers} a rank ({reason}); set workers= to change it"
        if text not in self.engine.said:
            self.engine.said.add(text)
            self.say(text)
        return workers

    def account(self, name: str | None, kind: str, description: Description) -> Account | None:
        """A ledger for one more shard or stream, where the run keeps ledgers."""
        if not self.ledger:
            return None
        name = name or f"{kind}-{len(self.engine.accounts)}"
        if any(account.name == name for account in self.engine.accounts):
            raise DataError(f"two shards are named {name!r}, and each needs a ledger of its own: give them other names")
        generation = self.once(next_generation, self.folder, name)
        account = Account(self.folder, name, description, self.world.rank, self.world.size, generation)
        self.engine.accounts.append(account)
        return account
