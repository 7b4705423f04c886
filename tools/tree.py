"""The tree shown in README: every module with the first line of its docstring.

`python tools/tree.py` prints it, `--write README.md` puts it between the two markers there and `--check README.md`
fails where the markers hold something else. A module's entry is written in that module and nowhere else.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPEN, CLOSE = "<!-- tree -->", "<!-- /tree -->"
INDENT = "  "

# Folders whose files need no line each: a recipe, a page or a test is found by its name.
FOLDERS = {
    "recipes": "Scripts read in one sitting, with public names only.",
    "docs": "Quickstart, one page a task, the errors, the reference.",
    "benchmarks": "One script a claim of speed.",
    "tools": "What make calls: the demo and this tree.",
    "tests": "By what a test needs: unit, ranks, launch, elastic, slurm, recipes, lightning, e2e, architecture, gpu.",
}


class TreeError(Exception):
    """The tree cannot be drawn or does not stand where it should; the message says what to do."""


def first_line(module: Path) -> str:
    """Give the one subject of a module, as its docstring opens with it."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise TreeError(f"{module.relative_to(ROOT)} has no docstring: open it with one line that says its subject")
    return docstring.splitlines()[0]


def entries(package: Path, depth: int) -> Iterator[tuple[str, str]]:
    """Walk a package: its own line, its modules, then the packages in it."""
    yield f"{INDENT * depth}{package.name}/", first_line(package / "__init__.py")
    for module in sorted(package.glob("*.py")):
        if module.name != "__init__.py":
            yield f"{INDENT * (depth + 1)}{module.name}", first_line(module)
    for inner in sorted(package.iterdir()):
        if inner.is_dir() and any(inner.glob("*.py")):
            if not (inner / "__init__.py").exists():
                raise TreeError(f"{inner.relative_to(ROOT)}/ has no __init__.py: add one that says what it is for")
            yield from entries(inner, depth + 1)


def has_pages(folder: Path) -> bool:
    """Tell whether anything to read lies in a folder, at any depth."""
    return any(path.suffix in {".py", ".md"} for path in folder.rglob("*"))


def draw(root: Path) -> str:
    """Draw the tree as aligned lines."""
    rows = [("src/", ""), *entries(root / "src" / "samestep", 1)]
    # git keeps no empty folder, so one that is empty here must not be shown: a fresh clone would draw another tree
    rows += [(f"{name}/", line) for name, line in FOLDERS.items() if has_pages(root / name)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{line}".rstrip() for name, line in rows)


def replace(text: str, tree: str) -> str:
    """Put the tree between the markers of a page."""
    before, opened, rest = text.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    if not (opened and closed):
        raise TreeError(f"the page has no place for the tree: put {OPEN} and {CLOSE} where it should stand")
    return f"{before}{OPEN}\n```\n{tree}\n```\n{CLOSE}{after}"


def main(arguments: list[str]) -> int:
    """Print, write or check the tree; the exit status is 1 where something is wrong."""
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
        wanted = replace(text, tree)
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
    if options.write:
        page.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print(f"the tree in {page} is not that of the modules: run `make tree`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
