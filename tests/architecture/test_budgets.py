"""The budgets of the house: size, paths, types, documentation, words; each failure names the place and the remedy."""

import ast
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture import measure
from tests.architecture.measure import Module

REPOSITORY = Path(__file__).resolve().parents[2]

FILE_MOST, FILE_MEDIAN = 400, 150
CLASS_MOST = 200
FUNCTION_MOST, FUNCTION_P95 = 60, 30
COMPLEXITY_MOST = 10
PARAMETERS_MOST = 10
RUN_METHODS_MOST = 14
RUN = ("samestep.training.run", "Run")
ENVIRONMENT_READER = "src/samestep/facts/world.py"

# Names that say what a thing is used as, never what it is.
EMPTY_WORDS = {
    "util",
    "utils",
    "utility",
    "utilities",
    "helper",
    "helpers",
    "manager",
    "managers",
    "handler",
    "handlers",
}
EMPTY_WORDS |= {"mixin", "mixins", "common", "core", "base"}
# torch and torchrun have no other names for these.
FIXED_NAMES = re.compile(r"(?i)\b(?:master[_-](?:addr|port)|is_master)\b")
FORBIDDEN = {
    r"(?i)master": "say first rank",
    r"(?i)main[ _-]process": "say first rank",
    r"(?i)(?<!global )(?<!micro-)\bbatch size": "say global batch or micro-batch",
}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = measure.read_package(REPOSITORY / "src" / "samestep")
    assert found, "no module was found under src/samestep: what follows would check nothing"
    return found


def no(places: Iterable[str], remedy: str) -> None:
    listed = sorted(places)
    assert not listed, "\n".join([f"{len(listed)} to mend: {remedy}", *listed])


def words(name: str) -> set[str]:
    """Split a snake_case or CamelCase name: SignalHandler holds handler, database holds no base."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def test_no_file_is_too_long(modules):
    long = (f"{module.path}: {module.lines} lines" for module in modules if module.lines > FILE_MOST)
    no(long, f"a file has at most {FILE_MOST} lines; give its second subject a module of its own")


def test_half_of_the_files_are_short(modules):
    median = statistics.median(module.lines for module in modules)
    assert median <= FILE_MEDIAN, f"the median file has {median} lines, more than {FILE_MEDIAN}: split the longest"


def test_no_class_is_too_long(modules):
    classes = ((module, node) for module in modules for node in module.classes)
    long = (
        f"{module.place(node)}: {size} lines" for module, node in classes if (size := measure.length(node)) > CLASS_MOST
    )
    no(long, f"a class has at most {CLASS_MOST} lines; move what needs no state into functions")


def test_no_function_is_too_long(modules):
    functions = ((module, node) for module in modules for node in module.functions)
    long = (
        f"{module.place(node)}: {size} lines"
        for module, node in functions
        if (size := measure.length(node)) > FUNCTION_MOST
    )
    no(long, f"a function has at most {FUNCTION_MOST} lines; name its parts and call them")


def test_nearly_all_functions_are_short(modules):
    lengths = {module.place(node): measure.length(node) for module in modules for node in module.functions}
    p95 = measure.percentile(lengths.values(), 0.95)
    longest = sorted(lengths, key=lambda place: -lengths[place])[:10]
    assert p95 <= FUNCTION_P95, f"one function in twenty has {p95} lines or more, not {FUNCTION_P95}: shorten {longest}"


def test_no_function_has_too_many_paths(modules):
    functions = ((module, node) for module in modules for node in module.functions)
    tangled = (
        f"{module.place(node)}: {paths} paths"
        for module, node in functions
        if (paths := measure.complexity(node)) > COMPLEXITY_MOST
    )
    no(tangled, f"a function has at most {COMPLEXITY_MOST} paths; make the cases a table or give them functions")


def test_no_function_takes_too_much(modules):
    functions = ((module, node) for module in modules for node in module.functions)
    greedy = (
        f"{module.place(node)}: {count} parameters"
        for module, node in functions
        if (count := len(measure.parameters(node))) > PARAMETERS_MOST
    )
    no(greedy, f"a function takes at most {PARAMETERS_MOST} parameters; put those that belong together in a dataclass")


def test_every_function_is_typed(modules):
    untyped = (module.place(node) for module in modules for node in module.functions if not measure.is_typed(node))
    no(untyped, "give every parameter and the result a type")


def test_every_public_name_is_documented(modules):
    silent = (module.place(node) for module in modules for node in measure.undocumented(module))
    no(silent, "give it a docstring that says what its signature does not, or a name that starts with _")


def test_every_module_opens_with_its_subject(modules):
    silent = (module.path for module in modules if not ast.get_docstring(module.tree))
    no(silent, "open the module with a docstring whose first line says its one subject; README's tree shows it")


def test_no_module_leads_back_to_itself(modules):
    cycle = measure.largest_cycle(measure.import_graph(modules))
    assert not cycle, f"these modules import each other: {cycle}; move what both need into one below them"


def test_one_file_reads_the_environment(modules):
    others = (module for module in modules if module.path != ENVIRONMENT_READER)
    reads = (module.place(node) for module in others for node in measure.environment_reads(module))
    no(reads, f"only {ENVIRONMENT_READER} touches the environment; let it hand over the value")


def test_run_stays_a_facade(modules):
    found = [node for module in modules for node in module.classes if (module.name, node.name) == RUN]
    assert len(found) == 1, f"there should be one class {RUN[1]} in the module {RUN[0]}: {len(found)} were found"
    methods = measure.public_methods(found[0])
    assert len(methods) <= RUN_METHODS_MOST, (
        f"Run has {len(methods)} public methods, at most {RUN_METHODS_MOST}; make it a function or the method of "
        f"what Run returns: {methods}"
    )


def test_names_say_what_a_thing_is(modules):
    named = [(module.path, module.name.rpartition(".")[2]) for module in modules]
    named += [(module.place(node), node.name) for module in modules for node in module.classes]
    empty = (f"{place}: {sorted(found)}" for place, name in named if (found := words(name) & EMPTY_WORDS))
    no(empty, "name a module or class by what it is, not by what it is used as")


def test_the_words_of_the_house_are_used(modules):
    found = [
        f"{module.path}:{number}: {match.group()!r}: {remedy}"
        for module in modules
        for number, line in enumerate(FIXED_NAMES.sub("", module.text).splitlines(), start=1)
        for pattern, remedy in FORBIDDEN.items()
        if (match := re.search(pattern, line))
    ]
    no(found, "use the words of the house in code, comments and messages")


def test_no_exception_is_swallowed(modules):
    silent = (module.place(node) for module in modules for node in measure.swallowed(module))
    no(silent, "catch what you expect and do something about it, or let it pass on")
