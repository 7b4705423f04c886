"""What no file of the repository may contain: paths of one machine, package indexes, outdated generated parts."""

import fnmatch
import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Split strings, so that this file does not match itself.
MACHINE_SPECIFIC = {
    r"(?<![\w.~$}-])/" + r"(?:work|root)/": "a path of one machine: make it relative, or take it as an argument",
    r"(?i)py" + r"pi\.org|python" + r"hosted\.org|download\.py" + r"torch\.org|npm" + r"js\.org": "the host of a "
    "package index: configure it on the machine, not in the project",
    r"(?i)--(?:extra-)?index" + r"-url|--find" + r"-links": "an option for one package index: leave it to the "
    "configuration of pip",
}


def ignored() -> list[str]:
    """Read .gitignore; the test does not need git."""
    lines = (REPOSITORY / ".gitignore").read_text().splitlines()
    return [".git", *(line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#"))]


def texts(folder: Path, patterns: list[str]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir()):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from texts(path, patterns)
        elif path.is_file():
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a binary file


def found_in(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, reason in MACHINE_SPECIFIC.items():
            if match := re.search(pattern, line):
                yield number, f"{match.group()!r} is {reason}"


@pytest.mark.parametrize(
    "line",
    [
        "cd /" + "work/main",
        "at /" + "root/data",
        "https://py" + "pi.org/simple",
        "pip install --index" + "-url https://x",
    ],
)
def test_machine_specific_text_is_found(line):
    assert len(list(found_in(line))) >= 1


@pytest.mark.parametrize("line", ["src/work/flow.py", "$HOME/work/", "the root of the tree", "a package from PyPI"])
def test_other_text_is_ignored(line):
    assert list(found_in(line)) == []


def test_no_file_contains_machine_specific_text():
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {reason}"
        for path, text in texts(REPOSITORY, ignored())
        for number, reason in found_in(text)
    ]
    assert not found, "\n".join(found)


def test_every_version_is_pinned():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    loose = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line)]
    assert not loose, f"constraints.txt should pin a public version on each line, run `make constraints`: {loose}"
    assert "torch==2.13.0" in pins


@pytest.fixture
def tree(tmp_path):
    """Call tools/tree.py on a page with the given text; return the exit code, the message and the page."""

    def call(option: str, text: str) -> tuple[int, str, str]:
        page = tmp_path / "PAGE.md"
        page.write_text(text)
        command = [sys.executable, "tools/tree.py", option, str(page)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        return ended.returncode, ended.stderr, page.read_text()

    return call


def test_the_tree_is_written_between_its_markers_and_then_passes_the_check(tree):
    code, _, page = tree("--write", "above\n<!-- tree -->\nold\n<!-- /tree -->\nbelow\n")
    assert code == 0
    assert page.startswith("above\n<!-- tree -->\n```\nsrc/\n")
    assert page.endswith("```\n<!-- /tree -->\nbelow\n")
    assert re.search(r"\n    errors\.py +[A-Z].+\n", page)
    assert tree("--check", page)[0] == 0


def test_an_outdated_tree_fails_the_check_and_names_the_command(tree):
    code, message, _ = tree("--check", "<!-- tree -->\nold\n<!-- /tree -->\n")
    assert code == 1
    assert message.endswith("PAGE.md is outdated: run `make tree`\n")


def test_a_page_without_markers_is_an_error(tree):
    code, message, _ = tree("--check", "no tree here\n")
    assert code == 1
    assert message.endswith("PAGE.md has no markers for the tree: add <!-- tree --> and <!-- /tree -->\n")


def test_the_table_of_the_parity_page_has_the_numbers_of_its_picture():
    picture = (REPOSITORY / "docs" / "images" / "parity.svg").read_text()
    drawn = json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", picture, re.DOTALL)[1]))
    page = (REPOSITORY / "docs" / "parity.md").read_text()
    table = page[page.index("| largest difference of a weight after 10 steps") :].partition("\n\n")[0]
    shown = [[cell.strip() for cell in row.strip("|").split("|")[1:]] for row in table.splitlines()[2:]]
    assert len(drawn) == 4
    assert shown == list(drawn.values())
