"""The files that lint reads: Python files and notebooks, how they import each other, and comments that ignore rules."""

import ast
import io
import json
import linecache
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from samestep.findings import Location

_SKIPPED: Final = {
    ".git", ".venv", "venv", "env", "node_modules", "__pycache__", "build", "dist", ".tox", ".eggs", "site-packages",
    ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints",
}  # fmt: skip
_IGNORE: Final = re.compile(r"#\s*samestep:\s*ignore(?:\[([\w\s,-]*)\]|\s+(SS\d+\b))?(.*)", re.IGNORECASE)
_MAGIC: Final = re.compile(r"^(\s*)([%!?].*)$")
_DISTRIBUTED: Final = re.compile(
    r"init_process_group|init_device_mesh|DistributedDataParallel|FullyShardedDataParallel|fully_shard|spawn|"
    r"start_processes|Trainer|Accelerator|PartialState|Fabric|samestep"
)
_IMPORT: Final = re.compile(r"^[ \t]*(?:import|from)[ \t]([^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
_ASSIGNED_MAGIC: Final = re.compile(r"^(\s*[\w, ]+=\s*)([%!].*)$")
_PYTHON_MAGICS: Final = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")
_RELEVANT: Final = re.compile(r"\b(torch|lightning|pytorch_lightning|accelerate|samestep)\b")


@dataclass(frozen=True)
class Ignore:
    """A comment that ignores rules on its line, by code, by the beginning of a code or by name."""

    line: int
    codes: frozenset[str]
    reason: str
    is_all: bool = False
    """Whether it ignores all rules: it has no brackets."""

    def covers(self, code: str, name: str) -> bool:
        """Whether it ignores a rule."""
        return self.is_all or any(name == each or code.startswith(each.upper()) for each in self.codes)


@dataclass(eq=False)
class SourceFile:
    """One file."""

    path: Path
    name: str
    """As other files import it; empty if it cannot be imported."""
    text: str
    problem: str = ""
    """Why it cannot be read or parsed; empty if it can."""
    cells: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Of a notebook: number of the cell and its first line, in the joined text."""

    locations: dict[ast.AST, Location] = field(default_factory=dict[ast.AST, Location])
    """Lines and columns of its nodes, as far as they were needed."""

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; an empty one if the file cannot be parsed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in strings
                return ast.parse(self.text, filename=str(self.path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            return ast.Module([], [])

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their ends."""
        return self.text.splitlines()

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return self.path.name == "__init__.py"

    @cached_property
    def is_relevant(self) -> bool:
        """Whether it mentions a package that lint knows."""
        return bool(_RELEVANT.search(self.text))

    @cached_property
    def starts_ranks(self) -> bool:
        """Whether it mentions something that makes a script distributed; without it no rule can find anything."""
        return self.is_relevant and bool(_DISTRIBUTED.search(self.text))

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """What follows `import` or `from` in its import statements, such as "lab.data import load"."""
        return tuple(" ".join(text.split()) for text in _IMPORT.findall(self.text))

    @cached_property
    def imported_words(self) -> frozenset[str]:
        """Words of its import statements: names of modules of the project are among them."""
        return frozenset(word for line in _IMPORT.findall(self.text) for word in _WORD.findall(line))

    @cached_property
    def ignores(self) -> dict[int, Ignore]:
        """Comments that ignore rules, by line."""
        found = dict[int, Ignore]()
        if "samestep:" not in self.text:
            return found
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
                if match:
                    codes = frozenset((match[1] or match[2] or "").replace(",", " ").split())
                    is_all = match[1] is None and match[2] is None
                    found[token.start[0]] = Ignore(token.start[0], codes, match[3].strip(), is_all)
        except (tokenize.TokenError, IndentationError, SyntaxError):
            return found
        return found

    def cell_of(self, line: int) -> tuple[int, int] | None:
        """Of a notebook: the number of the cell of a line, and the line in it."""
        before = [(cell, first) for cell, first in self.cells if first <= line]
        return (before[-1][0], line - before[-1][1] + 1) if before else None


def find_files(paths: Iterable[Path], is_excluded: Callable[[Path], bool] = lambda path: False) -> Iterator[Path]:
    """Python files and notebooks below folders, and files that are named themselves."""
    for path in paths:
        if path.is_dir():
            yield from _walk(path, is_excluded)
        else:
            yield path


def _walk(folder: Path, is_excluded: Callable[[Path], bool]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name in _SKIPPED or is_excluded(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, is_excluded)
        elif entry.suffix in (".py", ".ipynb") and entry.is_file():
            yield entry


def imported_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Further local files that these import, directly or through each other: next to them, or in packages there."""
    known = {file.path.absolute() for file in files}
    found, waiting = list[SourceFile](), list(files)
    while waiting:
        for path in _candidates(waiting.pop()):
            if path not in known:
                known.add(path)
                found.append(read_file(path))
                waiting.append(found[-1])
    return found


def _candidates(file: SourceFile) -> Iterator[Path]:
    """Existing files that the import statements of a file may name; installed packages are left out."""
    folder = file.path.absolute().parent
    root = folder
    while (root / "__init__.py").exists():  # absolute imports begin in the folder of the outermost package
        root = root.parent
    for text in file.imports:
        module, _, names = text.partition(" import ")
        dots = len(module) - len(module.lstrip("."))
        starts = [folder, *folder.parents][dots - 1 : dots] if dots else dict.fromkeys([folder, root])
        modules = [module.strip(" .")] if names else [each.split(" as ")[0].strip() for each in module.split(",")]
        for start in starts:
            if start.name not in ("site-packages", "dist-packages"):
                for each in modules:
                    yield from _files_of(start, each, names)


def _files_of(start: Path, module: str, names: str) -> Iterator[Path]:
    """The file of `a.b` below a folder, those of the packages around it, and of modules that are imported from it."""
    path = start
    for part in filter(None, module.split(".")):
        path /= part
        if (init := path / "__init__.py").is_file():
            yield init
    if module and (source := path.with_suffix(".py")).is_file():
        yield source
    if names and path.is_dir():
        for name in _WORD.findall(names):
            if (source := path / f"{name}.py").is_file():
                yield source


def read_file(path: Path) -> SourceFile:
    """Read a file; one that cannot be read has a `problem`."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode("utf-8-sig" if encoding.startswith("utf-8") else encoding)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        return SourceFile(path, "", "", f"{type(error).__name__}: {error}")
    if path.suffix == ".ipynb":
        return _read_notebook(path, text)
    return SourceFile(path, module_name(path), text)


def module_name(path: Path) -> str:
    """The name by which other files import this one: with its packages, the folders with an __init__.py."""
    parts = [path.stem] if path.stem != "__init__" else []
    folder = path.absolute().parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _read_notebook(path: Path, text: str) -> SourceFile:
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError) as error:
        return SourceFile(path, "", "", f"not a notebook: {type(error).__name__}: {error}")
    lines, positions = list[str](), list[tuple[int, int]]()
    for number, source in enumerate(sources, 1):
        positions.append((number, len(lines) + 1))
        magic = source.split()[0] if source.lstrip().startswith("%%") else ""
        is_other = bool(magic) and magic not in _PYTHON_MAGICS
        lines += ["pass  #" + line if is_other else _without_magic(line) for line in source.splitlines()]
    joined = "\n".join(lines) + "\n"
    # findings show these lines, not those of the JSON file
    linecache.cache[str(path)] = (len(joined), None, joined.splitlines(keepends=True), str(path))
    return SourceFile(path, "", joined, cells=positions)


def _without_magic(line: str) -> str:
    """A line of a notebook as Python: commands of IPython have no effect, what they return is None."""
    line = _MAGIC.sub(r"\1pass  # \2", line)
    line = _ASSIGNED_MAGIC.sub(r"\1None  # \2", line)
    return re.sub(r"^(\s*)([\w.]+\?{1,2})\s*$", r"\1pass  # \2", line)
