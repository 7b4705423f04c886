"""The measurements that the limits rest on: each has something to find and something to ignore."""

import pytest

from tests.architecture import measure
from tests.architecture.measure import Module
from tests.architecture.test_structure import words


def module(text, name="samestep.sample", path="samestep/sample.py"):
    return Module(path, name, text)


def function(text):
    return next(module(text).functions)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("def f(): return 1", 1),
        ("def f(x):\n if x: return 1\n elif x > 2: return 3", 3),
        ("def f(x): return [y for y in x if y] or None", 1),
        ("def f(x):\n while x:\n  try: x()\n  except OSError: pass", 3),
        ("def f(x):\n match x:\n  case 1: pass\n  case _: pass", 3),
    ],
)
def test_each_branching_statement_adds_a_path(text, paths):
    assert measure.complexity(function(text)) == paths


def test_the_length_of_a_definition_excludes_decorators():
    assert measure.length(function("@decorated\ndef f():\n    a = 1\n\n    return a\n")) == 4


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("def f(x: int) -> int: ...", True),
        ("def f(x) -> int: ...", False),
        ("def f(x: int): ...", False),
        ("def f(*x, **y) -> int: ...", False),
        ("def f(self, *, x: int) -> int: ...", True),
        ("def __init__(self, x: int): ...", True),
    ],
)
def test_a_function_is_typed_if_all_parameters_and_the_result_are(text, typed):
    assert measure.is_typed(function(text)) is typed


def test_parameters_include_stars_and_exclude_self():
    found = [argument.arg for argument in measure.parameters(function("def f(self, a, /, b, *c, d, **e): ..."))]
    assert found == list("abdce")


def test_public_names_without_a_docstring_are_found():
    text = "class A:\n def f(self): ...\n def _g(self): ...\n @overload\n def h(self): ...\n"
    text += "def k():\n 'Doc.'\n def local(): ...\n"
    assert sorted(node.name for node in measure.undocumented(module(text))) == ["A", "f"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import os\nos.environ['A']", 1),
        ("import os\nos.getenv('A')", 1),
        ("import os as system\nsystem.environ.get('A')", 1),
        ("from os import environ", 1),
        ("def f():\n    import os\n    return os.environ", 1),
        ("import os\nos.getpid()", 0),
        ("world.environ", 0),
    ],
)
def test_reads_of_the_environment_are_found(text, count):
    assert len(list(measure.environment_reads(module(text)))) == count


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except: raise", 1),
        ("except Exception: pass", 1),
        ("except (OSError, Exception): return None", 1),
        ("except BaseException: ...", 1),
        ("except Exception: return", 1),
        ("except Exception: return b''", 0),
        ("except Exception: return default()", 0),
        ("except OSError: pass", 0),
        ("except Exception as error: report(error)", 0),
        ("except Exception: raise", 0),
    ],
)
def test_swallowed_exceptions_are_found(handler, count):
    text = f"def f():\n    try:\n        g()\n    {handler}\n"
    assert len(list(measure.swallowed(module(text)))) == count


def test_only_imports_that_run_on_loading_are_counted():
    text = """
import a
from .sibling import thing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import unseen
try:
    import b
except ImportError:
    import c
class K:
    import d
def f():
    import late
"""
    names = {name for _, name in measure.loaded_names(module(text))}
    assert names == {"a", "samestep.sibling.thing", "typing.TYPE_CHECKING", "b", "c", "d"}


def test_implementations_of_a_protocol_have_all_its_members():
    text = """
class Store(Protocol[T]):
    size: int
    def put(self, value): ...
class Folder:
    size = 0
    def put(self, value): ...
class Bucket(Folder): ...
class Queue:
    def __init__(self): self.size = 0
    def put(self, value): ...
class Set:
    def put(self, value): ...
"""
    assert measure.implementations([module(text)]) == {"samestep/sample.py:2 Store": ["Bucket", "Folder", "Queue"]}


def test_names_are_split_into_words():
    assert words("HTTPHandler") == {"http", "handler"}
    assert words("database") == {"database"}
    assert words("core_utils") == {"core", "utils"}
