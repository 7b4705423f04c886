"""Results of earlier runs of lint: a script is linted again only if it, a file that it uses, or lint has changed."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from samestep.disk import write_atomically
from samestep.findings import Edit, Finding, Location
from samestep.lint.source_files import SourceFile

FOLDER: Final = ".samestep_cache"
_FILE: Final = "lint.json"


class LintCache:
    """The file `.samestep_cache/lint.json` in the root of a project; ignored if it cannot be read or written."""

    def __init__(self, root: Path, files: Iterable[SourceFile], rules: Iterable[str]) -> None:
        self._path = root / FOLDER / _FILE
        self._digests = {str(file.path): digest(file.text) for file in files}
        names = sorted(f"{file.name} {file.path}" for file in files)
        self._key = digest("\n".join([version("samestep"), _own_digest(), *sorted(rules), *names]))
        self._entries = self._read()
        self._is_changed = False

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return content["entries"] if content["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def get(self, script: SourceFile) -> list[Finding] | None:
        """The findings of a script; None if they are not known or not valid any more."""
        entry = self._entries.get(str(script.path))
        try:
            if entry is None or any(self._digests.get(file) != value for file, value in entry["files"].items()):
                return None
            return [_finding(each) for each in entry["findings"]]
        except (KeyError, TypeError, AttributeError):
            return None

    def put(self, script: SourceFile, files: Iterable[SourceFile], findings: Iterable[Finding]) -> None:
        """Keep the findings of a script, which depend on these files."""
        used = {str(file.path): self._digests.get(str(file.path), "") for file in (script, *files)}
        self._entries[str(script.path)] = {"files": used, "findings": [asdict(each) for each in findings]}
        self._is_changed = True

    def save(self) -> None:
        """Write the file if something was added."""
        if not self._is_changed:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            (self._path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            write_atomically(self._path, json.dumps({"key": self._key, "entries": self._entries}))
        except OSError:  # a folder that cannot be written costs time, not findings
            self._is_changed = False


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _own_digest() -> str:
    """A hash of lint itself: another version finds other things."""
    folder = Path(__file__).parent
    sources = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    return digest("".join(sources))


def _finding(fields: dict[str, Any]) -> Finding:
    location = fields["location"]
    values: dict[str, Any] = {
        **fields,
        "location": None if location is None else Location(**location),
        "evidence": tuple(fields["evidence"]),
        "ranks": tuple(fields["ranks"]),
        "related": tuple(Location(**each) for each in fields["related"]),
        "follows": tuple(_finding(each) for each in fields["follows"]),
        "edits": tuple(Edit(**each) for each in fields["edits"]),
    }
    return Finding(**values)
