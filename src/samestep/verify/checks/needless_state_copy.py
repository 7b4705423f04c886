"""A full state dict on every rank, although rank 0 sends it.

What it compares: what the ranks pass to `set_model_state_dict` with `broadcast_from_rank0=True`. Only rank 0 needs it.

Fault: `state = torch.load(path)` on every rank: eight copies of the full model in the memory of one node.

Repair: `state = torch.load(path) if rank == 0 else {}`.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.source import argument, assigned, call_named


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for ranks that pass a state dict which is not used."""
    for trace in worlds.many:
        for call in trace.collectives:
            location = first(call.site)
            if call.is_needless_copy and location is not None:
                node = call_named(location, ["set_model_state_dict"])
                state = argument(node, "model_state_dict", 1) if node is not None else None
                yield CHECK.finding(
                    assigned(location, state) if state is not None else location,
                    f"rank {trace.rank} passes a full state dict to {call.name}, which uses only that of rank 0",
                    ranks=[trace.rank],
                    related=[location],
                )
                return


CHECK = Check(
    "SS703",
    "needless-state-copy",
    "warning",
    "every rank holds a copy of the full model in host memory, which may not fit",
    "load the state dict on rank 0 and pass an empty one on the other ranks",
    find,
)
