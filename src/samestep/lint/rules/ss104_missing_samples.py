"""Samples that no rank reads.

A sampler must know the rank among all ranks and their number. With `rank=local_rank`, the nodes of a job read the
same part and leave the others out. With a constant `num_replicas`, parts are missing on fewer ranks. Data that is
divided by hand and again by `accelerator.prepare` loses all but one N-th, and shares that are rounded down lose the
last samples.

Bad:

```python
import os

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
dataset = list(range(64))
sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=local_rank)  # SS104
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
```

Good:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = list(range(64))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
```

Source: vllm-project/speculators#427, NVIDIA/recsys-examples#95, huggingface/accelerate#4062, pytorch/pytorch#25162.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.file_access import GLOBAL_RANK
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import LoaderValue, SamplerValue, Value, options_of

_DATA_FILES: Final = ("numpy.load", "numpy.memmap", "numpy.loadtxt", "pandas.read_csv", "pandas.read_parquet")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for samplers and hand-made parts that leave samples out."""
    for event in analysis.of("sampler"):
        sampler: SamplerValue = event.sampler
        if sampler.kind.endswith("DistributedSampler"):
            options = sampler.options
            yield from _of_numbers(analysis, event, options.get("rank"), options.get("num_replicas"), "num_replicas")
    for event in analysis.of("shard"):
        if "dataset" in event.contexts or "uncalled" not in event.contexts:
            if event.how == "stride":
                yield from _of_numbers(analysis, event, event.rank, event.world, "the step")
            if event.how == "floor" and not _is_checked(analysis, event):
                yield RULE.finding(
                    event.location,
                    "the share of a rank is rounded down, so no rank reads the last samples",
                    evidence=_why(event.rank),
                    repair="take every `world_size`-th sample from `rank` on: `range(rank, n, world_size)`",
                )
    yield from _divided_twice(analysis)
    yield from _files_of_local_rank(analysis)


def _of_numbers(
    analysis: Analysis, event: Event, rank: Value | None, world: Value | None, name: str
) -> Iterator[Finding]:
    if rank is not None and _is_local(rank) and not _is_single_node(analysis) and not _is_local_world(event):
        yield RULE.finding(
            event.location,
            "the data is divided by the local rank, which starts from 0 on every node",
            evidence=_why(rank),
            repair="use the rank among all ranks, `dist.get_rank()`; a DistributedSampler knows it by itself",
        )
    elif rank is not None and _is_node(rank) and world is not None and not _is_number_of_nodes(event):
        yield RULE.finding(
            event.location,
            "the data is divided by the number of the node, which all ranks of a node share",
            evidence=_why(rank),
            repair="use the rank among all ranks, `dist.get_rank()`; a DistributedSampler knows it by itself",
        )
    elif event.kind == "sampler" and rank is not None and rank.differs and not rank.depends_on_rank:
        yield RULE.finding(
            event.location,
            "the sampler gets a number that is not the rank, so ranks may have the same one",
            evidence=_why(rank),
            repair="use the rank among all ranks, `dist.get_rank()`; a DistributedSampler knows it by itself",
        )
    elif world is not None and _is_constant(world) and world.constant > 1 and not _is_launched(analysis, world):
        yield RULE.finding(
            event.location,
            f"{name} is the constant {world.constant}, not the number of ranks",
            evidence=[f"{world.constant} is set here ({world.location})"] if world.location is not None else [],
            related=[world.location] if world.location is not None else [],
            repair="use `dist.get_world_size()`; a DistributedSampler knows it by itself",
        )
    elif event.kind == "sampler" and rank is not None and _is_constant(rank) and not _is_one(world):
        yield RULE.finding(
            event.location,
            f"every rank reads the part of rank {rank.constant}",
            repair="use `dist.get_rank()`; a DistributedSampler knows it by itself",
        )


def _is_local(rank: Value) -> bool:
    taints = [taint for taint in rank.taints if taint.kind == "rank"]
    return bool(taints) and all(taint.is_local for taint in taints)


def _files_of_local_rank(analysis: Analysis) -> Iterator[Finding]:
    """Data in a file per rank, which is chosen by the local rank in a script that knows the other one."""
    for event in analysis.of("read"):
        file = analysis.file_of(event.location)
        if event.how not in _DATA_FILES or file is None or not GLOBAL_RANK.search(file.text):
            continue
        if _is_local(event.path) and event.rank_guard is None and not _is_single_node(analysis):
            yield RULE.finding(
                event.location,
                "the file is chosen by the local rank, which starts from 0 on every node",
                evidence=_why(event.path),
                repair="use the rank among all ranks, `dist.get_rank()`",
                severity="warning",
            )


