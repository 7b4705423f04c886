"""The same index is another sample on another rank.

What it compares: the content of each sample, by its index, between the ranks and one process. Python's seed for hashes
and the order in which folders list their files differ between the ranks, as they do between processes and machines.
Samples that also differ within a rank are augmented at random and not compared, and neither are ranks that each read a
dataset of their own from its first sample to its last. Of data that is divided before it is processed, the inputs of
the ranks are compared with those of one rank if the targets are the same.

Fault: class ids that come from the order of a set of strings, `{name: i for i, name in enumerate(set(names))}`, or
files in the order of `os.listdir`. The ranks train on contradicting labels. Or inputs that each rank standardizes with
the mean of its own shard.

Repair: sort: `sorted(set(names))`, `sorted(os.listdir(folder))`.
"""

import ast
from collections import Counter
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import find_calls, name_of, parents, sharding_statement, tree_of

Key = tuple[str, int, str]  # dataset, index and shapes
Contents = dict[Key, list[tuple[str, ...]]]
_UNORDERED = (
    "set",
    "frozenset",
    "listdir",
    "scandir",
    "iterdir",
    "glob",
    "rglob",
    "iglob",
    "hash",
    "walk",
    "union",
    "intersection",
)
_STATISTICS = ("fit", "fit_transform", "mean", "std", "var", "std_mean", "var_mean", "min", "max", "amin", "amax",
               "median", "quantile", "unique", "norm")  # fmt: skip
_MIN_SAMPLES = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare samples by index."""
    traces = [*worlds.many.ranks, *(worlds.one.ranks if worlds.one else [])]
    if len(traces) < 2:
        return
    contents = [_contents(trace) for trace in traces]
    for later in range(1, len(worlds.many.ranks)):
        differing = list[Key]()
        for earlier in (each for each in range(len(traces)) if each != later):
            shared = contents[earlier].keys() & contents[later].keys()
            stable = [key for key in shared if len(contents[earlier][key]) == 1 == len(contents[later][key])]
            differing = [key for key in stable if contents[earlier][key] != contents[later][key]]
            if (
                len(differing) >= _MIN_SAMPLES
                and len(differing) >= 0.1 * len(stable)
                and _is_repeatable(contents, later, traces, worlds)
            ):
                yield _describe(worlds, traces[earlier], traces[later], differing, len(stable), contents)
                return
    yield from _processed_by_shard(worlds)


def _processed_by_shard(worlds: Worlds) -> Iterator[Finding]:
    """Samples of which a part is the same as on one rank, such as the target, and another part is on no rank."""
    traces = [*worlds.many.ranks, *(worlds.one.ranks if worlds.one else [])]
    columns = [_columns(trace) for trace in traces]
    if (
        len(traces) <= worlds.many.size
        or not all(map(_is_repeated, worlds.many))
        or not all(columns)
        or not same_on_all(map(len, columns))
        or different_draw(worlds)
    ):
        return
    kept, changed = 0, 0
    for *parts, whole in zip(*columns, strict=True):
        of_all = Counter(row for part in parts for row in part)
        if of_all.total() != len(whole):
            return
        kept += of_all == Counter(whole) and len(of_all) >= len(whole) / 2  # enough to tell the samples apart
        changed += not of_all.keys() & set(whole)
    if kept and changed:
        loader = next(iter(worlds.many[0].loaders.values()))
        yield CHECK.finding(
            _statistic(worlds) or first(loader.site),
            f"{changed} of {len(columns[0])} tensors of all {len(columns[-1][0])} samples are not those of one rank, "
            "although others are: each rank processes its own shard",
            ranks=range(worlds.many.size),
            repair="compute statistics and vocabularies from the whole data, or on rank 0, before you divide it",
            consequence="the same value of a feature means something else on every rank",
        )


def _columns(trace: RankTrace) -> list[list[str]]:
    """Hashes of the rows of the first epoch of training, by tensor."""
    epoch = next((each for each in trace.epochs_of("train") if each.is_complete), None)
    rows = [batch.rows for batch in epoch.batches] if epoch is not None else []
    return [[row for leaf in leaves for row in leaf] for leaves in zip(*rows, strict=False)]


def _is_repeated(trace: RankTrace) -> bool:
    """Whether the first two epochs of training have the same samples."""
    epochs = [each for each in trace.epochs_of("train") if each.is_complete]
    return len(epochs) > 1 and set(epochs[0].contents) == set(epochs[1].contents)


def _statistic(worlds: Worlds) -> Location | None:
    """The first executed line that computes a statistic after the statement that takes a rank's part."""
    shard, executed = sharding_statement(worlds.files, worlds.executed()), worlds.executed()
    for call in find_calls(shard.file, _STATISTICS) if shard is not None else ():
        if shard is not None and call.lineno > shard.line and (shard.file, call.lineno) in executed:
            return Location(shard.file, call.lineno)
    return None


