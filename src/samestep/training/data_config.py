"""What the data of a run must keep to: its global batch, seed, ranks and device, and whether it is written down."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from samestep.data.ledger import ShardDescription, ShardLedger, next_generation
from samestep.data.loader import check_num_workers, choose_num_workers
from samestep.environment.hardware import read_hardware
from samestep.environment.world import World, micro_batch_halvings
from samestep.errors import DataError
from samestep.training.auto_plan import planned_rows
from samestep.training.step_engine import RunEngine


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

    def rows(self, wish: int | None) -> int | None:
        """The most rows of a micro-batch: as wished or planned, halved as often as memory ran out; None: all."""
        if wish is not None and (not isinstance(wish, Integral) or wish < 1):
            raise DataError(
                f"micro_batch={wish!r} is not a number of rows: pass 1 or more, or leave it out to take each rank's "
                "part of a step at once"
            )
        whole, engine = -(-self.global_batch // self.world.size), self.engine
        rows, times = wish or planned_rows(engine.decisions), micro_batch_halvings()
        if times:
            before, rows = rows or whole, max(1, -(-(rows or whole) // 2**times))
            self._say_once(
                f"micro-batch: {rows} row(s) instead of {before}, since that ran out of memory; the global batch of "
                f"{self.global_batch} and what is learnt stay the same"
            )
        engine.rows = max(engine.rows, min(rows or whole, whole))
        return rows

    def workers_for(self, dataset: object, wish: int | None) -> int:
        """The wish, or a choice that is said."""
        if wish is not None:
            return check_num_workers(wish)
        workers, reason = choose_num_workers(dataset, read_hardware().cores.usable, self.world.local_size)
        self._say_once(f"data workers: {workers} a rank ({reason}); set workers= to change it")
        return workers

    def account(self, name: str | None, kind: str, description: ShardDescription) -> ShardLedger | None:
        """A ledger for one more shard or stream, where the run keeps ledgers."""
        if not self.ledger:
            return None
        name = name or f"{kind}-{len(self.engine.accounts)}"
        if any(account.name == name for account in self.engine.accounts):
            raise DataError(f"two shards are named {name!r}, and each needs a ledger of its own: give them other names")
        generation = self.once(next_generation, self.folder, name)
        account = ShardLedger(self.folder, name, description, self.world.rank, self.world.size, generation)
        self.engine.accounts.append(account)
        return account

    def _say_once(self, text: str) -> None:
        if text not in self.engine.said:
            self.engine.said.add(text)
            self.say(text)
