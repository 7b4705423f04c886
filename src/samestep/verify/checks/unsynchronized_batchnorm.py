"""BatchNorm sees the samples of one rank.

What it compares: nothing; it looks for BatchNorm layers in a wrapped model that are not synchronized. This is a common
design, so it is reported with `--strict` only.

Fault: `DDP(resnet50())` with 4 samples per GPU: each rank normalizes with its own mean and variance.

Repair: `nn.SyncBatchNorm.convert_sync_batchnorm(model)` before DDP, `run.wrap(model, sync_batchnorm=True)`, or
GroupNorm.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for BatchNorm in wrapped models."""
    if len(worlds.many.ranks) < 2:
        return
    trace = worlds.many[0]
    for event in trace.of("wrap"):
        layers = trace.modules.get(event.get("module", -1), {}).get("batchnorm", 0)
        if event["state"] == "end" and layers:
            yield CHECK.finding(
                first(event["site"]),
                f"the wrapped model has {layers} BatchNorm layers that see the samples of one rank",
            )
            return


CHECK = Check(
    "SS207",
    "unsynchronized-batchnorm",
    "note",
    "statistics and gradients depend on how many samples each rank has",
    "convert the model with nn.SyncBatchNorm.convert_sync_batchnorm before DDP, or use GroupNorm",
    find,
    is_strict=True,
)