def _is_repeatable(contents: list[Contents], later: int, traces: list[RankTrace], worlds: Worlds) -> bool:
    """Whether samples do not change: rank 0 reads those of one process, or every rank the same ones again.

    Otherwise they are random, and cannot be compared.
    """
    if _have_own_data(worlds):
        return False
    if all(_is_stable(trace) for trace in worlds.many):
        return True
    if worlds.one is None:
        return all(len(found) == 1 for content in contents for found in content.values())
    one = contents[-1]
    shared = contents[0].keys() & one.keys()
    return bool(shared) and all(contents[0][key] == one[key] for key in shared)


def _is_stable(trace: RankTrace) -> bool:
    """Whether a rank has read samples several times, and always with the same content."""
    reads = Counter(
        (epoch.loader.dataset, index)
        for epoch in trace.epochs.values()
        for batch in epoch.batches
        for index in batch.indices or ()
    )
    return any(count > 1 for count in reads.values()) and all(len(each) == 1 for each in _contents(trace).values())


def _have_own_data(worlds: Worlds) -> bool:
    """Whether no sampler divides the indices: every rank reads all of them, of a dataset that it has made itself."""
    for epochs in zip(*(trace.epochs_of("train") for trace in worlds.many), strict=False):
        indices = [{index for batch in epoch.batches for index in batch.indices or ()} for epoch in epochs]
        contents = [{row for batch in epoch.batches for leaf in batch.rows for row in leaf} for epoch in epochs]
        is_divided = any(each != indices[0] for each in indices[1:])
        if is_divided or set[str].intersection(*contents):
            return False
    return True


def _contents(trace: RankTrace) -> Contents:
    """The different contents of each sample that a rank has read."""
    found: Contents = {}
    for epoch in trace.epochs.values():
        for batch in epoch.batches:
            if batch.indices is None or not batch.rows or any(len(leaf) < len(batch.indices) for leaf in batch.rows):
                continue
            shapes = str([shape[1:] for shape in batch.shapes])  # samples that are padded with others differ
            for position, index in enumerate(batch.indices):
                content = tuple(leaf[position] for leaf in batch.rows)
                known = found.setdefault((epoch.loader.dataset, index, shapes), [])
                if content not in known:
                    known.append(content)
    return found


def _describe(
    worlds: Worlds, earlier: RankTrace, later: RankTrace, differing: list[Key], of: int, contents: list[Contents]
) -> Finding:
    key = min(differing)
    one, other = contents[0].get(key) or contents[-1][key], contents[later.rank][key]
    parts = [number for number, (a, b) in enumerate(zip(one[0], other[0], strict=False)) if a != b]
    what = "content" if len(parts) == len(other[0]) else f"tensor {parts[0]} of the sample" if parts else "content"
    name = "one process" if worlds.one is not None and earlier in worlds.one.ranks else f"rank {earlier.rank}"
    unordered = unordered_line(worlds)
    drawn = different_draw(worlds) if unordered is None else None
    return CHECK.finding(
        unordered or drawn or first(next(iter(later.loaders.values())).site),
        f"sample {key[1]} of {key[0].partition(':')[0]} differs between {name} and rank {later.rank} ({what}), as do "
        f"{len(differing)} of {of} samples that both have read",
        ranks=[later.rank],
        repair="seed the generator that makes the data with the same number on all ranks" if drawn else "",
    )


def different_draw(worlds: Worlds) -> Location | None:
    """A line that draws other random numbers on every rank before the first step, and so makes other data."""
    for draws in zip(*(trace.draws for trace in worlds.many), strict=False):
        if draws[0].step == 0 and len({draw.hash for draw in draws}) == len(draws) and draws[0].site:
            return first(draws[0].site)
    return None


def unordered_line(worlds: Worlds) -> Location | None:
    """A line of user code that was executed and depends on the order of a set or of a folder."""
    executed = worlds.executed()
    for file in worlds.files:
        for node in sorted(
            (each for each in ast.walk(tree_of(file)) if isinstance(each, ast.expr)), key=lambda each: each.lineno
        ):
            is_unordered = isinstance(node, ast.Set | ast.SetComp) or (
                isinstance(node, ast.Call) and name_of(node) in _UNORDERED
            )
            around = list(parents(node))
            is_sorted = any(
                name_of(each) in ("sorted", "len", "sum", "min", "max", "any", "all")
                for each in around
                if isinstance(each, ast.Call)
            )
            is_test = any(isinstance(each, ast.Compare) for each in around)
            statement = next((each for each in around if isinstance(each, ast.stmt)), None)
            if (
                is_unordered
                and not is_sorted
                and not is_test
                and statement is not None
                and (file, statement.lineno) in executed
            ):
                return Location(file, statement.lineno)
    return None


CHECK = Check(
    "SS106",
    "rank-dependent-samples",
    "error",
    "the ranks train on contradicting samples or labels, and their gradients work against each other",
    "make the order independent of the process: sort what comes from a set or a folder, and use hashlib instead of "
    "hash()",
    find,
)
