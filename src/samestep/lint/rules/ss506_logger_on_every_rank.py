"""Every rank starts its own TensorBoard writer or experiment.

A SummaryWriter on every rank writes one file of events per rank to the same folder, and TensorBoard draws all of them
as one curve that jumps back and forth. `wandb.init` on every rank starts one run per rank. It is a note if only rank 0
writes values.

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
from samestep.lint.events import Event
from samestep.lint.file_access import is_on_all_ranks
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import options_of

_GROUPING = ("group", "mode", "id", "settings")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for loggers that all ranks create."""
    for event in analysis.of("logger"):
        if not is_on_all_ranks(event) or event.path.differs or event.call is None:
            continue
        if any(name in event.call.keywords for name in _GROUPING) or any(each.differs for each in event.call.inputs):
            continue
        name = event.how.rpartition(".")[2] if "wandb" not in event.how else "wandb.init"
        written = _first_value(analysis, event)
        evidence = f"every rank writes to it ({written.location})" if written else "there is no condition on the rank"
        yield RULE.finding(
            event.location,
            f"every rank calls `{name}`",
            evidence=[evidence],
            related=[written.location] if written else [],
            severity="warning" if written else None,
        )


def _first_value(analysis: Analysis, logger: Event) -> Event | None:
    """Where all ranks write a value with a logger; if only one does, the others leave an empty file."""
    for event in analysis.of("call"):
        owners = options_of(event.data.get("owner"))
        is_own = any(each.name == logger.how and each.location == logger.location for each in owners)
        last = event.name.rpartition(".")[2]
        is_write = is_own and last.startswith(("add_", "log"))
        if (is_write or event.name in ("wandb.log", "mlflow.log_metric")) and is_on_all_ranks(event):
            return event
    return None


RULE = Rule(
    "SS506",
    "logger-on-every-rank",
    "note",
    "the curves of all ranks are drawn as one, or there is a run per rank",
    "create it on rank 0 only: `if dist.get_rank() == 0:`",
    find,
    is_sure=False,
)
