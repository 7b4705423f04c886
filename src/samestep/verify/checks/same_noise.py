"""All ranks draw the same random numbers.

What it compares: the tensors of random numbers that user code draws in each training step, with a row per sample,
between the ranks. It is reported if they are equal in all steps, or in all from some step on, as after a restart.
Single numbers, by which the ranks may have to decide alike, and masks of dropout are not compared.

Fault: `torch.manual_seed(42)` on every rank, then `torch.randn_like(x)` in the training loop of a diffusion model. All
ranks add the same noise to different samples.

Repair: `torch.manual_seed(seed + rank)` after the model is built, or `step.normal(...)`, which is keyed by sample.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import Draw

_MIN_STEPS = 3


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the draws of the ranks, step by step."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    equal = list[Draw]()  # the first draw of each of the last steps, in which all draws are equal
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        rows = [{batch_rows for call in step.calls if (batch_rows := call.rows) > 1} for step in steps]
        draws = [[draw for draw in step.draws if _is_noise(draw, rows[0])] for step in steps]
        if not draws[0] or any(len(each) != len(draws[0]) for each in draws):
            continue
        is_equal = all([draw.hash for draw in each] == [draw.hash for draw in draws[0]] for each in draws[1:])
        equal = [*equal, draws[0][0]] if is_equal else []
    if len(equal) < _MIN_STEPS or have_same_data(ranks):
        return
    example = equal[0]
    seed = _seed(ranks, example)
    yield CHECK.finding(
        seed or first(example.site),
        f"all {len(ranks)} ranks drew the same random numbers in each of {len(equal)} steps: "
        f"{example.name} with shape {example.shape} at {first(example.site)}",
        ranks=range(len(ranks)),
        related=[example.site[0]] if seed and example.site else [],
    )


def _is_noise(draw: Draw, rows: set[int]) -> bool:
    return bool(draw.shape) and draw.shape[0] in rows and draw.name != "randperm"


def have_same_data(ranks: list[RankTrace]) -> bool:
    """Whether the ranks read the same samples, so that equal numbers are a consequence."""
    samples = [
        [sample for step in trace.steps for batch in step.batches for sample in batch.samples] for trace in ranks
    ]
    return bool(samples[0]) and all(each == samples[0] for each in samples[1:])


def _seed(ranks: list[RankTrace], draw: Draw) -> Location | None:
    """The last seed of the drawing library that all ranks share, or state that all ranks restore, before a draw."""
    library = "numpy" if draw.name.startswith("numpy.") else "torch"
    shared = [
        (event["name"], event["site"][0])
        for event, *others in zip(*(trace.of("seed") for trace in ranks), strict=False)
        if all(other["value"] == event["value"] for other in others) and event["s"] <= draw.step and event["site"]
    ]
    of_library = [location for name, location in shared if name.startswith(library)]
    found = of_library or [location for _, location in shared]
    # a framework may seed again on its own, in a line of the script that only starts the training
    named = [location for location in found if "seed" in location.source or "state" in location.source]
    return (named or found or [None])[-1]


CHECK = Check(
    "SS109",
    "same-noise",
    "error",
    "the noise of the ranks is not independent: a step of N ranks sees as many different draws as one rank",
    "seed the generator of the noise with seed + rank after the model is built",
    find,
)
