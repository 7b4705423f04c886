"""An optimizer with parameters of no module.

What it compares: the parameters of every optimizer with those of the modules that are called in training, and whether
they ever get a gradient.

Fault: `optimizer = AdamW(model.parameters())` before `fully_shard(model)`, which replaces the parameters. The optimizer
updates tensors that nothing uses, and training has no effect.

Repair: create the optimizer after the model has its final parameters.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for parameters that are in no called module and never have a gradient."""
    for trace in worlds.many:
        for number, optimizer in trace.optimizers.items():
            steps = [step for step in trace.steps if step.optimizer == number]
            updated = {parameter for step in steps for parameter in step.applied}
            stale = [each for each in optimizer["parameters"] if each in trace.missing and each not in updated]
            if steps and stale:
                yield CHECK.finding(
                    first(optimizer["site"]),
                    f"{len(stale)} of {len(optimizer['parameters'])} parameters of the optimizer belong to no module "
                    f"that is trained, and had no gradient in {len(steps)} steps",
                )
                return


CHECK = Check(
    "SS601",
    "stale-optimizer-parameters",
    "error",
    "optimizer.step changes nothing that the model uses: the weights stay constant",
    "create the optimizer after fully_shard, FSDP, .to() and everything else that replaces parameters",
    find,
)
