"""How a rank communicates: process groups, and every call of torch.distributed with its tensors and its line."""

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from samestep.environment.world import read_environ
from samestep.verify.recorder.fingerprints import leaves, small_values
from samestep.verify.recorder.recorder import Recorder, wrap_all
from samestep.verify.recorder.spawned_ranks import request_spawn

COLLECTIVES: Final = (
    "all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "all_gather_coalesced", "gather", "gather_object", "scatter", "scatter_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
    "monitored_barrier",
)  # fmt: skip
STATE_DICTS: Final = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "set_model_state_dict")
"""Of torch.distributed.checkpoint.state_dict: they gather the shards of all ranks."""
POINT_TO_POINT: Final = ("send", "recv", "isend", "irecv")
STORE_CALLS: Final = ("set", "get", "wait", "multi_set", "multi_get")
_MAX_STORE_CALLS: Final = 4000


class CollectiveObserver:
    """Follows the process groups of this process and its calls of torch.distributed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls = self._depth = self._inits = self._store_calls = 0
        self._groups: dict[int, int] = {}
        self._destroy: Callable[[], None] | None = None  # of a group that the script has destroyed

    def install(self) -> None:
        """Observe every call from now on."""
        owners = (dist, dist.distributed_c10d)
        wrap_all(owners, [*COLLECTIVES, *POINT_TO_POINT], self._observe)
        wrap_all(owners, ["init_process_group"], self._observe_init)
        wrap_all(owners, ["destroy_process_group"], self._observe_destroy)
        wrap_all(owners, ["new_group"], self._observe_new_group)
        wrap_all(owners, ["is_initialized"], self._observe_is_initialized)
        wrap_all([DTensor], ["full_tensor"], self._observe)
        wrap_all([state_dict], STATE_DICTS, self._observe)
        wrap_all([dist.Store], STORE_CALLS, self._observe_store)

    def _observe(self, name: str, original: Callable[..., Any]) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if self._depth or recorder.is_quiet:
                return original(*args, **kwargs)
            number, self._calls = self._calls, self._calls + 1
            tensors = self._describe(name, args, kwargs)
            if name == "set_model_state_dict":
                tensors["copies"] = _is_needless_copy(args, kwargs)
            recorder.write("collective", n=number, name=name, site=recorder.site(), **tensors)
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            is_async = kwargs.get("async_op", False) or name in ("isend", "irecv")
            if name == "reduce" and not is_async:
                self._invalidate(tensors["root"], args, kwargs)
            value = None if is_async else _value_after(name, args, kwargs)
            recorder.write("collective_end", n=number, value=value, is_async=is_async)
            return result

        return call

    def _observe_store(self, name: str, original: Callable[..., Any]) -> Any:
        """Note the keys that this rank sets or has waited for: a store orders what ranks do, as a barrier does."""

        @wraps(original)
        def call(store: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(store, keys, *args, **kwargs)
            if not self._recorder.is_quiet and not self._depth and self._store_calls < _MAX_STORE_CALLS:
                self._store_calls += 1
                action = "set" if name in ("set", "multi_set") else "get"
                self._recorder.write("store", action=action, keys=[keys] if isinstance(keys, str) else list(keys))
            return result

        return call

    def _invalidate(self, root: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fill what dist.reduce has left on ranks that do not get the result: torch does not say what it is."""
        tensor = args[0] if args else kwargs.get("tensor")
        if root is not None and dist.get_rank() != root and isinstance(tensor, Tensor) and tensor.is_floating_point():
            with self._recorder.quiet(), torch.no_grad():
                tensor.fill_(float("nan"))

    def _describe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        with self._recorder.quiet():
            tensors = [each for each in leaves([args, kwargs]) if isinstance(each, Tensor)]
            source = _input(name, args, kwargs)
            operation = next(
                (each for each in (*args, *kwargs.values()) if isinstance(each, dist.ReduceOp.RedOpType)), None
            )
            group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
            return {
                "group": self._name(group),
                "shapes": [list(each.shape) for each in tensors[:4]],
                "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors[:4]],
                "source": None if source is None else [list(source.shape), str(source.dtype)],
                "op": str(operation or ("sum" if name in ("all_reduce", "reduce") else "")).rpartition(".")[2].lower(),
                "value": small_values(source),
                "root": _root(name, args, kwargs),
                "grad": source is not None and source.requires_grad and torch.is_grad_enabled(),
            }

    def _name(self, group: Any) -> str:
        """The name of a group: "world" if all ranks are in it."""
        if group is None or not dist.is_initialized() or dist.get_world_size(group) == dist.get_world_size():
            return "world"
        return str(self._groups.setdefault(id(group), len(self._groups)))

    def _observe_init(self, name: str, original: Callable[..., Any]) -> Any:
        @wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if not recorder.settings.spawns and not recorder.is_own_process:
                request_spawn(recorder)
            if self._destroy is not None:
                destroy, self._destroy = self._destroy, None
                destroy()
            kwargs = self._rewrite(original, args, kwargs)
            recorder.write("init", state="start", site=recorder.site())
            self._wait_for_all(**kwargs)
            result = original(**kwargs)
            if recorder.rank is None:
                recorder.rank = dist.get_rank()
            recorder.write(
                "init", state="end", rank=dist.get_rank(), size=dist.get_world_size(), backend=dist.get_backend(),
                pid=os.getpid(),
            )  # fmt: skip
            return result

        return init

    def _wait_for_all(self, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta, **_: Any) -> None:
        """Wait until all ranks are here: gloo itself waits 30 seconds only, whatever the timeout of the group is."""
        with self._recorder.quiet():
            store.set(f"samestep/{rank}", "here")
            store.wait([f"samestep/{each}" for each in range(world_size)], timeout)

    def _rewrite(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let the group use gloo, a file instead of a port, which may be taken, and a timeout that verify outlives."""
        settings = self._recorder.settings
        names = list(inspect.signature(original).parameters)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if settings.device == "cpu":
            kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
        limit = timedelta(seconds=settings.timeout)
        kwargs["timeout"] = min(kwargs.get("timeout") or limit, limit)
        if kwargs.get("store") is None:
            environment = read_environ()
            rank = kwargs.get("rank", -1) if kwargs.get("rank", -1) >= 0 else int(environment["RANK"])
            size = kwargs.get("world_size", -1) if kwargs.get("world_size", -1) > 0 else int(environment["WORLD_SIZE"])
            self._inits += 1
            store = dist.FileStore(f"{settings.folder}/store-{self._inits}", size)
            kwargs = {**kwargs, "store": store, "rank": rank, "world_size": size}
            kwargs.pop("init_method", None)
        return kwargs

    def _observe_destroy(self, name: str, original: Callable[..., Any]) -> Any:
        @wraps(original)
        def destroy(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._recorder.write("destroy", site=self._recorder.site())
            if group is None or group is dist.group.WORLD:
                self._destroy = original  # at the next init: the end of gloo may hang, and the process ends soon

        return destroy

    def _observe_is_initialized(self, name: str, original: Callable[..., Any]) -> Any:
        return wraps(original)(lambda: original() and self._destroy is None)

    def _observe_new_group(self, name: str, original: Callable[..., Any]) -> Any:
        @wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if not recorder.is_quiet and not self._depth:
                members = args[0] if args else kwargs.get("ranks")
                recorder.write(
                    "group", site=recorder.site(), ranks=str(members),
                    is_part=members is not None and len(members) < dist.get_world_size(),
                    is_local=bool(args[4] if len(args) > 4 else kwargs.get("use_local_synchronization")),
                )  # fmt: skip
            if self._recorder.settings.device == "cpu" and kwargs.get("backend") is not None:
                kwargs["backend"] = "gloo"
            return original(*args, **kwargs)

        return new_group


def _input(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What this rank contributes: the tensor, or the second argument of calls that first name where to put it."""
    if name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        names = ("tensor", "input_tensor", "input")
        found = args[1] if len(args) > 1 else next((kwargs[each] for each in names if each in kwargs), None)
    else:
        found = args[0] if args else kwargs.get("tensor")
    return found if isinstance(found, Tensor) else None


def _is_needless_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this rank passes a state although that of rank 0 is sent to all ranks."""
    state = args[1] if len(args) > 1 else kwargs.get("model_state_dict")
    return bool(state) and dist.get_rank() > 0 and bool(getattr(kwargs.get("options"), "broadcast_from_rank0", False))


def _root(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The rank that sends or receives, which must be the same on all ranks."""
    if name not in (
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        *POINT_TO_POINT,
    ):
        return None
    named = next(
        (kwargs[each] for each in ("src", "dst", "group_src", "group_dst") if kwargs.get(each) is not None), None
    )
    position = 1 if name in ("broadcast", "broadcast_object_list", "reduce", *POINT_TO_POINT) else 2
    found = named if named is not None else args[position] if len(args) > position else 0
    return found if isinstance(found, int) else None


def _value_after(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float] | None:
    return (
        small_values(args[0] if args else kwargs.get("tensor"))
        if name in ("all_reduce", "reduce", "broadcast")
        else None
    )
