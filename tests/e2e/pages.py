"""The pages as tests see them: code in fences, the output shown beneath it, links and headings."""

import contextlib
import gc
import io
import multiprocessing
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
STAND_IN = Path(__file__).parent / "stand_in"

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NO_RUN = re.compile(r"\{\.no-run reason=\"(?P<reason>[^\"]+)\"\}")


@dataclass(frozen=True)
class Fence:
    """One block between fences."""

    info: str
    """What stands behind the opening fence."""
    text: str
    """What stands between the fences."""
    line: int
    """The line of its first line of text, from 1."""
    shown: str | None = None
    """The output that the page shows for it: a fence named `text` that follows with nothing but blank lines between."""

    @property
    def language(self) -> str:
        """The first word of the info."""
        return self.info.split()[0] if self.info.split() else ""

    @property
    def runs(self) -> bool:
        """Whether it is Python that is to be run."""
        return self.language == "python" and "{" not in self.info

    @property
    def reason(self) -> str | None:
        """Why it is not run; None where no reason is given."""
        match = _NO_RUN.search(self.info)
        return match["reason"] if match else None


def fences(text: str) -> list[Fence]:
    """Every block of a page, each with the output that is shown for it."""
    found = list(_FENCE.finditer(text))
    blocks: list[Fence] = []
    for at, match in enumerate(found):
        after = found[at + 1] if at + 1 < len(found) else None
        follows = after is not None and after["info"] == "text" and not text[match.end() : after.start()].strip()
        line = text.count("\n", 0, match.start("text")) + 1
        blocks.append(Fence(match["info"].strip(), match["text"], line, after["text"] if after and follows else None))
    return blocks


def links(text: str) -> list[str]:
    """Targets of all links outside of code."""
    return [match["target"] for match in _LINK.finditer(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def sides(diff: str) -> tuple[str, str]:
    """The script before and after a diff that shows all of it."""
    lines = diff.splitlines(keepends=True)
    before, after = (
        [line[1:] if line[:1] in " +-" else line for line in lines if line[:1] != other] for other in ("+", "-")
    )
    return "".join(before), "".join(after)


def run_page(page: Path) -> list[tuple[int, str]]:
    """Run the blocks of a page in one namespace; the line and the printed output of each. For a warm rank.

    A page may open several runs. On several ranks they share one process group, so that they follow each other on one
    port.
    """
    sys.path.insert(0, str(STAND_IN))
    names: dict[str, object] = {"__name__": "__main__"}
    with _one_group(names), _start_method("fork"):
        printed: list[tuple[int, str]] = []
        for block in fences(page.read_text()):
            if block.language == "diff":
                before, after = sides(block.text)
                if "RANK" not in os.environ:
                    _run(before, f"{page.name}, before the diff", block.line, {"__name__": "__main__"})
                printed.append((block.line, _run(after, page.name, block.line, names)))
            elif block.runs:
                printed.append((block.line, _run(block.text, page.name, block.line, names)))
        return printed


def _run(code: str, name: str, line: int, names: dict[str, object]) -> str:
    """Run code whose traceback shall name the line of the page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (line - 1) + code, name, "exec"), names)
    return out.getvalue()


@contextlib.contextmanager
def _start_method(name: str):
    """Start data workers as a script does on Linux: what is defined on a page cannot be imported by a worker."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(name, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def _one_group(names: dict[str, object]):
    import torch.distributed as dist

    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    yield
    names.clear()
    gc.collect()  # a wrapper that outlives its group can hang the next one
    if several:
        dist.destroy_process_group()
