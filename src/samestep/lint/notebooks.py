"""Notebooks as Python: the code of their cells, without the commands of IPython."""

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass
from typing import Final

_LINE_ENDS: Final = re.compile(r"\r\n|\r|\n")
_MAGIC: Final = re.compile(r"^(\s*)((?:%|!(?!=)|\?).*)$")
_ASSIGNED_MAGIC: Final = re.compile(r"^(\s*[\w, ]+=\s*)([%!].*)$")
_HELP: Final = re.compile(r"^(\s*)([\w.]+\?{1,2})\s*$")
_PYTHON_MAGICS: Final = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")


@dataclass(frozen=True)
class Cell:
    """A code cell."""

    number: int
    """Among all cells of the notebook, also those with text, from 1."""
    lines: list[str]


def split_lines(text: str, with_ends: bool = False) -> list[str]:
    """The lines of a text as Python counts them; a form feed, unlike in `str.splitlines`, ends none."""
    lines, start = list[str](), 0
    for end in _LINE_ENDS.finditer(text):
        lines.append(text[start : end.end() if with_ends else end.start()])
        start = end.end()
    return [*lines, text[start:]] if start < len(text) else lines


def read_cells(text: str) -> list[Cell]:
    """The code cells of the JSON of a notebook; raises ValueError if it is not a notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = [
            (number, "".join(cell["source"])) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a notebook: {type(error).__name__}: {error}") from error
    return [Cell(number, _as_python(source)) for number, source in sources]


def _as_python(source: str) -> list[str]:
    """The lines of a cell; commands of IPython have no effect, what they return is None."""
    lines = split_lines(source)
    magic = source.split()[0] if source.lstrip().startswith("%%") else ""
    if magic and magic not in _PYTHON_MAGICS:
        return [f"pass  #{line}" for line in lines]
    return lines if not magic and _parses(source) else _without_magics(lines)


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_magics(lines: list[str]) -> list[str]:
    found, is_continued = list[str](), False
    for line in lines:
        if is_continued:
            made = f"# {line}"
        else:
            made = _HELP.sub(r"\1pass  # \2", _ASSIGNED_MAGIC.sub(r"\1None  # \2", _MAGIC.sub(r"\1pass  # \2", line)))
            if made != line and _is_open(found):  # `% count` inside of parentheses is an operator
                made = line
        is_continued = made != line and line.endswith("\\")  # the next line belongs to the command
        found.append(made)
    return found


def _is_open(lines: list[str]) -> bool:
    """Whether the next line continues an expression or a string."""
    try:
        for _ in tokenize.generate_tokens(io.StringIO("\n".join([*lines, ""])).readline):
            continue
    except tokenize.TokenError:
        return True
    except SyntaxError:
        return False
    return False
