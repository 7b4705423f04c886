"""Built-in functions, containers, iterators and clocks."""

import ast
from dataclasses import replace
from typing import Any, Final

from samestep.lint.events import source_text
from samestep.lint.library.call import Call, known_function, known_method
from samestep.lint.library.data_library import length_of
from samestep.lint.library.operations import element
from samestep.lint.library.partitions import is_distinct, unordered_source
from samestep.lint.library.tensor_library import IS_SHARD
from samestep.lint.project_calls import call_function, create
from samestep.lint.rank_names import COUNTER, NAMESPACE
from samestep.lint.values import (
    ClassValue,
    ContainerValue,
    ExternalValue,
    FunctionValue,
    InstanceValue,
    IteratorValue,
    LoaderValue,
    SampleCount,
    Taint,
    TensorValue,
    Value,
    merge_taints,
    options_of,
    sources_of,
)

IS_OWN: Final = "differs between processes"
"""The end of the text of a taint: each process chooses it for itself."""


@known_function("dict")
def _dict(call: Call) -> Value:
    """`dict(a=1)` and `dict(other, a=1)`."""
    source = call.arguments[0] if call.arguments else None
    if source is not None and not call.keywords:
        return source
    items = dict[Any, Value](source.items) if isinstance(source, ContainerValue) else {}
    return ContainerValue(call.location, call.taints, items=items | call.keywords)


@known_function("isinstance", "hasattr", "issubclass", "callable", "type")
def _type_of(call: Call) -> Value:
    """What kind of object something is; ranks differ in it only if some of them have None."""
    options = options_of(call.arguments[0]) if call.arguments else []
    absent = [each for each in options if each.constant is None]
    tested = call.arguments[1] if call.name == "isinstance" and len(call.arguments) > 1 else None
    if isinstance(tested, ExternalValue) and tested.qualname.endswith(".DTensor") and any(map(_is_shard, options)):
        return Value(call.location, assumed=True)  # it knows of its other shards, so the script is right to ask
    return Value(call.location, merge_taints(absent), name=call.name)


def _is_shard(value: Value) -> bool:
    return any(each.text.endswith(IS_SHARD) for each in value.taints)


@known_function(
    "int", "float", "str", "bool", "abs", "round", "max", "min", "list", "tuple", "reversed", "iter", "typing.cast",
)  # fmt: skip
def _pass_on(call: Call) -> Value:
    """A conversion: what is known of the argument is known of the result."""
    if not call.arguments:
        return call.unknown_result()
    if call.last == "cast":
        return call.arguments[-1]
    if call.last in ("min", "max") and len(call.arguments) > 1:
        unknown = [each for each in call.arguments if not each.is_known]
        return next((each for each in unknown if each.differs), (unknown or call.arguments)[0])
    return call.arguments[0]


@known_function("next")
def _next(call: Call) -> Value:
    if call.arguments:
        call.emit("next", source=call.arguments[0])
    return element(call.run, call.arguments[0], call.node) if call.arguments else Value(call.location)


@known_function(
    "enumerate", "zip", "tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "rich.progress.track", "itertools.cycle",
)  # fmt: skip
def _iterator(call: Call) -> Value:
    return IteratorValue(call.location, merge_taints(call.arguments), kind=call.last, sources=tuple(call.arguments))


@known_function("set", "frozenset", "os.listdir", "os.scandir", "glob.glob", "glob.iglob")
def _unordered(call: Call) -> Value:
    containers = [each for source in call.arguments for each in sources_of(source) if isinstance(each, ContainerValue)]
    items = [item for each in containers for item in each.values()]
    is_unordered = call.package != "" or not _are_numbers(call, items)
    if call.package:
        call.emit("read", path=call.arguments[0] if call.arguments else Value(), how=call.name)
    return ContainerValue(
        call.location, call.taints, items=dict(enumerate(items[:1])), is_unordered=is_unordered, name=call.name,
        order_from=call.location if call.arguments else None,
    )  # fmt: skip


def _are_numbers(call: Call, items: list[Value]) -> bool:
    """Whether a set has numbers, whose order is the same in all processes, or nothing yet."""
    if not call.arguments:
        return True
    sources = [each for argument in call.arguments for each in sources_of(argument)]
    if any(isinstance(key, str) for each in sources if isinstance(each, ContainerValue) for key in each.items):
        return False  # the keys of a dictionary
    return any(
        isinstance(each, TensorValue)
        or each.name == COUNTER
        or (each.is_known and isinstance(each.constant, int | float))
        for each in (*call.arguments, *items)
    )


