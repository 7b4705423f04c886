"""The pages keep their word: their code runs on one rank and on two, prints what they show, and names every error."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from samestep import errors
from samestep.cli.main import COMMANDS, samestep
from samestep.cli.recipe_command import recipes
from tests.e2e.pages import PAGES, REPOSITORY, Fence, anchors, fences, links, run_page, sides

pytestmark = pytest.mark.slow

ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
LONG_ENOUGH = 12  # a shorter piece of a message could stand on a page by chance
# What a run says of itself, which pages leave out where it is not the point.
OF_ITSELF = re.compile(r"(?:step [\d,]+(?:/[\d,]+)? \||data workers: |precision: |strategy: ).*\n")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def named(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def code_pages() -> list[Path]:
    return [page for page in PAGES if any(block.runs or block.language == "diff" for block in fences(page.read_text()))]


def as_pattern(shown: str) -> str:
    """What is shown as a regular expression, in which `...` stands for anything on its line."""
    return "".join(".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", shown.rstrip()))


@pytest.mark.parametrize("page", code_pages(), ids=named)
def test_code_of_a_page_prints_what_the_page_shows(ranks, page):
    (printed,) = ranks(1, run_page, page)
    shown = {block.line: block.shown for block in fences(page.read_text())}
    for line, output in printed:
        wanted = shown[line]
        if wanted is not None:
            assert re.fullmatch(as_pattern(wanted), OF_ITSELF.sub("", output).rstrip()), (
                f"{named(page)}, line {line} shows\n{wanted}and its code prints\n{output}"
            )


@pytest.mark.parametrize("page", code_pages(), ids=named)
def test_code_of_a_page_runs_on_two_ranks_as_it_does_on_one(ranks, page):
    ranks(2, run_page, page)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_pages_and_headings_that_exist(page):
    for target in links(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{named(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{named(page)} links to {target}: no heading gives #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_that_is_not_run_says_why(page):
    silent = [block.line for block in fences(page.read_text()) if "{" in block.info and not block.reason]
    assert not silent, f'{named(page)}: lines {silent} need ```python {{.no-run reason="..."}}'


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_on_a_page_exist_with_their_options(page):
    for block in fences(page.read_text()):
        for line in block.text.splitlines() if block.language in ("sh", "bash") else ():
            words = shlex.split(line.replace("\\", ""), comments=True)
            words = words[words.index("samestep") :] if "samestep" in words else []
            if len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in COMMANDS, f"{named(page)}: there is no command {words[1]} ({line})"
                command, rest = resolved(words[1:])
                assert not isinstance(command, click.Group), f"{named(page)}: name one of its commands ({line})"
                asked = {word.partition("=")[0] for word in arguments(rest) if word.startswith("--")}
                unknown = asked - options(command)
                assert not unknown, f"{named(page)}: samestep {command.name} has no {unknown} ({line})"


def resolved(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, through groups such as `checkpoint`, and what is left for it."""
    found: click.Command = samestep
    while isinstance(found, click.Group) and words:
        inner = found.get_command(None, words[0])  # type: ignore[arg-type]
        if inner is None:
            break
        found, words = inner, words[1:]
    return found, words


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"--help"}


def arguments(words: list[str]) -> list[str]:
    """What belongs to the command itself: all before the script or recipe, whose own options are its own business."""
    script = next((at for at, word in enumerate(words) if word.endswith(".py") or word in recipes()), len(words))
    return words[:script]


def test_every_error_has_its_place_on_the_page_of_errors():
    page = (REPOSITORY / "docs" / "errors.md").read_text()
    missing = sorted(name for name in ERRORS if not re.search(rf"^#+ {name}$", page, re.MULTILINE))
    assert not missing, f"docs/errors.md has no heading for {missing}"


def test_the_page_of_errors_draws_the_tree_as_it_is():
    page = (REPOSITORY / "docs" / "errors.md").read_text()
    drawn = next(block.text for block in fences(page) if "SamestepError" in block.text and not block.runs)
    depths = re.findall(r"^([ │├└─]*)(\w+)", drawn, re.MULTILINE)
    tree = {name: len(branch) // 3 for branch, name in depths}
    assert tree == {name: len(getattr(errors, name).__mro__) - len(errors.SamestepError.__mro__) for name in ERRORS}


def messages() -> list[tuple[str, list[str]]]:
    """Every message that the sources raise: its place and the clauses of it that are always the same."""
    found: list[tuple[str, list[str]]] = []
    package = REPOSITORY / "src" / "samestep"
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            if name in ERRORS and isinstance(node, ast.Call) and node.args:
                pieces = [piece for piece in clauses(node.args[0]) if len(piece) >= LONG_ENOUGH]
                if pieces:
                    found.append((f"{path.relative_to(REPOSITORY)}:{node.lineno}", pieces))
    return found


def clauses(message: ast.expr) -> list[str]:
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "\0" for p in parts)
    return [" ".join(clause.split()) for clause in re.split(r"\0|[:;,.] | \(", text)]


def test_every_message_can_be_found_on_the_page_of_errors():
    page = " ".join((REPOSITORY / "docs" / "errors.md").read_text().replace("\\", "").split())
    known = messages()
    assert len(known) > 100, "the messages were not found: what follows would check nothing"
    missing = [
        f"{place}: {max(pieces, key=len)}" for place, pieces in known if not any(piece in page for piece in pieces)
    ]
    assert not missing, "\n".join(["docs/errors.md lacks these messages:", *missing])


def test_output_is_told_from_the_code_it_belongs_to():
    text = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\nb\n```python\nx\n```\nc\n```text\n2\n```\n"
    assert [(block.line, block.language, block.shown) for block in fences(text)] == [
        (3, "python", "1\n"),
        (7, "text", None),
        (11, "python", None),
        (15, "text", None),
    ]


def test_a_block_is_left_out_only_with_a_reason():
    assert Fence("python", "", 1).runs
    assert not Fence('python {.no-run reason="needs a GPU"}', "", 1).runs
    assert Fence('python {.no-run reason="needs a GPU"}', "", 1).reason == "needs a GPU"
    assert Fence("python {.no-run}", "", 1).reason is None


def test_both_sides_of_a_diff_are_scripts():
    assert sides(" a\n-b\n+c\n\n d\n") == ("a\nb\n\nd\n", "a\nc\n\nd\n")


def test_a_command_is_found_through_its_group():
    verify, rest = resolved(["checkpoint", "verify", "out", "--json"])
    assert (verify.name, rest) == ("verify", ["out", "--json"])
    assert "--json" in options(verify)
    assert "--to" not in options(verify)
    lost, rest = resolved(["checkpoint", "mend", "out"])
    assert isinstance(lost, click.Group)
    assert rest == ["mend", "out"]


def test_shown_dots_stand_for_anything_on_a_line():
    assert re.fullmatch(as_pattern("step 0 | ... samples/s\n"), "step 0 | 127 samples/s")
    assert not re.fullmatch(as_pattern("a ... b"), "a 1\n2 b")
