"""Every rank starts its own TensorBoard writer or experiment.

A SummaryWriter on every rank writes one file of events per rank to the same folder, and TensorBoard draws all of them
as one curve that jumps back and forth. `wandb.init` on every rank starts one run per rank.

Bad:

```python
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
writer = SummaryWriter("runs/first")  # SS506
```

Good:

```python
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

dist.init_process_group("gloo")
writer = SummaryWriter("runs/first") if dist.get_rank() == 0 else None
```

Source: Lightning-AI/pytorch-lightning#11380, huggingface/pytorch-image-models#1309.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.file_access import is_on_all_ranks
from samestep.lint.rule import Analysis, Rule

_GROUPING = ("group", "mode", "id", "settings")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for loggers that all ranks create."""
    for event in analysis.of("logger"):
        if not is_on_all_ranks(event) or event.path.differs or event.call is None:
            continue
        if any(name in event.call.keywords for name in _GROUPING) or any(each.differs for each in event.call.inputs):
            continue
        name = event.how.rpartition(".")[2] if "wandb" not in event.how else "wandb.init"
        yield RULE.finding(event.location, f"every rank calls `{name}`", evidence=["there is no condition on the rank"])


RULE = Rule(
    "SS506",
    "logger-on-every-rank",
    "note",
    "the curves of all ranks are drawn as one, or there is a run per rank",
    "create it on rank 0 only: `if dist.get_rank() == 0:`",
    find,
    is_sure=False,
)
