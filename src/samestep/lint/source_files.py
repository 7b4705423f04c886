"""The files that lint reads: Python files and notebooks, how they import each other, and comments that ignore rules."""

import ast
import io
import linecache
import os
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from samestep.findings import Location
from samestep.lint.notebooks import read_cells, split_lines

_SKIPPED: Final = {
    ".git", ".venv", "venv", "env", "node_modules", "__pycache__", "build", "dist", ".tox", ".eggs", "site-packages",
    ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints",
}  # fmt: skip
_IGNORE: Final = re.compile(
    r"#\s*samestep:\s*ignore\b(?:\s*\[(?P<codes>[^\]]*)\]|\s+(?P<code>SS\d+\b)|(?P<unclosed>\s*\[))?(?P<reason>.*)",
    re.IGNORECASE,
)
_DISTRIBUTED: Final = re.compile(
    r"init_process_group|init_device_mesh|DistributedDataParallel|FullyShardedDataParallel|fully_shard|spawn|"
    r"start_processes|Trainer|Accelerator|PartialState|Fabric|samestep"
)
_ABOUT_RANKS: Final = (
    "rank", "dist.", "torch.distributed", "world_size", "is_main", "is_global_zero", "ddp", "DDP", "fsdp", "FSDP",
    "fully_shard", "FullyShard", "DistributedSampler", "set_epoch", "barrier", "all_reduce", "all_gather",
    "accelerator", "Accelerator", "fabric", "Fabric", "trainer", "Trainer", "samestep",
)  # fmt: skip
_RUNS: Final = re.compile(r"^(?:if __name__|for |while |with |async |[A-Za-z_][\w.]*\()", re.MULTILINE)
_IMPORT: Final = re.compile(r"^[ \t]*(?:import|from)[ \t]([^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
_WORD: Final = re.compile(r"\w+")
_RELEVANT: Final = re.compile(r"\b(torch|lightning|pytorch_lightning|accelerate|samestep)\b")


@dataclass(frozen=True)
class Ignore:
    """A comment that ignores rules on its line, by code, by the beginning of a code or by name."""

    line: int
    codes: frozenset[str]
    reason: str
    is_all: bool = False
    """Whether it ignores all rules: it has no brackets."""
    problem: str = ""
    """What is wrong with it; it ignores nothing then."""

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
    changed_names: dict[ast.AST, set[str]] = field(default_factory=dict[ast.AST, set[str]])
    """Names that the bodies of its loops change, as far as they were needed."""

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; an empty one if the file cannot be parsed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes in strings
                return ast.parse(self.text, filename=str(self.path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            if isinstance(error, SyntaxError) and (cell := self.cell_of(error.lineno or 1)) is not None:
                self.problem = f"{type(error).__name__}: {error.msg} (cell {cell[0]}, line {cell[1]})"
            return ast.Module([], [])

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without their ends."""
        return split_lines(self.text)

    def column(self, line: int, offset: int) -> int:
        """The column from 0, in characters, of an offset in bytes, as the syntax tree counts."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return offset if text.isascii() else len(text.encode("utf-8")[:offset].decode("utf-8", "ignore"))

    def locate(self, node: ast.AST, function: str = "") -> Location:
        """The line and column of a node, with the cell of a notebook."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", -1)
        return self.position(line, self.column(line, offset) + 1 if offset >= 0 else 0, function)

    def position(self, line: int, column: int = 0, function: str = "") -> Location:
        """A line, with the cell of a notebook."""
        cell, cell_line = self.cell_of(line) or (0, 0)
        return Location(str(self.path), line, function, column, cell, cell_line)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return self.path.name == "__init__.py"

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """The folders around it, the nearest first."""
        return tuple(self.path.absolute().parents)

    @property
    def root(self) -> Path:
        """The folder in which absolute imports of it begin: that of its outermost package."""
        return self.folders[self.name.count(".") + self.is_package]

    @cached_property
    def is_relevant(self) -> bool:
        """Whether it mentions a package that lint knows."""
        return bool(_RELEVANT.search(self.text))

    @cached_property
    def starts_ranks(self) -> bool:
        """Whether it mentions something that makes a script distributed; without it no rule can find anything."""
        return self.is_relevant and bool(_DISTRIBUTED.search(self.text))

    @cached_property
    def runs(self) -> bool:
        """Whether it is a script: it does more than to import and to define something."""
        return bool(self.cells) or bool(_RUNS.search(self.text))

    @cached_property
    def is_about_ranks(self) -> bool:
        """Whether it mentions ranks, what they exchange, or a framework that starts them."""
        return any(word in self.text for word in _ABOUT_RANKS)

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """What follows `import` or `from` in its import statements, such as "lab.data import load"."""
        return tuple(" ".join(text.split()) for text in _IMPORT.findall(self.text))

    @cached_property
    def imported_words(self) -> frozenset[str]:
        """Words of its import statements: names of modules of the project are among them."""
        return frozenset(word for line in _IMPORT.findall(self.text) for word in _WORD.findall(line))

    @cached_property
    def counters(self) -> frozenset[str]:
        """Attributes that some statement increases, such as `self.step += 1`."""
        targets = (node.target for node in ast.walk(self.tree) if isinstance(node, ast.AugAssign))
        return frozenset(each.attr for each in targets if isinstance(each, ast.Attribute))

    @cached_property
    def ignores(self) -> dict[int, Ignore]:
        """Comments that ignore rules, by line."""
        found = dict[int, Ignore]()
        if "samestep:" not in self.text:
            return found
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text, newline=None).readline):
                match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
                if match:
                    found[token.start[0]] = _ignore(token.start[0], match)
        except (tokenize.TokenError, IndentationError, SyntaxError):
            return found
        return found

    def cell_of(self, line: int) -> tuple[int, int] | None:
        """Of a notebook: the number of the cell of a line, and the line in it."""
        if not self.cells:
            return None
        before = [(cell, first) for cell, first in self.cells if first <= line]
        return (before[-1][0], line - before[-1][1] + 1) if before else None


def _ignore(line: int, match: re.Match[str]) -> Ignore:
    codes = frozenset((match["codes"] or match["code"] or "").replace(",", " ").split())
    is_all = match["codes"] is None and match["code"] is None and match["unclosed"] is None
    problem = "" if codes or is_all else "names no rule" if match["unclosed"] is None else "has no closing bracket"
    return Ignore(line, codes, match["reason"].strip(), is_all, problem)


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
        yield folder  # `read_file` says why it cannot be read
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
        modules = (
            [module.strip(" .")] if names else [re.split(r" as |[#;]", each)[0].strip() for each in module.split(",")]
        )
        known = [each for each in modules if not each or all(part.isidentifier() for part in each.split("."))]
        for start in starts:
            if start.name not in ("site-packages", "dist-packages"):
                for each in known:  # a line of text that begins with "from" names no module
                    yield from _files_of(start, each, names)


def _files_of(start: Path, module: str, names: str) -> Iterator[Path]:
    """The file of `a.b` below a folder, those of the packages around it, and of modules that are imported from it."""
    path = start
    for part in filter(None, module.split(".")):
        path /= part
        if _is_file(init := path / "__init__.py"):
            yield init
    if module and _is_file(source := path.with_suffix(".py")):
        yield source
    if names and os.path.isdir(path):  # noqa: PTH112  as in _is_file
        for name in _WORD.findall(names):
            if _is_file(source := path / f"{name}.py"):
                yield source


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113  Path.is_file raises OSError if a name is too long


def read_file(path: Path) -> SourceFile:
    """Read a file; one that cannot be read has a `problem`."""
    try:
        text, _ = read_text(path)
        if path.suffix == ".ipynb":
            return _read_notebook(path, text)
    except (OSError, ValueError, LookupError, SyntaxError) as error:
        return SourceFile(path, "", "", f"{type(error).__name__}: {error}")
    return SourceFile(path, module_name(path), text)


def read_text(path: Path) -> tuple[str, str]:
    """The text of a file with its own line ends, and its encoding: "utf-8-sig" if it begins with a byte order mark."""
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def write_text(path: Path, text: str, encoding: str) -> None:
    """Write a text with its line ends, in the encoding that `read_text` returned."""
    path.write_bytes(text.encode(encoding))


def module_name(path: Path) -> str:
    """The name by which other files import this one: with its packages, the folders with an __init__.py."""
    parts = [path.stem] if path.stem != "__init__" else []
    folder = path.absolute().parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _read_notebook(path: Path, text: str) -> SourceFile:
    lines, positions = list[str](), list[tuple[int, int]]()
    for cell in read_cells(text):
        positions.append((cell.number, len(lines) + 1))
        lines += cell.lines
        # findings show these lines, not those of the JSON file
        name, _ = Location(str(path), 1, cell=cell.number, cell_line=1).source_position
        linecache.cache[name] = (len(lines), None, [f"{line}\n" for line in cell.lines], name)
    return SourceFile(path, "", "\n".join([*lines, ""]), cells=positions)