def _is_node(rank: Value) -> bool:
    taints = [taint for taint in rank.taints if taint.kind == "rank"]
    return bool(taints) and all(taint.is_node for taint in taints)


def _is_number_of_nodes(event: Event) -> bool:
    """Whether the data is meant to be divided among the nodes."""
    text = ast.unparse(event.node).lower()
    return any(word in text for word in ("nnodes", "num_nodes", "n_nodes", "group_world", "node_count"))


def _is_constant(value: Value) -> bool:
    return isinstance(value.constant, int) and not isinstance(value.constant, bool) and not value.is_world


def _is_one(world: Value | None) -> bool:
    return world is not None and world.constant == 1


def _is_local_world(event: Event) -> bool:
    """Whether the data is meant to be divided among the ranks of a node."""
    return "local_world" in ast.unparse(event.node).lower() or "device_count" in ast.unparse(event.node)


def _is_single_node(analysis: Analysis) -> bool:
    """Whether the script numbers its ranks by GPU: `init_process_group(rank=local_rank)` or `spawn`."""
    groups = [event.call.get("rank") for event in analysis.of("init_group") if event.call is not None]
    return bool(analysis.of("spawn")) or any(rank is not None and _is_local(rank) for rank in groups)


def _is_launched(analysis: Analysis, world: Value) -> bool:
    """Whether the script itself starts this number of ranks."""
    calls = [event.call for event in analysis.of("init_group", "spawn", "trainer", "fabric") if event.call is not None]
    given = [call.get(name) for call in calls for name in ("world_size", "nprocs", "devices", "num_nodes")]
    given += [call.arguments[2] for call in calls if call.name.endswith("spawn") and len(call.arguments) > 2]
    return any(each is not None and each.constant == world.constant for each in given)


def _is_checked(analysis: Analysis, event: Event) -> bool:
    """Whether the function looks at the remainder: it has a `%`, or treats the last rank differently."""
    for file in analysis.files:
        if str(file.path) == event.location.file:
            node: ast.AST | None = event.node
            while node is not None and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                node = file.parents.get(node)
            return any(
                isinstance(each, ast.BinOp)
                and isinstance(each.op, ast.Mod)
                and not isinstance(each.left, ast.Constant | ast.JoinedStr)
                for each in ast.walk(node or event.node)
            )
    return False


def _divided_twice(analysis: Analysis) -> Iterator[Finding]:
    """Datasets that are divided by hand and go to a sampler or a framework that divides again."""
    parts = {event.location: event for event in analysis.of("shard") if "uncalled" not in event.contexts}
    for location, reason in _dividers(analysis, parts):
        event = parts[location]
        yield RULE.finding(
            event.location,
            "the data is divided among the ranks here, and once more by " + reason[0],
            evidence=[*_why(event.rank), f"{reason[0]} divides it again ({reason[1]})"],
            repair="leave one of them out: pass the whole dataset to the loader",
        )


def _dividers(analysis: Analysis, parts: dict[Location, Event]) -> Iterator[tuple[Location, tuple[str, Location]]]:
    for event in analysis.of("sampler"):
        if event.sampler.is_distributed and event.sampler.dataset is not None:
            for taint in event.sampler.dataset.taints:
                if taint.location in parts:
                    yield taint.location, ("the DistributedSampler", event.location)
    for event in analysis.of("prepare"):
        loaders = [each for value in event.arguments for each in options_of(value) if isinstance(each, LoaderValue)]
        if analysis.of("fabric"):
            loaders = [each for each in loaders if not analysis.of("iterate")]
        for loader in loaders:
            yield from _prepared(analysis, loader, event, parts)


def _prepared(
    analysis: Analysis, loader: LoaderValue, event: Event, parts: dict[Location, Event]
) -> Iterator[tuple[Location, tuple[str, Location]]]:
    name = "`setup_dataloaders`" if analysis.of("fabric") else "`accelerator.prepare`"
    values = [loader.dataset, *(each.result for each in analysis.of("iterate") if each.loader is loader)]
    for taint in (taint for value in values if value is not None for taint in value.taints):
        if taint.location in parts and not isinstance(loader.sampler, SamplerValue):
            yield taint.location, (name, event.location)
            return


def _why(rank: Value) -> list[str]:
    return [f"{taint.text} ({taint.location})" for taint in rank.taints[:2]]


RULE = Rule(
    "SS104",
    "missing-samples",
    "error",
    "the model never sees these samples, or the metric leaves them out",
    "let the sampler take rank and number of replicas from the process group",
    find,
)
