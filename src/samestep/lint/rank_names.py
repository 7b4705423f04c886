"""Names of the rank and of the number of ranks: variables, attributes, decorators."""

from dataclasses import replace
from typing import Final

from samestep.findings import Location
from samestep.lint.values import InstanceValue, MethodValue, Taint, Value

RANK_NAMES: Final = frozenset({
    "rank", "local_rank", "global_rank", "ddp_rank", "ddp_local_rank", "world_rank", "proc_id", "process_index",
    "rank_id", "gpu_rank", "node_rank", "process_rank", "my_rank", "process_id", "local_process_index",
    "distributed_rank",
})  # fmt: skip
MAIN_NAMES: Final = frozenset({
    "is_main", "is_master", "is_main_process", "is_rank0", "is_rank_zero", "master_process", "main_process",
    "is_global_zero", "is_local_main_process", "is_root", "is_chief", "rank_zero", "is_rank_0", "is_last_process",
    "is_primary",
})  # fmt: skip
WORLD_NAMES: Final = frozenset({
    "world_size", "distributed", "ddp", "is_distributed", "use_ddp", "num_processes", "ngpus", "n_gpus", "multi_gpu",
    "ddp_world_size", "world", "num_gpus", "use_distributed", "is_ddp",
})  # fmt: skip
RANK_DECORATORS: Final = frozenset({
    "rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only", "master_only",
})  # fmt: skip
RANK_VARIABLES: Final = frozenset({
    "RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_NODEID",
})  # fmt: skip
_NODE_VARIABLES: Final = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
WORLD_VARIABLES: Final = frozenset({
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "SLURM_NNODES",
})  # fmt: skip
GUESSED_NAMES: Final = RANK_NAMES | MAIN_NAMES | WORLD_NAMES
NAMESPACE: Final = "argparse.Namespace"
COUNTER: Final = "range()"
"""The name of a number that a loop counts: `for rank in range(n)` is not about the rank of this process."""
_VARIABLE: Final = "the rank comes from "


def guess(name: str, location: Location) -> Value:
    """A value of unknown origin, by its name: `rank` is the rank, `world_size` the number of ranks."""
    if name in RANK_NAMES or name in MAIN_NAMES:
        return Value(
            location, (Taint("rank", location, f"`{name}` is the rank", "local" in name, name == "node_rank"),)
        )
    return Value(location, is_world=name in WORLD_NAMES)


def named(value: Value, name: str, location: Location) -> Value:
    """A value that is bound to a name: if its origin is unknown, the name decides what it is."""
    if len(value.taints) == 1 and value.taints[0].text.startswith(_VARIABLE):
        variable = value.taints[0].text.removeprefix(_VARIABLE)
        return replace(value, taints=(replace(value.taints[0], text=f"`{name}` comes from {variable}"),))
    if name not in GUESSED_NAMES or value.taints or value.is_world or value.is_known or value.name == COUNTER:
        return value
    if type(value) is Value or (isinstance(value, MethodValue) and _is_unknown(value.owner)):
        found = guess(name, location)
        return replace(value, taints=found.taints, is_world=found.is_world)
    return value


def _is_unknown(owner: Value | None) -> bool:
    return type(owner) is Value or (isinstance(owner, InstanceValue) and owner.qualname == NAMESPACE)


def named_result(function: str, value: Value, location: Location) -> Value:
    """The result of a function that lint cannot follow: `is_main_process()` and `get_rank()` say what it is.

    `get_local_rank()` may be that of a DeviceMesh, which is the rank in a dimension of the mesh, not on a node.
    """
    found = named(value, function.removeprefix("get_"), location)
    return replace(found, taints=tuple(replace(each, is_local=False) for each in found.taints))


def environment_value(name: str, location: Location) -> Value:
    """An environment variable, which may be one that a launcher sets."""
    if name in RANK_VARIABLES:
        return Value(
            location, (Taint("rank", location, f"{_VARIABLE}{name}", "LOCAL" in name, name in _NODE_VARIABLES),)
        )
    return Value(location, is_world=name in WORLD_VARIABLES)
