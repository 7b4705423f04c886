"""Limits on the structure of src/samestep: sizes, branches, names, protocols, types, documentation.

Each failure lists the places and says what to do.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture import measure
from tests.architecture.measure import Module

REPOSITORY = Path(__file__).resolve().parents[2]

# Of training itself; the tools that check scripts, explain hangs and show runs have limits of their own.
MAX_MODULES, MAX_LINES = 150, 41_500  # raise MAX_LINES only for a new feature, never for a repair
TOOLS = {
    "verify": ("samestep.verify", "samestep.cli.verify_command", "samestep.pytest_plugin", "samestep.findings"),
    "lint": ("samestep.lint", "samestep.cli.lint_command"),
    "hang": (
        "samestep.hang",
        "samestep.launch.hang_exchange",
        "samestep.launch.hang_monitor",
        "samestep.launch.straggler_watch",
        "samestep.launch.wait_timer",
        "samestep.cli.hang_command",
    ),
    "report": ("samestep.report", "samestep.cli.report_command", "samestep.cli.runs_command"),
}
MAX_TOOL_LINES = {
    "verify": 11_600,
    "lint": 18_420,
    "hang": 4_650,
    "report": 2_620,
}  # with the pages of checks and rules
MAX_FILE_LINES, MIN_FILE_LINES = 600, 50
MAX_CLASS_LINES = 300
MAX_FUNCTION_LINES, MAX_COMPLEXITY = 60, 10
ENVIRONMENT_PACKAGE = "samestep.environment"
MEANINGLESS_NAMES = {"util", "utils", "utility", "utilities", "helper", "helpers", "common", "misc"}

# A check or a rule is a module, however short: its docstring is its page.
PAGES = ("src/samestep/verify/checks/", "src/samestep/lint/rules/")
# Other modules below MIN_FILE_LINES: path -> why it is a module anyway.
SHORT_MODULES: dict[str, str] = {
    "src/samestep/hang/startup/sitecustomize.py": "its folder is on the path of other programs, so it is alone in it",
    "src/samestep/parallel/dropout_kernel.py": "Triton compiles its source, which is not type-checked like the rest",
}
# Modules outside of ENVIRONMENT_PACKAGE that read environment variables: name -> why.
ENVIRONMENT_READERS: dict[str, str] = {
    "samestep.hang.startup.sitecustomize": "runs in any Python process below a launcher and must not import samestep",
}
# Protocols with fewer than two implementations in src: name -> who implements it.
OPEN_PROTOCOLS: dict[str, str] = {}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = measure.read_package(REPOSITORY / "src" / "samestep")
    assert found, "found no module in src/samestep, so these tests would check nothing"
    return found


def assert_none(places: Iterable[str], remedy: str) -> None:
    listed = sorted(places)
    assert not listed, "\n".join([f"{len(listed)} found: {remedy}", *listed])


def is_part(module: Module, names: tuple[str, ...]) -> bool:
    return any(module.name == name or module.name.startswith(f"{name}.") for name in names)


def test_training_stays_small(modules):
    tools = tuple(name for names in TOOLS.values() for name in names)
    training = [module for module in modules if not is_part(module, tools)]
    lines = sum(module.lines for module in training)
    assert len(training) <= MAX_MODULES, f"src has {len(training)} modules, at most {MAX_MODULES}: merge small ones"
    assert lines <= MAX_LINES, f"src has {lines} lines, at most {MAX_LINES}: remove what is duplicated or unused"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_stays_small(modules, tool):
    lines = sum(module.lines for module in modules if is_part(module, TOOLS[tool]))
    assert 0 < lines <= MAX_TOOL_LINES[tool], f"{tool} has {lines} lines, at most {MAX_TOOL_LINES[tool]}"


def test_no_file_is_too_long(modules):
    long = (f"{module.path}: {module.lines} lines" for module in modules if module.lines > MAX_FILE_LINES)
    assert_none(long, f"a file has at most {MAX_FILE_LINES} lines; move one subject to another module")


def test_every_short_module_has_a_reason(modules):
    short = {
        module.path: module.lines
        for module in modules
        if module.lines < MIN_FILE_LINES
        and Path(module.path).stem not in ("__init__", "__main__")
        and not module.path.startswith(PAGES)
    }
    unlisted = (f"{path}: {lines} lines" for path, lines in short.items() if path not in SHORT_MODULES)
    assert_none(unlisted, f"a module below {MIN_FILE_LINES} lines belongs into another, or into SHORT_MODULES")
    assert_none(SHORT_MODULES.keys() - short.keys(), "remove these from SHORT_MODULES: they are no longer short")


def test_module_names_are_unique(modules):
    names = Counter(Path(module.path).stem for module in modules)
    repeated = {name for name, count in names.items() if count > 1 and name not in ("__init__", "__main__")}
    found = (module.path for module in modules if Path(module.path).stem in repeated)
    assert_none(found, "give each module a unique name")


def test_no_class_is_too_long(modules):
    classes = ((module, node) for module in modules for node in module.classes)
    long = (
        f"{module.location(node)}: {size} lines"
        for module, node in classes
        if (size := measure.length(node)) > MAX_CLASS_LINES
    )
    assert_none(long, f"a class has at most {MAX_CLASS_LINES} lines; move what needs no state into functions")


def test_no_function_is_too_long(modules):
    functions = ((module, node) for module in modules for node in module.functions)
    long = (
        f"{module.location(node)}: {size} lines"
        for module, node in functions
        if (size := measure.length(node)) > MAX_FUNCTION_LINES
    )
    assert_none(long, f"a function has at most {MAX_FUNCTION_LINES} lines; name its parts and call them")


def test_no_function_has_too_many_branches(modules):
    functions = ((module, node) for module in modules for node in module.functions)
    complex_ones = (
        f"{module.location(node)}: {paths} paths"
        for module, node in functions
        if (paths := measure.complexity(node)) > MAX_COMPLEXITY
    )
    assert_none(complex_ones, f"a function has at most {MAX_COMPLEXITY} paths; use a table, or a function per case")


def test_every_protocol_has_two_implementations(modules):
    few = {location: classes for location, classes in measure.implementations(modules).items() if len(classes) < 2}
    unlisted = {location: few[location] for location in few if location.split()[-1] not in OPEN_PROTOCOLS}
    found = (f"{location}: implemented by {', '.join(classes) or 'no class'}" for location, classes in unlisted.items())
    assert_none(found, "use the class itself; if users or other packages implement it, say so in OPEN_PROTOCOLS")
    assert_none(OPEN_PROTOCOLS.keys() - {location.split()[-1] for location in few}, "remove these from OPEN_PROTOCOLS")


def test_every_function_is_typed(modules):
    untyped = (module.location(node) for module in modules for node in module.functions if not measure.is_typed(node))
    assert_none(untyped, "give every parameter and the result a type")


def test_every_public_name_is_documented(modules):
    undocumented = (module.location(node) for module in modules for node in measure.undocumented(module))
    assert_none(undocumented, "add a docstring that says what the signature does not, or start the name with _")


def test_every_module_has_a_docstring(modules):
    undocumented = (module.path for module in modules if not ast.get_docstring(module.tree))
    assert_none(undocumented, "start the module with a line that says what it is for; docs/architecture.md shows it")


def test_imports_follow_the_layers_without_cycles():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert ended.returncode == 0, ended.stdout


def test_one_package_reads_the_environment(modules):
    others = [module for module in modules if not module.name.startswith(ENVIRONMENT_PACKAGE)]
    assert ENVIRONMENT_READERS.keys() <= {module.name for module in others}, "remove modules that do not exist"
    unlisted = (module for module in others if module.name not in ENVIRONMENT_READERS)
    reads = (module.location(node) for module in unlisted for node in measure.environment_reads(module))
    assert_none(reads, f"only {ENVIRONMENT_PACKAGE} reads environment variables; take the value from there")


def test_names_say_what_a_thing_is(modules):
    named = [(module.path, module.name.rpartition(".")[2]) for module in modules]
    named += [(module.location(node), node.name) for module in modules for node in module.classes]
    found = (f"{place}: {sorted(hits)}" for place, name in named if (hits := words(name) & MEANINGLESS_NAMES))
    assert_none(found, "name a module or class after what it is")


def test_no_exception_is_swallowed(modules):
    silent = (module.location(node) for module in modules for node in measure.swallowed(module))
    assert_none(silent, "catch the exceptions that you expect and handle them, or let them propagate")


def words(name: str) -> set[str]:
    """Split a snake_case or CamelCase name: SignalHandler contains handler, database does not contain base."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}