@known_function("sorted")
def _sorted(call: Call) -> Value:
    source = call.arguments[0] if call.arguments else Value()
    items = dict(source.items) if isinstance(source, ContainerValue) else {}
    name = source.name if is_distinct(source) else ""
    return ContainerValue(call.location, source.taints, items=items, is_unordered=False, name=name)


@known_function("len")
def _length(call: Call) -> Value:
    source = call.arguments[0] if call.arguments else Value()
    count = SampleCount(source)
    if isinstance(source, ContainerValue) and source.length is not None:
        return Value(call.location, constant=source.length, sample_count=count)
    if isinstance(source, TensorValue) and source.length is not None and not source.taints:
        return Value(call.location, constant=source.length, sample_count=count)
    if isinstance(source, TensorValue):
        return TensorValue(call.location, source.taints, is_count=True, name="len")
    if isinstance(source, InstanceValue) and not source.differs and (length := length_of(call, source)) is not None:
        return Value(call.location, constant=length, sample_count=count)
    if isinstance(source, InstanceValue) and _is_equal_share(call, source):
        return Value(call.location, is_world=True)
    taints = source.taints if isinstance(source, LoaderValue | InstanceValue) else ()
    return Value(call.location, taints, sample_count=count)


def _is_equal_share(call: Call, source: InstanceValue) -> bool:
    """Whether `__len__` of an object of this rank returns a number divided by the number of ranks."""
    method = source.class_value.method("__len__", source) if source.class_value is not None and source.differs else None
    length = call_function(call.run, method, [], {}, call.node) if method is not None else None
    return length is not None and length.is_world and not length.differs


@known_function("sum")
def _sum(call: Call) -> Value:
    """The sum of tensors is a tensor: a mean if they are means."""
    source = call.arguments[0] if call.arguments else Value()
    items = list(source.values()) if isinstance(source, ContainerValue) else []
    tensors = [each for each in items if isinstance(each, TensorValue)]
    if not tensors:
        return call.unknown_result()
    return TensorValue(
        call.location, call.taints, needs_grad=any(each.needs_grad for each in tensors),
        is_mean=any(each.is_mean for each in tensors), is_count=all(each.is_count for each in tensors),
        parts=tuple(tensors), name="sum",
    )  # fmt: skip


@known_function("signal.signal")
def _signal(call: Call) -> Value:
    """What a handler sets: a signal reaches some processes, or all of them at different steps."""
    own = Taint("data", call.location, "a signal reaches each process at another time")
    flag = Value(call.location, (own,), name="signal")
    for handler in options_of(call.get("handler", 1)):
        if isinstance(handler, FunctionValue) and isinstance(handler.node, ast.FunctionDef) and handler.module:
            shared = {name for each in ast.walk(handler.node) if isinstance(each, ast.Global) for name in each.names}
            handler.module.scope.names |= dict.fromkeys(shared, flag)
            for each in ast.walk(handler.node):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and handler.owner is not None:
                    call.run.set_attribute(handler.owner, each.attr, flag)
    return Value(call.location)


@known_function("print")
def _print(call: Call) -> Value:
    call.emit("print", arguments=call.arguments)
    return Value(call.location)


@known_function(
    "datetime.datetime.now", "datetime.now", "datetime.datetime.today", "datetime.date.today",
    "datetime.datetime.utcnow", "time.time", "time.strftime", "time.time_ns", "time.localtime", "time.asctime",
    "time.ctime", "time.gmtime", "time.perf_counter", "time.monotonic", "time.process_time",
)  # fmt: skip
def _clock(call: Call) -> Value:
    return Value(call.location, name="clock", clock=call.location)


@known_function(
    "uuid.uuid4", "uuid.uuid1", "os.getpid", "secrets.token_hex", "tempfile.mkdtemp", "tempfile.mkstemp",
    "tempfile.TemporaryDirectory", "tempfile.NamedTemporaryFile", "tempfile.TemporaryFile", "socket.gethostname",
    "platform.node",
)  # fmt: skip
def _own(call: Call) -> Value:
    own = Taint("data", call.location, f"`{source_text(call.node)}` {IS_OWN}")
    return Value(call.location, (own,), name=call.name)


@known_method("container", "append", "extend", "add", "update", "insert")
@known_method("value", "append")
def _append(call: Call, owner: Value) -> Value:
    owner.taints = merge_taints([owner, *call.arguments])
    if isinstance(owner, ContainerValue):
        for value in call.arguments:
            if call.last in ("extend", "update") and isinstance(value, ContainerValue):
                owner.items |= {key if isinstance(key, str) else len(owner.items) + key: item
                                for key, item in value.items.items() if isinstance(key, str | int)}  # fmt: skip
            else:
                owner.items[len(owner.items)] = value
        owner.length = None
        _lose_order(call, owner)
    return Value(call.location)


