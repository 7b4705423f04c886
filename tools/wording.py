"""Report words and phrases that are not plain technical English, in names and in prose.

    python tools/wording.py            totals by word, the files with most of them
    python tools/wording.py --all      every occurrence as file:line

Names come from Python files; prose comes from their docstrings, comments and strings, and from Markdown pages. Each
entry says what to write instead. The list is a filter for the most frequent habits, not a style guide. The exit status
is 1 if there are more than ALLOWED occurrences.
"""

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("wording.py", "test_wording.py")  # files that contain the words to look for
ALLOWED = 60  # a few are right in their place: a quotation, a name of another package
CODE = ("src", "recipes", "benchmarks", "tools", "tests")
EXCLUDED = ("tests/corpus",)  # scripts as people write them
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")

# A word of an identifier -> what the field calls it.
NAMES = {
    "luck": "rng, rng_state, noise",
    "wish": "options",
    "wishes": "options, prompts",
    "asked": "config, requested",
    "told": "message, summary, report",
    "taught": "teacher_output",
    "tutor": "teacher",
    "learnt": "trained",
    "alike": "same, shared",
    "anew": "again, restart",
    "astray": "diverged",
    "heard": "received",
    "rider": "callback",
    "riders": "callbacks",
    "beat": "sync, tick",
    "pulse": "metric_sync, control_sync",
    "life": "lifecycle, resources",
    "terms": "context, data_config",
    "ground": "context",
    "grounds": "contexts",
    "crowd": "oversubscribed",
    "spare": "exclude, padding",
    "awake": "trainable",
    "asleep": "frozen",
    "voice": "warn_once",
    "roll": "membership",
    "seal": "checksum",
    "halvings": "oom_retries",
    "judge": "evaluate, best_metric",
    "judged": "evaluated",
    "spell": "tokenize",
    "led": "guided",
    "police": "leak_checks",
    "apart": "per_rank",
    "taken": "loaded",
}
TORCH_NAMES = {"roll"}  # Tensor.roll: allowed after a dot
# A phrase of prose -> plain technical English.
PHRASES = {
    r"\bluck\b": "randomness, RNG state",
    r"\banew\b": "again, from scratch",
    r"\blikewise\b": "also, the same way",
    r"\bnobody\b": "name who, or 'no rank'",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b)[a-z]": "'is not a'",
    r"\b(?:is|are|was|were) (?:said|told|warned of)\b": "samestep logs / raises / warns",
    r"\blearnt\b": "learned, trained",
    r"\bin vain\b": "without result",
    r"\bhonest(?:ly)?\b": "drop, or 'legitimate'",
    r"\breckon(?:ed|s|ing)?\b": "estimate",
    r"\bequally many\b": "the same number of",
    r"\bso-manieth\b": "N-th",
    r"\bgoes? on\b": "continue, resume",
    r"\bwent on\b": "continued",
    r"\bwithout a word\b": "silently",
    r"\ba word for\b": "name of",
    r"\b(?:he|his|him)\b": "it, its",
    r"\bcommon act\b": "collective",
    r"\bstands? (?:in|at|on|beside|behind|there|for)\b": "is, is stored in",
    r"\blies? (?:in|at|on|beside|there)\b": "is, is stored in",
    r"\bmends?\b|\bmended\b": "fix",
    r"\bfirst rank\b": "rank 0",
    r"\bthe words\b": "terms, glossary",
    r"\bcame (?:of|late)\b": "resulted, timed out",
    r"\b(?:one|two|some|several|many|\d+) [a-z-]+s? a "
    r"(?:row|rank|step|node|sample|line|file|day|page|claim|subject|module|second|time)\b": "'per'",
    r"\bof (?:one|its|his) own\b": "own, separate",
    r"\bbeside(?:s)? (?:it|them|us|others|training)\b": "next to, concurrently with",
    r"\bwhat is (?:ours|yours|mine)\b": "name it",
    r"\bit is (?:said|told)\b": "samestep logs",
}


@dataclass(frozen=True)
class Occurrence:
    """One word or phrase in a file, with what to write instead."""

    path: str
    line: int
    word: str
    instead: str
    quote: str


def words_of(name: str) -> list[str]:
    """Split a snake_case or CamelCase name into lowercase words."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def scan_code(path: str, text: str) -> Iterator[Occurrence]:
    """Scan the names, the strings and the comments of a Python file."""
    for word in words_of(Path(path).stem):
        if word in NAMES:
            yield Occurrence(path, 0, word, NAMES[word], path)
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            for word in words_of(token.string):
                if word in NAMES and not (before == "." and token.string in TORCH_NAMES):
                    yield Occurrence(path, line, word, NAMES[word], token.string)
        elif token.type == tokenize.COMMENT or (_is_text(token.type) and " " in token.string):
            yield from scan_prose(path, token.string, line)
        before = token.string


def _is_text(kind: int) -> bool:
    return kind in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))


def scan_prose(path: str, text: str, first_line: int = 1) -> Iterator[Occurrence]:
    """Scan text line by line."""
    for number, line in enumerate(text.split("\n"), start=first_line):
        for phrase, instead in PHRASES.items():
            for match in re.finditer(phrase, line):
                quote = line[max(0, match.start() - 60) : match.end() + 50].strip()
                yield Occurrence(path, number, match.group(), instead, quote)


def without_code(page: str) -> str:
    """Blank the code blocks of a Markdown page, keeping its line numbers."""
    return re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), page, flags=re.DOTALL)


def scan(root: Path) -> list[Occurrence]:
    """Scan a checkout of samestep."""
    found: list[Occurrence] = []
    for path in (path for folder in CODE for path in sorted((root / folder).rglob("*.py"))):
        if path.name not in LISTS and not path.relative_to(root).as_posix().startswith(EXCLUDED):
            found += scan_code(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
    for page in (root / name for name in PAGES):
        for path in sorted(page.rglob("*.md")) if page.is_dir() else [page] if page.exists() else []:
            found += scan_prose(str(path.relative_to(root)), without_code(path.read_text(encoding="utf-8")))
    return found


def summarize(found: Iterable[Occurrence]) -> str:
    """The most frequent words and the files with most occurrences, as text."""
    found = list(found)
    instead = {each.word: each.instead for each in found}
    words = Counter(each.word for each in found).most_common(40)
    files = Counter(each.path for each in found).most_common(15)
    lines = [f"{count:5d}  {word:30} {instead[word]}" for word, count in words]
    lines += ["", "files", *(f"{count:5d}  {path}" for path, count in files)]
    return "\n".join([*lines, f"total {len(found)}, allowed {ALLOWED}"])


def main() -> int:
    found = scan(ROOT)
    if "--all" in sys.argv[1:]:
        for each in found:
            print(f"{each.path}:{each.line}: {each.word} -> {each.instead}: {each.quote}")
    print(summarize(found))
    return int(len(found) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
