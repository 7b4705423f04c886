"""Parse and run the pages of the documentation: code blocks, the output shown below them, links and headings."""

import contextlib
import gc
import io
import multiprocessing
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NO_RUN = re.compile(r"\{\.no-run reason=\"(?P<reason>[^\"]+)\"\}")


@dataclass(frozen=True)
class Fence:
    """One fenced code block."""

    info: str
    """The text after the opening fence."""
    text: str
    """The text between the fences."""
    line: int
    """The number of its first line on the page, from 1."""
    shown: str | None = None
    """The output that the page shows for it: a `text` block that follows, with only blank lines in between."""

    @property
    def language(self) -> str:
        """The first word of the info."""
        return self.info.split()[0] if self.info.split() else ""

    @property
    def runs(self) -> bool:
        """Whether the test runs this block."""
        return self.language == "python" and "{" not in self.info

    @property
    def reason(self) -> str | None:
        """Why the test does not run this block, or None if the page gives no reason."""
        match = _NO_RUN.search(self.info)
        return match["reason"] if match else None


def fences(text: str) -> list[Fence]:
    """Find every code block of a page, each with the output that the page shows for it."""
    found = list(_FENCE.finditer(text))
    blocks: list[Fence] = []
    for at, match in enumerate(found):
        after = found[at + 1] if at + 1 < len(found) else None
        follows = after is not None and after["info"] == "text" and not text[match.end() : after.start()].strip()
        line = text.count("\n", 0, match.start("text")) + 1
        blocks.append(Fence(match["info"].strip(), match["text"], line, after["text"] if after and follows else None))
    return blocks


def links(text: str) -> list[str]:
    """Find the targets of all links and images outside of code blocks."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """Compute the anchors of a page: those of its headings, and those written as {#name} or id="name"."""
    body = _FENCE.sub("", text)
    written = set(re.findall(r"\{ ?#([\w\-]+)[^}]*\}|id=\"([\w\-]+)\"", body))
    headings = re.findall(r"^#+ +(.+)$", body, re.MULTILINE)
    plain = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return plain | {name for names in written for name in names if name}


def sides(diff: str) -> tuple[str, str]:
    """Split a diff that shows a complete script into the script before and the script after."""
    lines = diff.splitlines(keepends=True)
    before, after = (
        [line[1:] if line[:1] in " +-" else line for line in lines if line[:1] != other] for other in ("+", "-")
    )
    return "".join(before), "".join(after)


def run_page(page: Path) -> list[tuple[int, str]]:
    """Run the code blocks of a page in one namespace; return the line and the printed output of each. For a warm rank.

    Of a diff, the script before runs on one rank only. On several ranks all runs of a page share one process group, so
    that they can use one port.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    with _process_group(names), _start_method("fork"):
        printed: list[tuple[int, str]] = []
        for block in fences(page.read_text()):
            if block.language == "diff":
                before, after = sides(block.text)
                if "RANK" not in os.environ:
                    with warnings.catch_warnings(action="ignore"):  # libraries other than samestep may warn
                        _run(before, f"{page.name}, before the diff", block.line, {"__name__": "__main__"})
                printed.append((block.line, _run(after, page.name, block.line, names)))
            elif block.runs:
                printed.append((block.line, _run(block.text, page.name, block.line, names)))
        return printed


def _run(code: str, name: str, line: int, names: dict[str, object]) -> str:
    """Run code so that a traceback shows the line numbers of the page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (line - 1) + code, name, "exec"), names)
    return out.getvalue()


@contextlib.contextmanager
def _start_method(name: str):
    """Start data workers with fork, as scripts do on Linux: a worker cannot import what a page defines."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(name, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def _process_group(names: dict[str, object]):
    import torch.distributed as dist

    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    yield
    names.clear()
    gc.collect()  # a DDP wrapper that outlives its process group can hang the next one
    if several:
        dist.destroy_process_group()
