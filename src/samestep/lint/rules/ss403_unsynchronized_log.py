"""Lightning logs the value of one rank.

`self.log` in a validation or test hook keeps the value of each process, and the logger and the callbacks of rank 0 see
that of rank 0's samples. Early stopping and checkpoint callbacks may decide differently on different ranks.

Bad:

```python
import lightning as L
from torch.nn.functional import mse_loss


class Model(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", mse_loss(self(x), y))  # SS403


trainer = L.Trainer(devices=2, strategy="ddp")
```

Good:

```python
import lightning as L
from torch.nn.functional import mse_loss


class Model(L.LightningModule):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", mse_loss(self(x), y), sync_dist=True)


trainer = L.Trainer(devices=2, strategy="ddp")
```

Source: Lightning-AI/pytorch-lightning#7773, Lightning-AI/pytorch-lightning#2398.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Edit, Finding
from samestep.lint.events import Event
from samestep.lint.fixes import add_keyword
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, ServiceValue, Taint, Value, merge_taints, options_of

_HOOKS: Final = frozenset({
    "validation_step", "test_step", "on_validation_epoch_end", "on_test_epoch_end", "validation_epoch_end",
    "test_epoch_end", "on_validation_batch_end", "on_test_batch_end", "on_validation_end", "on_test_end",
})  # fmt: skip


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for logged values of a rank's own samples."""
    if not analysis.is_lightning:
        return
    for event in analysis.of("log"):
        hook = next((each[5:] for each in event.contexts if each.startswith("hook:")), "")
        taints = _own_taints(event.value)
        if hook not in _HOOKS or not taints or not _is_local(event):
            continue
        yield RULE.finding(
            event.location,
            f"`self.{event.method}` in {hook} logs the value of each rank's own samples",
            evidence=[f"{taint.text} ({taint.location})" for taint in taints[:2]],
            edits=_edits(analysis, event),
        )


def _edits(analysis: Analysis, event: Event) -> tuple[Edit, ...]:
    """Add `sync_dist=True`, unless the call has it with another value."""
    file = analysis.file_of(event.location)
    if file is None or not isinstance(event.node, ast.Call) or "sync_dist" in event.keywords:
        return ()
    return add_keyword(file, event.node, "sync_dist=True")


def _own_taints(value: Value | None) -> tuple[Taint, ...]:
    """Why a logged value differs between ranks; metrics of torchmetrics are synchronized by Lightning."""
    found = list[Value]()
    for option in options_of(value):
        items = list(option.values()) if isinstance(option, ContainerValue) and option.items else [option]
        found += [each for each in items if not isinstance(each, ServiceValue)]
    return tuple(taint for taint in merge_taints(found) if taint.kind == "data")


def _is_local(event: Event) -> bool:
    """Whether `sync_dist` is off, or not passed."""
    value = event.keywords.get("sync_dist")
    return value is None or value.constant is False


RULE = Rule(
    "SS403",
    "unsynchronized-log",
    "error",
    "the logged metric covers the samples of one rank, and callbacks such as early stopping may decide differently",
    "`self.log(..., sync_dist=True)`, or log a torchmetrics object",
    find,
)
