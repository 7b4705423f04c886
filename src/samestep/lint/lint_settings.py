"""Which rules apply to which files: `[tool.samestep.lint]` of pyproject.toml, and the options of the command line."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from samestep.errors import LaunchError
from samestep.findings import Finding
from samestep.lint.rule import Rule
from samestep.lint.rules import RULES
from samestep.messages import shorten

_LISTS: Final = ("select", "ignore", "exclude")
_KEYS: Final = (*_LISTS, "per-file-ignores", "strict")


@dataclass(frozen=True)
class LintSettings:
    """What to report. Rules are named by code ("SS101"), by family ("SS1") or by name."""

    select: tuple[str, ...] = ()
    """Rules to apply; all if empty."""
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders to leave out, relative to `root`."""
    per_file_ignores: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    strict: bool = False
    """Whether to report notes as well."""
    root: Path = field(default_factory=Path.cwd)
    """The folder of pyproject.toml, or the current folder."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that apply."""
        return tuple(
            rule
            for rule in RULES
            if (not self.select or _matches(rule.code, rule.name, self.select))
            and not _matches(rule.code, rule.name, self.ignore)
        )

    def is_reported(self, finding: Finding) -> bool:
        """Whether to report a finding: notes only if strict, and not what its file ignores."""
        if finding.severity == "note" and not self.strict:
            return False
        if finding.location is None:
            return True
        path = relative_to(Path(finding.location.file), self.root)
        ignored = (
            code for pattern, codes in self.per_file_ignores.items() if _is_like(path, pattern) for code in codes
        )
        return not _matches(finding.code, finding.name, tuple(ignored))

    def is_excluded(self, path: Path) -> bool:
        """Whether to leave out a file or a folder."""
        return any(_is_like(relative_to(path, self.root), pattern) for pattern in self.exclude)

    def with_options(self, select: Sequence[str], ignore: Sequence[str], strict: bool) -> "LintSettings":
        """With the options of the command line, which replace the selected rules and add to the ignored ones."""
        names = [name for text in (*select, *ignore) for name in split_codes(text)]
        check_codes(names, "the command line")
        chosen = tuple(code for text in select for code in split_codes(text))
        ignored = tuple(code for text in ignore for code in split_codes(text))
        return replace(
            self, select=chosen or self.select, ignore=(*self.ignore, *ignored), strict=strict or self.strict
        )


def _matches(code: str, name: str, wanted: Sequence[str]) -> bool:
    return any(each == name or code.startswith(each.upper()) for each in wanted)


def _is_like(path: str, pattern: str) -> bool:
    parts = path.split("/")
    prefixes = ("/".join(parts[: number + 1]) for number in range(len(parts)))
    return any(fnmatch(prefix, pattern.rstrip("/")) for prefix in prefixes) or fnmatch(parts[-1], pattern)


def relative_to(path: Path, root: Path) -> str:
    """A path below a folder as patterns name it; another one unchanged."""
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except (ValueError, OSError):
        return path.as_posix()


def split_codes(text: str) -> list[str]:
    """Codes from a list with commas or spaces."""
    return text.replace(",", " ").split()


def check_codes(names: Iterable[str], source: str) -> None:
    """Raise an error for a name that is neither a rule nor the beginning of a code."""
    known = {key: rule for rule in RULES for key in (rule.code, rule.name)}
    for name in names:
        is_family = name.upper().startswith("SS") and any(rule.code.startswith(name.upper()) for rule in RULES)
        if not is_family and name not in known:
            near = [] if name.upper().startswith("SS") else get_close_matches(name, known, n=1)
            hint = f"; did you mean {known[near[0]].code} {known[near[0]].name}?" if near else ""
            raise LaunchError(f"unknown rule {shorten(name)} in {source}: `samestep lint --list` shows all rules{hint}")


def find_settings(start: Path) -> LintSettings:
    """The settings of the nearest pyproject.toml with `[tool.samestep.lint]`, from a path upward."""
    folder = start.resolve() if start.is_dir() else start.resolve().parent
    for each in (folder, *folder.parents):
        path = each / "pyproject.toml"
        if path.is_file() and (settings := read_settings(path)) is not None:
            return settings
    return LintSettings()


def read_settings(path: Path) -> LintSettings | None:
    """The settings of one pyproject.toml; None if it has none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    tool = document.get("tool", {})
    section: Any = tool.get("samestep", {}).get("lint") if isinstance(tool.get("samestep", {}), dict) else None
    if section is None:
        return None
    where = f"[tool.samestep.lint] of {path}"
    if not isinstance(section, dict):
        raise LaunchError(f"{where} must be a table, got {section!r}")
    values: dict[str, Any] = section
    for key in values:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            raise LaunchError(f"{where}: unknown key {key!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    lists = {key: _strings(values.get(key, []), key, where) for key in _LISTS}
    per_file = values.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise LaunchError(f"{where}: per-file-ignores must be a table of patterns and rules, got {per_file!r}")
    table: dict[str, Any] = per_file
    ignores = {pattern: _strings(codes, f"per-file-ignores.{pattern}", where) for pattern, codes in table.items()}
    strict = values.get("strict", False)
    if not isinstance(strict, bool):
        raise LaunchError(f"{where}: strict must be true or false, got {strict!r}")
    check_codes((*lists["select"], *lists["ignore"], *(code for codes in ignores.values() for code in codes)), where)
    return LintSettings(**lists, per_file_ignores=ignores, strict=strict, root=path.parent)


def _strings(value: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):  # pyright: ignore[reportUnknownVariableType]
        raise LaunchError(f"{where}: {key} must be a list of strings, got {value!r}")
    strings: list[str] = value
    return tuple(strings)
