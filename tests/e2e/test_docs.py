"""The documentation is correct: its code runs on one rank and on two and prints what the pages show; links work."""

import re
import shlex
from pathlib import Path

import click
import pytest

from samestep.cli.main import COMMANDS, samestep
from samestep.cli.recipe_command import recipes
from tests.e2e.pages import PAGES, REPOSITORY, Fence, anchors, fences, links, run_page, sides

pytestmark = pytest.mark.slow

# Lines that a run prints about itself; pages leave them out unless they are the subject.
RUN_LINES = re.compile(r"(?:step [\d,]+(?:/[\d,]+)? \||data workers: |precision: |strategy: ).*\n")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def label(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def code_pages() -> list[Path]:
    return [page for page in PAGES if any(block.runs or block.language == "diff" for block in fences(page.read_text()))]


def as_pattern(shown: str) -> str:
    """Turn shown output into a regular expression in which `...` matches anything on its line."""
    return "".join(".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", shown.rstrip()))


@pytest.mark.parametrize("page", code_pages(), ids=label)
def test_code_on_a_page_prints_the_output_that_the_page_shows(ranks, page):
    (printed,) = ranks(1, run_page, page)
    shown = {block.line: block.shown for block in fences(page.read_text())}
    for line, output in printed:
        expected = shown[line]
        if expected is not None:
            assert re.fullmatch(as_pattern(expected), RUN_LINES.sub("", output).rstrip()), (
                f"{label(page)}, line {line} shows\n{expected}and its code prints\n{output}"
            )


@pytest.mark.parametrize("page", code_pages(), ids=label)
def test_code_on_a_page_runs_on_two_ranks(ranks, page):
    ranks(2, run_page, page)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_and_images_point_to_files_and_headings_that_exist(page):
    for target in links(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{label(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{label(page)} links to {target}: no heading has #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_code_that_is_not_run_gives_a_reason(page):
    missing = [block.line for block in fences(page.read_text()) if "{" in block.info and not block.reason]
    assert not missing, f'{label(page)}: lines {missing} need ```python {{.no-run reason="..."}}'


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_commands_on_a_page_exist_with_their_options(page):
    for block in fences(page.read_text()):
        for line in block.text.splitlines() if block.language in ("sh", "bash") else ():
            words = shlex.split(line.replace("\\", ""), comments=True)
            words = words[words.index("samestep") :] if "samestep" in words else []
            if len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in COMMANDS, f"{label(page)}: samestep has no command {words[1]} ({line})"
                command, rest = resolve(words[1:])
                assert not isinstance(command, click.Group), f"{label(page)}: the group needs a command ({line})"
                used = {word.partition("=")[0] for word in arguments(rest) if word.startswith("--")}
                unknown = used - options(command)
                assert not unknown, f"{label(page)}: samestep {command.name} has no {unknown} ({line})"


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """Find the command that the words name, through groups such as `checkpoint`, and its remaining words."""
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
    """Return the words that belong to the command itself: those before the script or recipe."""
    is_script = (word == "--" or word.endswith(".py") or word in recipes() for word in words)
    script = next((at for at, found in enumerate(is_script) if found), len(words))
    return words[:script]


def test_a_text_block_is_the_output_of_the_code_before_it():
    text = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\nb\n```python\nx\n```\nc\n```text\n2\n```\n"
    assert [(block.line, block.language, block.shown) for block in fences(text)] == [
        (3, "python", "1\n"),
        (7, "text", None),
        (11, "python", None),
        (15, "text", None),
    ]


def test_a_block_with_a_reason_is_not_run():
    assert Fence("python", "", 1).runs
    assert not Fence('python {.no-run reason="needs a GPU"}', "", 1).runs
    assert Fence('python {.no-run reason="needs a GPU"}', "", 1).reason == "needs a GPU"
    assert Fence("python {.no-run}", "", 1).reason is None


def test_a_diff_is_split_into_two_scripts():
    assert sides(" a\n-b\n+c\n\n d\n") == ("a\nb\n\nd\n", "a\nc\n\nd\n")


def test_a_command_is_resolved_through_its_group():
    verify, rest = resolve(["checkpoint", "verify", "out", "--json"])
    assert (verify.name, rest) == ("verify", ["out", "--json"])
    assert "--json" in options(verify)
    assert "--to" not in options(verify)
    group, rest = resolve(["checkpoint", "repair", "out"])
    assert isinstance(group, click.Group)
    assert rest == ["repair", "out"]


def test_three_dots_match_anything_on_a_line():
    assert re.fullmatch(as_pattern("step 0 | ... samples/s\n"), "step 0 | 127 samples/s")
    assert not re.fullmatch(as_pattern("a ... b"), "a 1\n2 b")


def named_functions() -> list[tuple[str, str]]:
    """Read (module, function) from the tables of the architecture page and from the pictures of the three ways."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", page, re.MULTILINE)
    found = [(module, name) for module, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    for picture in (REPOSITORY / "docs" / "images").glob("way-*.svg"):
        found += re.findall(r">([\w/]+\.py)</text>\n<text[^>]*>([^<]+)</text>", picture.read_text())
    return found


def test_the_architecture_page_names_functions_that_exist():
    named = named_functions()
    assert len(named) > 40, "the tables or pictures were not found, so this test would check nothing"
    missing = [f"{module} has no {name}" for module, name in named if name.split(".")[-1] not in definitions(module)]
    assert not missing, "\n".join(["docs/architecture.md and tools/diagrams.py need an update:", *missing])


def definitions(module: str) -> set[str]:
    path = REPOSITORY / "src" / "samestep" / module
    return set(re.findall(r"^\s*(?:def|class) (\w+)", path.read_text(), re.MULTILINE)) if path.exists() else set()
