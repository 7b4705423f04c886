"""The same index is another sample on another rank.

The order of a set of strings depends on a seed that differs between processes, and the order in which a folder lists
its files depends on the machine. If samples or classes get their numbers from such an order, the ranks train on
contradicting samples or labels. So they do if each rank numbers the words or classes in its part of the data.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clips(Dataset):
    def __init__(self, folder):
        self.files = os.listdir(folder)  # SS106

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index])


dist.init_process_group("gloo")
clips = Clips("clips")
loader = DataLoader(clips, batch_size=8, sampler=DistributedSampler(clips))
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clips(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.listdir(folder))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.load(self.files[index])


dist.init_process_group("gloo")
clips = Clips("clips")
loader = DataLoader(clips, batch_size=8, sampler=DistributedSampler(clips))
```

Source: alibaba/TorchEasyRec#667, pytorch/pytorch#70103, ByteDance-Seed/VeOmni#330.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.library.partitions import own_part, unordered_source
from samestep.lint.module_trees import site
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, TensorValue, Value


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for numbers that come from an order which differs between ranks."""
    for event in analysis.of("by_position"):
        if event.rank_guard is None:
            yield from _finding(analysis, event.container, event.location, event.location)
    for event in analysis.of("assign_item"):
        container = next((found for loop in event.loops if (found := unordered_source(loop.iterable))), None)
        if container is not None and event.rank_guard is None and _is_number(event):
            loop = next(each for each in event.loops if unordered_source(each.iterable) is container)
            yield from _finding(analysis, container, loop.location, event.location)
    yield from _of_own_part(analysis)
    for event in analysis.of("own_mean"):
        if event.rank_guard is None and not any(taint.kind == "data" for taint in event.source.taints):
            yield RULE.finding(
                event.mean.location,
                "each rank normalizes its part of the data with the mean of this part",
                evidence=[f"{taint.text} ({taint.location})" for taint in event.source.taints[:1]],
                related=[event.location],
                repair="compute mean and deviation of all data, or reduce sums and counts over the ranks",
            )
    for event in analysis.of("call"):
        if event.name == "hash" and event.rank_guard is None and _is_hash_of_text(event):
            yield RULE.finding(
                event.location,
                "`hash` of a string differs between processes",
                evidence=["Python chooses another seed for the hashes of strings in each process"],
                repair="use a hash that does not depend on the process: `zlib.crc32(text.encode())`",
            )


def _of_own_part(analysis: Analysis) -> Iterator[Finding]:
    """Words or classes of the rank's own part that get numbers."""
    numbered = [(event, own_part(event.source)) for event in analysis.of("numbered")]
    for event in analysis.of("assign_item"):
        source = next((found for loop in event.loops if loop.iterable and (found := own_part(loop.iterable))), None)
        if source is not None and _is_size_so_far(event.node):
            numbered.append((event, source))
    for event, source in numbered:
        if source is not None and event.rank_guard is None:
            yield RULE.finding(
                site(event, source.location.function, source.location.file),
                "each rank gives numbers to the values in its own part, so that one number means different things",
                evidence=[f"{source.text} ({source.location})", f"the numbers are given here ({event.location})"],
                related=[source.location, event.location],
                repair="number the values of all data, or exchange them with `dist.all_gather_object` and sort them",
            )


def _is_size_so_far(node: ast.AST) -> bool:
    """Whether a statement is `ids[word] = len(ids)`."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=owner)], value=ast.Call(func=ast.Name(id="len"), args=[counted])):
            return ast.unparse(owner) == ast.unparse(counted)
        case _:
            return False


def _finding(analysis: Analysis, container: ContainerValue, read: Location, used: Location) -> Iterator[Finding]:
    location = container.order_from or read
    file = analysis.file_of(location)
    text = f"{container.name} {file.lines[location.line - 1] if file is not None else ''}"
    is_folder = any(word in text for word in ("listdir", "scandir", "iterdir", "glob"))
    reason = "the order of files in a folder" if is_folder else "this order"
    yield RULE.finding(
        location,
        f"{reason} differs between ranks, and items get their numbers from it",
        evidence=[f"items are used by their position here ({used})"],
        related=[used] if used != location else [],
        severity="warning" if is_folder else None,  # on one file system it usually is the same
        consequence="on nodes with their own disks, an index is another sample on another rank" if is_folder else "",
    )


def _is_number(event: Event) -> bool:
    """Whether an item becomes the number of items so far, `ids[name] = len(ids)`, or a counter."""
    node = event.node
    value = node.value if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "len"
    loops = [loop.node for loop in event.loops if unordered_source(loop.iterable) is not None]
    if not isinstance(value, ast.Name) or not loops:
        return False
    target = loops[-1].target if isinstance(loops[-1], ast.For) else None
    iterated = loops[-1].iter if isinstance(loops[-1], ast.For) else None
    is_counter = (
        isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "enumerate"
    )
    if is_counter and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
        return value.id == target.elts[0].id
    counts = (each for each in ast.walk(loops[-1]) if isinstance(each, ast.AugAssign))
    return any(isinstance(each.target, ast.Name) and each.target.id == value.id for each in counts)


def _is_hash_of_text(event: Event) -> bool:
    arguments: list[Value] = event.arguments
    if event.location.function in ("__hash__", "__eq__") or len(arguments) != 1 or not isinstance(event.node, ast.Call):
        return False
    value, node = arguments[0], event.node.args[0] if event.node.args else None
    if isinstance(value, TensorValue) or (value.is_known and not isinstance(value.constant, str)):
        return False
    if isinstance(node, ast.JoinedStr) or isinstance(value.constant, str):
        return True
    text = ast.unparse(node).lower() if node is not None else ""
    return text.startswith("str(") or text.endswith(("name", "path", "text", "key", "url", "word", "token", "file"))


RULE = Rule(
    "SS106",
    "rank-dependent-samples",
    "error",
    "the ranks train on contradicting samples or labels, and their gradients work against each other",
    "sort: `sorted(os.listdir(folder))`, `sorted(set(names))`",
    find,
)
