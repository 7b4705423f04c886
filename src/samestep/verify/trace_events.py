"""What a trace consists of: loaders, epochs and batches, calls, steps, evaluations, collectives, files and draws."""

from dataclasses import dataclass, field
from typing import Any, Literal

from samestep.findings import Location

Role = Literal["train", "eval", ""]
Site = tuple[Location, ...]
"""The lines of user code on a stack, the innermost first."""


@dataclass
class LoaderInfo:
    """A DataLoader."""

    number: int
    site: Site
    dataset: str  # name and length of the dataset without subsets around it
    dataset_class: str
    length: int | None
    is_iterable: bool
    batch_size: int | None
    drop_last: bool
    workers: int
    sampler: str
    batch_sampler: str
    replacement: bool
    steps: int | None = None  # batches of an epoch, as the loader says
    samples: int | None = None  # samples of an epoch on this rank, as the sampler says
    distributed: dict[str, Any] | None = None  # of a DistributedSampler
    sampler_site: Site = ()


@dataclass
class Batch:
    """A batch that a loader has returned."""

    epoch: int
    number: int
    step: int
    indices: list[int] | None  # in the dataset without subsets
    rows: list[list[str]]  # for each tensor, a hash of each row
    shapes: list[list[int]]

    @property
    def samples(self) -> list[str]:
        """What identifies the samples: their indices, or else their content."""
        return [str(index) for index in self.indices] if self.indices is not None else self.contents

    @property
    def contents(self) -> list[str]:
        """Hashes of the contents of the samples."""
        return ["-".join(parts) for parts in zip(*self.rows, strict=True)] if self.rows else []


@dataclass
class Epoch:
    """One loop over a loader."""

    number: int
    loader: LoaderInfo
    site: Site
    position: int
    settings: dict[str, str] = field(default_factory=dict[str, str])  # attributes of the dataset
    batches: list[Batch] = field(default_factory=list[Batch])
    is_complete: bool = False
    ended: bool = False
    trained: int = 0  # backward passes while it was the innermost loop
    evaluated: int = 0  # calls of modules without gradients

    @property
    def role(self) -> Role:
        """What the batches were used for."""
        return "train" if self.trained else "eval" if self.evaluated else ""

    @property
    def samples(self) -> list[str]:
        """All samples, in their order."""
        return [sample for batch in self.batches for sample in batch.samples]

    @property
    def contents(self) -> list[str]:
        """Hashes of the contents of all samples, in their order."""
        return [content for batch in self.batches for content in batch.contents]


@dataclass
class Call:
    """An outermost call of a module."""

    module: int
    wrapper: str
    site: Site
    training: bool
    grad: bool
    rows: int
    hashes: list[str]
    weights: str
    rng: str
    step: int
    epoch: int | None
    buffers: str = ""  # hashes, of a call without gradients
    rng_after: str = ""

    @property
    def is_evaluation(self) -> bool:
        """Whether it was made without gradients."""
        return not self.grad


@dataclass
class Backward:
    """A backward pass."""

    site: Site
    loss: float | None
    syncs: list[bool]
    epoch: int | None
    scales: list[float] = field(default_factory=list[float])
    rng: str = ""
    position: int = 0  # in the executed lines
    restarts: bool = False  # whether the script has dropped the gradients of the passes before it


@dataclass
class OptimizerStep:
    """One call of optimizer.step, with what led to it."""

    number: int  # of all optimizers
    optimizer: int
    site: Site
    lr: list[float | None]
    applied: dict[int, list[float]]  # sketches of the gradients by parameter
    local: dict[int, list[float]]  # before they were exchanged
    norms: dict[int, float]  # of the gradients of this rank, added up over the backward passes
    exchanged: dict[int, list[float]]  # after the last backward pass, of those that the script has changed since
    weights: list[str]
    sharded: set[int]  # parameters of which this rank has a part
    is_clipped: bool
    calls: list[Call]
    backwards: list[Backward]
    batches: list[Batch]
    draws: list["Draw"]
    buffers: dict[str, str]  # hashes of the buffers of wrapped modules, without BatchNorm's
    clip_site: Site  # of a clipping of gradients that others followed: a backward pass, or a collective
    rng_changes: bool  # whether random numbers were drawn between the batches and the end of the backward pass

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has parts of parameters, and not whole ones."""
        return bool(self.sharded)


@dataclass
class Evaluation:
    """Calls without gradients between two optimizer steps, and what was communicated around them."""

    step: int
    calls: list[Call]
    epochs: list[int]
    collectives: list["CollectiveCall"] = field(default_factory=list["CollectiveCall"])
    gathers: int = 0  # of Accelerate and torchmetrics
    dedups: int = 0  # gather_for_metrics

    @property
    def rows(self) -> int:
        """How many samples were evaluated, by the module with the most calls."""
        by_module = dict[int, int]()
        for call in self.calls:
            by_module[call.module] = by_module.get(call.module, 0) + call.rows
        return max(by_module.values(), default=0)


@dataclass
class CollectiveCall:
    """A call of torch.distributed."""

    number: int
    name: str
    group: str
    site: Site
    step: int
    position: int
    time: float
    shapes: list[list[int]]
    dtypes: list[str]
    source: list[Any] | None  # shape and dtype of what this rank contributes
    op: str
    value: list[float] | None
    result: list[float] | None = None
    is_complete: bool = False
    root: int | None = None  # the rank that sends or receives
    is_needless_copy: bool = False  # of a state dict that rank 0 sends
    needs_grad: bool = False  # whether what this rank contributes has a gradient


@dataclass
class SyncPoint:
    """A call in which a rank waits for the others: a collective, or a call of a wrapper."""

    name: str
    group: str
    site: Site
    position: int  # in the executed lines
    step: int
    source: list[Any] | None = None  # shape and dtype of what a collective exchanges
    root: int | None = None  # the rank that sends or receives
    batches: int = 0  # that the rank had read before
    is_complete: bool = False

    @property
    def is_wrapper(self) -> bool:
        """Whether it is a call of DDP or FSDP, not a collective of the script."""
        return self.name.startswith(("DDP", "FSDP"))


@dataclass
class FileEvent:
    """A file that was opened, renamed or removed, or looked for and not found."""

    action: str  # "read", "write", "update", "rename", "mkdir", "remove", "rmtree" or "miss"
    path: str
    site: Site
    sync: int  # how many synchronizing events came before it
    time: float
    locks: frozenset[str] = frozenset()  # files that this rank has locked
    step: int = 0


@dataclass(frozen=True)
class SyncEvent:
    """Something that orders what ranks do."""

    kind: Literal["collective", "send", "receive", "set", "get", "exists", "lock", "unlock"]
    key: str  # of a collective its name, of a lock its file, of a file that was found to exist its path
    time: float
    root: int | None = None  # the rank that sends or receives
    direction: Literal["all", "from root", "to root"] = "all"


@dataclass
class Draw:
    """Random numbers that user code has drawn."""

    name: str
    site: Site
    step: int
    shape: list[int]
    hash: str
    has_generator: bool


@dataclass
class Ending:
    """How a rank ended."""

    code: int | None
    is_stopped: bool = False  # by verify, after enough steps
    error: str = ""
    message: str = ""
    site: Site = ()
    details: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class WorkerTrace:
    """The random numbers of a data worker, from one start of it to its end."""

    rank: int
    number: int
    draws: list[str] = field(default_factory=list[str])  # hashes
    seeds: list[tuple[str, Site]] = field(default_factory=list[tuple[str, Site]])
    site: Site = ()  # of the first draw
    has_generator: bool = False  # whether it draws from a generator that it passes
