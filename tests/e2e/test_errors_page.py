"""docs/errors.md lists every message of samestep: quoted as the source has it, with a cause and a fix."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from samestep import errors
from tests.e2e.pages import REPOSITORY, anchors, fences

PAGE = REPOSITORY / "docs" / "errors.md"
SOURCES = sorted((REPOSITORY / "src" / "samestep").rglob("*.py"))
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
OTHER_SECTIONS = {"SamestepWarning", "Notices"}  # not exceptions, listed in the same way
PLACEHOLDER = "…"
SHORTEST = 12  # a message with less fixed text is built elsewhere and cannot be recognized

_ENTRY = re.compile(r"^### (`+)(?P<quote>[^\n]+?)\1\n\n(?P<text>.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (?P<name>\w+)$\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One message on the page."""

    section: str
    quote: str
    text: str


@dataclass(frozen=True)
class Message:
    """One call of an exception class with a literal message."""

    where: str
    exception: str
    text: str


def entries() -> list[Entry]:
    return [
        Entry(section["name"], entry["quote"].strip(), entry["text"])
        for section in _SECTION.finditer(PAGE.read_text())
        for entry in _ENTRY.finditer(section["text"])
    ]


def normalized(node: ast.expr) -> str:
    """The text of a string or f-string in one line, with `…` for what is computed."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = normalized(node.left) + normalized(node.right)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(normalized(part) for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        text = PLACEHOLDER
    return re.sub(rf"{PLACEHOLDER}+", PLACEHOLDER, re.sub(r"\s+", " ", text))


def strings() -> set[str]:
    """Every string of the sources."""
    nodes = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return {normalized(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant)}


def messages() -> Iterator[Message]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                text = normalized(node.args[0])
                if len(text.replace(PLACEHOLDER, "").strip()) >= SHORTEST:
                    yield Message(f"{path.relative_to(REPOSITORY)}:{node.lineno}", node.func.id, text)


def test_every_exception_has_a_section():
    sections = {match["name"] for match in _SECTION.finditer(PAGE.read_text())}
    assert sections >= CLASSES | OTHER_SECTIONS


def test_the_tree_of_exceptions_is_the_one_in_the_source():
    shown = next(block.text for block in fences(PAGE.read_text()) if "SamestepError" in block.text and not block.runs)
    depths = re.findall(r"^([ │├└─]*)(\w+)", shown, re.MULTILINE)
    tree = {name: len(branch) // 3 for branch, name in depths}
    assert tree == {name: len(getattr(errors, name).__mro__) - len(errors.SamestepError.__mro__) for name in CLASSES}


def test_every_quoted_message_occurs_in_the_source():
    known = strings()
    stale = [f"{entry.section}: {entry.quote}" for entry in entries() if not any(entry.quote in text for text in known)]
    assert not stale, "\n".join(["docs/errors.md quotes messages that samestep does not have:", *stale])


def test_every_message_of_the_source_has_an_entry():
    known = list(messages())
    assert len(known) > 100, "found too few messages: this test would check nothing"
    listed = entries()
    missing = [
        f"{message.where}: {message.exception}: {message.text}"
        for message in known
        if not any(entry.quote in message.text and entry.section == message.exception for entry in listed)
    ]
    assert not missing, "\n".join(["docs/errors.md has no entry, in the section of the exception, for:", *missing])


def test_every_entry_has_a_cause_and_a_fix_and_its_own_anchor():
    listed = entries()
    incomplete = [entry.quote for entry in listed if "**Cause.**" not in entry.text or "**Fix.**" not in entry.text]
    assert not incomplete
    assert len({(entry.section, entry.quote) for entry in listed}) == len(listed)
    assert len(anchors(PAGE.read_text())) > len(listed) * 0.95


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('"no folder"', "no folder"),
        ('f"keep={keep!r} must be at least {least}"', "keep=… must be at least …"),
        ('f"{a}{b} is empty" " here"', "… is empty here"),
        ('"a " + reason + "\\n  b"', "a … b"),
    ],
)
def test_placeholders_are_normalized(code, text):
    assert normalized(ast.parse(code, mode="eval").body) == text
