"""Every rank sends before any rank receives.

`dist.send` returns when the other rank takes the data. If all ranks send first, each waits for another one to receive,
and none of them gets there.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine, other = torch.full((4,), float(rank)), torch.zeros(4)
dist.send(mine, (rank + 1) % world)  # SS313
dist.recv(other, (rank - 1) % world)
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine, other = torch.full((4,), float(rank)), torch.zeros(4)
request = dist.isend(mine, (rank + 1) % world)
dist.recv(other, (rank - 1) % world)
request.wait()
```

Source: NVIDIA/nccl#479, pytorch/pytorch#11275.
"""

from collections.abc import Iterator
from itertools import pairwise

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for a blocking send and receive that all ranks call in this order."""
    calls = [each for each in analysis.of("call") if each.name in ("torch.distributed.send", "torch.distributed.recv")]
    for send, receive in pairwise(calls):
        is_exchange = send.name.endswith("send") and receive.name.endswith("recv") and send.frames == receive.frames
        if not is_exchange or send.guards != receive.guards or send.differing_guard is not None:
            continue
        if "uncalled" not in send.contexts and _depends_on_rank(send, "dst") and _depends_on_rank(receive, "src"):
            yield RULE.finding(
                send.location,
                "every rank calls `send` before any rank calls `recv`",
                evidence=[f"every rank receives afterwards ({receive.location})"],
                related=[receive.location],
            )


def _depends_on_rank(event: Event, name: str) -> bool:
    """Whether each rank names another peer."""
    peer = event.call.get(name, 1)
    return peer is not None and peer.depends_on_rank


RULE = Rule(
    "SS313",
    "send-before-receive",
    "error",
    "each rank waits for another one to receive, and all of them wait until the timeout",
    "send with `dist.isend` and wait for it after `dist.recv`, or put both into `dist.batch_isend_irecv`",
    find,
)
