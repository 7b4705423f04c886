"""A checkpoint with the part of one rank.

What it compares: which ranks pass sharded tensors to `torch.save`, line by line. If all ranks do, each saves its own
part.

Fault: `if rank == 0: torch.save(model.state_dict(), "model.pt")` with a model of FSDP2. The state dict has DTensors, of
which each rank holds a part, and the file has that of rank 0.

Repair: let all ranks call `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))`, and save the
result on rank 0; or let all ranks call `torch.distributed.checkpoint.save`.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, counted, first


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for lines that save sharded tensors on some ranks only."""
    saved = [{event["site"]: event for event in trace.of("saved_parts")} for trace in worlds.many]
    for site in dict.fromkeys(site for each in saved for site in each):
        ranks = [rank for rank, each in enumerate(saved) if site in each]
        if len(ranks) < len(saved):
            event = saved[ranks[0]][site]
            yield CHECK.finding(
                first(site),
                f"{event['path']} gets this rank's part of {counted(event['tensors'], 'sharded tensor')}: the parts of "
                f"the other {counted(len(saved) - len(ranks), 'rank')} are not saved",
                ranks=ranks,
            )


CHECK = Check(
    "SS507",
    "incomplete-checkpoint",
    "error",
    "the checkpoint lacks the weights that other ranks hold",
    "let all ranks call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) and save the "
    "result on rank 0, or use torch.distributed.checkpoint.save on all ranks",
    find,
)
