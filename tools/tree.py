"""The tree of modules in docs/architecture.md: every module with the first line of its docstring.

`python tools/tree.py` prints it, `--write PAGE` puts it between the markers of a page, and `--check PAGE` fails if the
page shows another tree.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPEN, CLOSE = "<!-- tree -->", "<!-- /tree -->"
INDENT = "  "
SITE = "sitecustomize.py"
ON_PYTHON_PATH = "A folder for PYTHONPATH, not a package: Python runs the file in it when it starts."

# Folders with one line for all their files.
FOLDERS = {
    "recipes": "Short training scripts that use public names only.",
    "docs": "Getting started, how-to guides, concepts, reference.",
    "benchmarks": "Scripts behind the published performance numbers.",
    "tools": "The demo, this tree, plots, the wording check, tests and benchmarks on a GPU.",
    "tests": "Tests: unit, ranks, launch, elastic, slurm, recipes, scripts, lightning, faults, e2e, gpu.",
}


class TreeError(Exception):
    """The tree cannot be drawn or written; the message says what to do."""


def first_line(module: Path) -> str:
    """Return the first line of the docstring of a module."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise TreeError(f"{module.relative_to(ROOT)} has no docstring: start it with a line that says what it is for")
    return docstring.splitlines()[0]


def entries(package: Path, depth: int) -> Iterator[tuple[str, str]]:
    """Walk a package: its own line, its modules, then its subpackages."""
    own = package / "__init__.py"
    yield f"{INDENT * depth}{package.name}/", first_line(own) if own.exists() else ON_PYTHON_PATH
    for module in sorted(package.glob("*.py")):
        if module.name != "__init__.py":
            yield f"{INDENT * (depth + 1)}{module.name}", first_line(module)
    for inner in sorted(package.iterdir()):
        if inner.is_dir() and any(inner.glob("*.py")):
            if not (inner / "__init__.py").exists() and [path.name for path in inner.glob("*.py")] != [SITE]:
                raise TreeError(f"{inner.relative_to(ROOT)}/ has no __init__.py: add one that says what it is for")
            yield from entries(inner, depth + 1)


def has_pages(folder: Path) -> bool:
    """Whether a folder contains any Python file or page."""
    return any(path.suffix in {".py", ".md"} for path in folder.rglob("*"))


def draw(root: Path) -> str:
    """Draw the tree as aligned lines."""
    rows = [("src/", ""), *entries(root / "src" / "samestep", 1)]
    # git does not keep empty folders: showing one would make the tree of a fresh clone differ
    rows += [(f"{name}/", line) for name, line in FOLDERS.items() if has_pages(root / name)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{line}".rstrip() for name, line in rows)


def replace(page: Path, text: str, tree: str) -> str:
    """Put the tree between the markers of a page."""
    before, opened, rest = text.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    if not (opened and closed):
        raise TreeError(f"{page} has no markers for the tree: add {OPEN} and {CLOSE}")
    return f"{before}{OPEN}\n```\n{tree}\n```\n{CLOSE}{after}"


def main(arguments: list[str]) -> int:
    """Print, write or check the tree; return the exit status."""
    parser = argparse.ArgumentParser(description="Draw the tree of samestep from the first line of every module.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="PAGE", help="put the tree between the markers of this page")
    action.add_argument("--check", type=Path, metavar="PAGE", help="fail if this page shows another tree")
    options = parser.parse_args(arguments)
    try:
        tree = draw(ROOT)
        page: Path | None = options.write or options.check
        if page is None:
            print(tree)
            return 0
        text = page.read_text(encoding="utf-8")
        updated = replace(page, text, tree)
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
    if options.write:
        page.write_text(updated, encoding="utf-8")
    elif text != updated:
        print(f"the tree in {page} is outdated: run `make tree`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
