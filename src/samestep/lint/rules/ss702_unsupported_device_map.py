"""A device map that the loader does not know.

`load_checkpoint_and_dispatch` of Accelerate takes a dictionary or the name of a strategy. A string such as "cpu" or
"cuda:0" is neither, and the script ends with ValueError.

Bad:

```python
import torch
import torch.distributed as dist
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

dist.init_process_group("gloo")
with init_empty_weights():
    model = torch.nn.Linear(8, 8)
model = load_checkpoint_and_dispatch(model, "weights.bin", device_map="cpu")  # SS702
```

Good:

```python
import torch
import torch.distributed as dist
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

dist.init_process_group("gloo")
with init_empty_weights():
    model = torch.nn.Linear(8, 8)
model = load_checkpoint_and_dispatch(model, "weights.bin", device_map={"": "cpu"})
```

Source: huggingface/accelerate#985, huggingface/transformers#23922.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import Value, options_of

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for strings that are not strategies."""
    for event in analysis.of("pretrained"):
        if event.call is None or not event.call.name.endswith("load_checkpoint_and_dispatch"):
            continue
        for value in device_maps(analysis, event):
            if isinstance(value.constant, str) and value.constant not in STRATEGIES:
                location: Location = value.location or event.location
                yield RULE.finding(
                    location,
                    f'"{value.constant}" is not a device map',
                    evidence=[f"`load_checkpoint_and_dispatch` gets it ({event.location})"],
                    related=[event.location] if location != event.location else [],
                    repair=f'pass `device_map={{"": "{value.constant}"}}`',
                )


def device_maps(analysis: Analysis, event: Event) -> list[Value]:
    """What `device_map` may be: also what branches assign to the dictionary of options."""
    given: Value | None = event.keywords.get("device_map")
    if given is None and event.call is not None and event.call.name.endswith("load_checkpoint_and_dispatch"):
        given = event.call.get("device_map", 2)
    if given is None:
        return []
    items = [each for each in analysis.of("assign_item") if each.key.constant == "device_map"]
    owners = {id(each.owner) for each in items if each.value is given}
    return [*options_of(given), *(each.value for each in items if id(each.owner) in owners and each.value is not given)]


RULE = Rule(
    "SS702",
    "unsupported-device-map",
    "error",
    "the script ends with ValueError before it trains",
    'pass a dictionary, `device_map={"": "cpu"}`',
    find,
)
