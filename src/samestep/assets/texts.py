"""Short texts to learn from: the lines of a file, or sentences of Shakespeare where there is none."""

from pathlib import Path

from samestep.assets.shakespeare import sentences
from samestep.errors import DataError


def read_texts(path: str | Path | None, count: int, longest: int = 20, least: int = 1) -> list[str]:
    """So many lines of a file, or sentences of Shakespeare with at most `longest` words: from all over, not the start.

    The same ones every time. Blank lines are left out; a file with fewer lines gives them all, with fewer than `least`
    it is refused.
    """
    if path is None:
        lines = sentences(longest=longest)
    elif Path(path).is_file():
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise DataError(f"{path} is no file: expected is a text file with one sentence a line")
    if not lines:
        raise DataError(f"{path} holds no line of text: expected is a text file with one sentence a line")
    if len(lines) < least:
        raise DataError(
            f"{path or 'Shakespeare'} holds {len(lines)} line(s) of text, and {least} are needed to judge by and to "
            "learn from: give a longer file, or hold out fewer"
        )
    return lines[:: max(1, len(lines) // count)][:count]