def _lose_order(call: Call, owner: ContainerValue) -> None:
    """Items that are added in a loop over a folder or a set have its order; a set of text has none."""
    if call.last in ("add", "update") and owner.name in ("set", "frozenset"):
        inner = [item for each in call.arguments if isinstance(each, ContainerValue) for item in each.values()]
        owner.is_unordered = owner.is_unordered or not _are_numbers(call, inner)
        return
    sources = [unordered_source(each) for each in call.arguments] if call.last == "extend" else []
    for loop in call.run.loops:
        is_inside = owner.location is not None and owner.location.line > loop.location.line
        if not is_inside or owner.location is None or owner.location.function != loop.location.function:
            sources.append(unordered_source(loop.iterable))
    found = next((each for each in sources if each is not None), None)
    if found is not None:
        owner.is_unordered, owner.order_from, owner.name = True, found.order_from, owner.name or found.name


@known_method("container", "sort")
def _sort(call: Call, owner: Value) -> Value:
    if isinstance(owner, ContainerValue):
        owner.is_unordered, owner.order_from = False, None
    return Value(call.location)


@known_method("container", "index")
def _index(call: Call, owner: Value) -> Value:
    if isinstance(owner, ContainerValue) and owner.is_unordered:
        call.emit("by_position", container=owner)
    return Value(call.location)


@known_method("value", "parse_args", "parse_known_args")
def _parse_arguments(call: Call, owner: Value) -> Value:
    """The arguments of the command line: an object whose attributes the script may set."""
    arguments = InstanceValue(call.location, qualname=NAMESPACE)
    return arguments if call.last == "parse_args" else ContainerValue(call.location, items={0: arguments, 1: Value()})


@known_function("argparse.Namespace")
def _namespace(call: Call) -> Value:
    return InstanceValue(call.location, qualname=NAMESPACE, attributes=dict(call.keywords))


@known_function("hash")
def _hash(call: Call) -> Value:
    """Python salts the hash of a text, so that each process gets its own."""
    call.emit("call", name="hash", arguments=call.arguments, keywords=call.keywords)
    node = call.node.args[0] if call.node.args else None
    is_joined = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
    is_text = (
        is_joined or isinstance(node, ast.JoinedStr) or any(isinstance(each.constant, str) for each in call.arguments)
    )
    own = (Taint("data", call.location, f"`{source_text(call.node)}` {IS_OWN}"),) if is_text else ()
    return Value(call.location, (*call.taints, *own), name="hash")


@known_function("collections.defaultdict")
def _defaultdict(call: Call) -> Value:
    """A dictionary whose values are made by a class or function of the project, or by `list` and the like."""
    factory = call.get("default_factory", 0)
    made = _make(call, factory) if factory is not None else None
    return ContainerValue(call.location, items={} if made is None else {0: made})


def _make(call: Call, factory: Value) -> Value | None:
    if isinstance(factory, ClassValue):
        return create(call.run, factory, [], {}, call.node)
    return call_function(call.run, factory, [], {}, call.node) if isinstance(factory, FunctionValue) else None


@known_method("container", "get", "pop", "setdefault")
def _get(call: Call, owner: Value) -> Value:
    key = call.arguments[0] if call.arguments else None
    if isinstance(owner, ContainerValue) and key is not None and isinstance(key.constant, str | int):
        found = owner.items.get(key.constant)
        if found is not None:
            return found
    return call.unknown_result(owner)


@known_method("value", "items", "keys", "elements", "most_common")
def _counted(call: Call, owner: Value) -> Value:
    """`Counter(words).items()` has each word once, as the Counter has."""
    result = call.unknown_result(owner)
    return replace(result, name=owner.name) if is_distinct(owner) else result


@known_method("container", "values", "keys", "items")
def _views(call: Call, owner: Value) -> Value:
    """Loops over a dictionary; `items()` gives pairs."""
    items = list(owner.values()) if isinstance(owner, ContainerValue) else []
    first = items[0] if items else Value(taints=owner.taints)
    names = [Value(call.location, constant=key) for key in owner.items] if isinstance(owner, ContainerValue) else []
    if call.last == "items":
        rows = [ContainerValue(items={0: name, 1: item}, length=2) for name, item in zip(names, items, strict=True)]
        if rows and all(isinstance(each.constant, str) for each in names):
            return ContainerValue(call.location, owner.taints, items=dict(enumerate(rows)), length=len(rows))
        first = ContainerValue(items={0: Value(), 1: first}, length=2)
    elif call.last == "keys":
        first = Value()
    is_unordered = isinstance(owner, ContainerValue) and owner.is_unordered
    return ContainerValue(call.location, owner.taints, items={0: first}, is_unordered=is_unordered)
