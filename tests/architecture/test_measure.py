"""The measures that the budgets rest on, each shown something to find and something to leave alone."""

import re

import pytest

from tests.architecture import measure
from tests.architecture.measure import Module
from tests.architecture.test_budgets import FIXED_NAMES, FORBIDDEN, words


def module(text, name="samestep.sample", path="samestep/sample.py"):
    return Module(path, name, text)


def function(text):
    return next(module(text).functions)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("def f(): return 1", 1),
        ("def f(x):\n if x: return 1\n elif x > 2: return 3", 3),
        ("def f(x): return x and x or x", 3),
        ("def f(x): return [y for y in x if y]", 2),
        ("def f(x): return 1 if x else 2", 2),
        ("def f(x):\n while x:\n  try: x()\n  except OSError: pass", 3),
        ("def f(x):\n match x:\n  case 1: pass\n  case _: pass", 3),
    ],
)
def test_each_fork_is_one_more_path(text, paths):
    assert measure.complexity(function(text)) == paths


def test_a_definition_is_as_long_as_its_lines():
    assert measure.length(function("@decorated\ndef f():\n    a = 1\n\n    return a\n")) == 4


def test_the_percentile_leaves_out_the_largest_share():
    assert measure.percentile(range(1, 102), 0.95) == 96
    assert measure.percentile([], 0.95) == 0


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
def test_a_function_is_typed_when_all_of_it_is(text, typed):
    assert measure.is_typed(function(text)) is typed


def test_self_is_not_a_parameter_and_stars_are():
    assert [given.arg for given in measure.parameters(function("def f(self, a, /, b, *c, d, **e): ..."))] == list(
        "abdce"
    )


def test_public_names_without_docstring_are_found():
    text = "class A:\n def f(self): ...\n def _g(self): ...\n @overload\n def h(self): ...\ndef k():\n 'Say.'\n"
    assert sorted(node.name for node in measure.undocumented(module(text))) == ["A", "f"]


def test_properties_and_private_methods_do_not_count_as_public_methods():
    text = (
        "class Run:\n def a(self): ...\n @property\n def b(self): ...\n def _c(self): ...\n @overload\n def a(s): ..."
    )
    assert measure.public_methods(next(module(text).classes)) == ["a"]


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
        ("except Exception: return give(up)", 0),
        ("except OSError: pass", 0),
        ("except Exception as error: tell(error)", 0),
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


def test_the_largest_cycle_is_named():
    texts = {"p": "", "p.a": "from p import b", "p.b": "from .c import x", "p.c": "import p.a", "p.d": "import p.a"}
    modules = [module(text, name, name.replace(".", "/") + ".py") for name, text in texts.items()]
    assert measure.largest_cycle(measure.import_graph(modules)) == ["p.a", "p.b", "p.c"]


def test_imports_that_only_look_down_have_no_cycle():
    modules = [module("import p.b", "p.a"), module("import p.c", "p.b"), module("", "p.c")]
    assert measure.largest_cycle(measure.import_graph(modules)) == []


def test_names_are_split_into_words():
    assert words("HTTPHandler") == {"http", "handler"}
    assert words("database") == {"database"}
    assert words("core_utils") == {"core", "utils"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("the master saves", True),
        ("the main process saves", True),
        ("a batch size of 4", True),
        ("the global batch size", False),
        ("environ['MASTER_ADDR'], --master-port, master_addr=, is_master=", False),
        ("MASTER_ADDR belongs to the master", True),
        ("DataLoader(batch_size=4)", False),
    ],
)
def test_words_that_are_not_of_the_house_are_found(line, found):
    assert any(re.search(pattern, FIXED_NAMES.sub("", line)) for pattern in FORBIDDEN) is found
