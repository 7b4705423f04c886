"""The ledger of one shard in a live run: opened when its first sample counts, flushed with the pulse."""

from dataclasses import dataclass
from pathlib import Path

from samestep.data.ledger import Description, LedgerWriter


@dataclass
class Account:
    """What this rank writes down of one shard."""

    folder: Path
    """The run's folder."""
    name: str
    """The shard's name in it."""
    description: Description
    """What the shard is."""
    rank: int
    """This rank."""
    size: int
    """The world size."""
    generation: int
    """Which start of the run this is."""
    _writer: LedgerWriter | None = None
    _passes: int = 0

    def begin(self, epoch: int, step: int) -> None:
        """Write down where training begins; what earlier starts recorded from there on no longer counts."""
        if self._writer is None:
            self._writer = LedgerWriter(
                self.folder,
                self.name,
                self.description,
                rank=self.rank,
                size=self.size,
                generation=self.generation,
                start=(epoch, step),
            )

    def trained(self, epoch: int, step: int, first: int, count: int) -> None:
        """Write down this rank's slice of a step that counted."""
        assert self._writer is not None
        self._writer.add(epoch, step, first, count)

    def begin_pass(self, epoch: int, step: int) -> int:
        """The number of an evaluation that begins while training stands at (epoch, step)."""
        self.begin(epoch, step)
        self._passes += 1
        return self._passes - 1

    def evaluated(self, number: int, batch: int, first: int, count: int) -> None:
        """Write down one batch of an evaluation."""
        assert self._writer is not None
        self._writer.evaluated(number, batch, first, count)

    def passed(self, number: int) -> None:
        """Write down that an evaluation is over."""
        assert self._writer is not None
        self._writer.passed(number)

    def flush(self) -> None:
        """Hand all records to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def sync(self) -> None:
        """Hand all records to the disk, before a position is saved from which a run may continue."""
        if self._writer is not None:
            self._writer.sync()

    def close(self, failed: bool) -> None:
        """Write down the end."""
        if self._writer is not None:
            self._writer.close(failed)
