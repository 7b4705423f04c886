"""Lint a project: read its files, follow its scripts, apply the rules, and leave out what comments ignore."""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Final

from samestep.findings import Finding, source_lines
from samestep.lint.entry_points import follow
from samestep.lint.lint_cache import LintCache
from samestep.lint.rule import Analysis, Rule
from samestep.lint.rules import RULES
from samestep.lint.source_files import SourceFile, find_files, imported_files, read_file

_MIN_FILES_PER_POOL: Final = 50  # starting processes takes longer than reading fewer
_FRAMEWORKS: Final = frozenset(
    {"accelerate", "lightning", "pytorch_lightning", "torch", "torchmetrics", "transformers"}
)
_MAX_NAMESPACES: Final = 2  # folders without an __init__.py between a script and a file that it imports
_MAX_GARBAGE: Final = 500_000  # objects, about 100 MB
_RECURSION_LIMIT: Final = 6_000  # nested expressions in nested calls; Python 3.11 needs no C stack for them


@dataclass
class LintResult:
    """What was found, and what could not be read."""

    findings: list[Finding] = field(default_factory=list[Finding])
    files: int = 0
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Files that cannot be read or parsed, or on which lint itself fails, and why."""
    shortened: list[str] = field(default_factory=list[str])
    """Files that are too large to follow all of them."""
    warnings: list[str] = field(default_factory=list[str])
    """Comments that are to ignore a rule and ignore none, with their lines."""


@dataclass(frozen=True)
class _FileResult:
    findings: tuple[Finding, ...] = ()
    problem: str = ""
    is_shortened: bool = False
    used: tuple[str, ...] = ()
    """Paths of the files that the script imports."""


class _Project:
    """The files of a run of lint, in this process or inherited by the processes of a pool."""

    def __init__(self, files: Sequence[SourceFile], rules: Sequence[Rule]) -> None:
        self.files = files
        self.rules = rules
        self._by_name = dict[str, list[SourceFile]]()
        self._below = dict[Path, dict[str, SourceFile]]()  # by the folder of a script: packages without an __init__.py
        for file in files:
            if file.name:
                self._by_name.setdefault(file.name, []).append(file)
                for depth in range(1, _MAX_NAMESPACES + 1):
                    *namespaces, script_folder = file.folders[file.name.count(".") + file.is_package :][: depth + 1]
                    name = ".".join([*(each.name for each in reversed(namespaces)), file.name])
                    self._below.setdefault(script_folder, {})[name] = file
        self.by_path = {str(file.path): file for file in files}

    def lint_file(self, file: SourceFile) -> _FileResult:
        """The findings of one script; an exception of lint becomes a problem of this file."""
        result = self._lint_file(file)
        _drop_garbage()
        return result

    def _lint_file(self, file: SourceFile) -> _FileResult:
        try:
            run = follow(file, self.importable(file))
            analysis = Analysis(file, [state.file for state in run.modules.values()], run.events)
            rules = self.rules if analysis.is_distributed else ()
            findings = tuple(finding for rule in rules for finding in rule.find(analysis))
        except Exception as error:  # noqa: BLE001  a fault of lint in one file must not hide the findings of others
            return _FileResult(problem=file.problem or _describe(error))
        used = tuple(str(each.path) for each in analysis.files)
        return _FileResult(findings, file.problem, run.is_exhausted, used)

    def is_ignored(self, finding: Finding) -> bool:
        """Whether a comment in the statement of a finding ignores its rule."""
        file = self.by_path.get(finding.location.file) if finding.location is not None else None
        if file is None or finding.location is None or not file.ignores:
            return False
        _, shown = finding.location.source_position  # in a notebook the line in the cell
        first = finding.location.line - shown
        lines = {first + number for number, _, is_marked in source_lines(finding.location) if is_marked}
        ignores = [file.ignores[line] for line in {finding.location.line, *lines} if line in file.ignores]
        return any(each.covers(finding.code, finding.name) for each in ignores)

    def importable(self, script: SourceFile) -> dict[str, SourceFile]:
        """The files that a script can import, by name: of several with one name, the nearest one."""
        folders = frozenset(script.folders)
        found = dict[str, SourceFile]()
        for name, files in self._by_name.items():
            package = name.partition(".")[0]
            if package in _FRAMEWORKS and script.name.partition(".")[0] != package:
                continue  # what the framework does is known; its sources would take most of the steps of the script
            near = [each for each in files if "." in name or each.is_package or each.root in folders]
            if len(near) == 1:
                found[name] = near[0]
            elif near:
                found[name] = max(
                    near, key=lambda each: (each.root in folders, len(folders.intersection(each.folders)))
                )
        own = self._below.get(script.folders[0], {})
        return found | {
            name: file for name, file in own.items() if name not in found or found[name].root not in folders
        }


@contextmanager
def _large_heap() -> Generator[None]:
    """Allow deep recursion, and collect garbage after scripts only: Python would visit all syntax trees each time."""
    limit, was_enabled, was_frozen = sys.getrecursionlimit(), gc.isenabled(), gc.get_freeze_count() > 0
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _drop_garbage() -> None:
    """Free what following scripts left behind; what stays, such as syntax trees, is not visited again."""
    if gc.get_count()[0] > _MAX_GARBAGE:
        gc.collect()
        gc.freeze()


@_large_heap()
def lint(
    paths: Iterable[Path],
    rules: Sequence[Rule] = RULES,
    workers: int | None = None,
    cache_folder: Path | None = None,
    is_excluded: Callable[[Path], bool] = lambda path: False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LintResult:
    """Read files and folders and return what is wrong with them; nothing is run.

    `workers` is the number of processes, by default one per CPU if there are many files. Neither it nor the cache
    changes the result. `report` is called with the number of scripts that are done and that of all scripts.
    """
    named = [read_file(path) for path in dict.fromkeys(find_files(paths, is_excluded))]
    files = [*named, *imported_files(named)]
    project = _Project(files, rules)
    result = LintResult(files=len(named))
    result.problems = {str(file.path): file.problem for file in named if file.problem}
    result.warnings = [text for file in named for text in _wrong_comments(file)]
    cache = LintCache(cache_folder, files, [rule.code for rule in rules]) if cache_folder is not None else None
    scripts = scripts_of(files, named)
    known = {file.path: found for file in scripts if cache and (found := cache.get(file)) is not None}
    seen = set[tuple[str, str, int]]()

    def add(findings: Iterable[Finding]) -> None:
        for finding in findings:
            location = finding.location
            key = finding.code, location.file if location else "", location.line if location else 0
            if key not in seen and not project.is_ignored(finding):
                seen.add(key)
                result.findings.append(finding)

    for number, (file, found) in enumerate(_results(project, scripts, known, workers), 1):
        report(number, len(scripts))
        if found.problem:
            result.problems[str(file.path)] = found.problem
        elif cache is not None and file.path not in known and not found.is_shortened:
            cache.put(file, [project.by_path[path] for path in found.used], found.findings)
        if found.is_shortened:
            result.shortened.append(str(file.path))
        add(found.findings)
    if cache is not None:
        cache.save()
    result.findings.sort(key=_order)
    return result


def _wrong_comments(file: SourceFile) -> Iterator[str]:
    """Comments that name no rule, or one that does not exist."""
    for line, ignore in sorted(file.ignores.items()):
        place = file.position(line)
        if ignore.problem:
            yield f"{place}: the comment {ignore.problem} and ignores nothing: write `# samestep: ignore[SS301] reason`"
        for code in sorted(ignore.codes):
            one = replace(ignore, codes=frozenset({code}))
            if not any(one.covers(rule.code, rule.name) for rule in RULES):
                what = f"the comment ignores {code}, which does not exist"
                yield f"{place}: {what}: `samestep lint --list` shows all rules"


def _results(
    project: _Project, scripts: Sequence[SourceFile], known: Mapping[Path, list[Finding]], workers: int | None
) -> Iterator[tuple[SourceFile, _FileResult]]:
    """The results of all scripts in their order; those that are known need no work."""
    unknown = [file for file in scripts if file.path not in known]
    new = _lint_all(project, unknown, workers)
    for file in scripts:
        yield file, _FileResult(tuple(known[file.path])) if file.path in known else next(new)


def _order(finding: Finding) -> tuple[str, int, int, str]:
    location = finding.location
    return (location.file, location.line, location.column, finding.code) if location else ("", 0, 0, finding.code)


def scripts_of(files: Sequence[SourceFile], named: Sequence[SourceFile]) -> list[SourceFile]:
    """Which of the named files use something distributed, also through their imports; rules are silent about others.

    A module that does not mention ranks is followed from the scripts that import it.
    """
    by_word = dict[str, list[SourceFile]]()
    for file in files:
        if file.name:
            by_word.setdefault(file.name.rpartition(".")[2], []).append(file)
    importers = dict[Path, list[SourceFile]]()
    for file in files:
        for word in sorted(file.imported_words & by_word.keys()):
            for imported in by_word[word]:
                importers.setdefault(imported.path, []).append(file)
    waiting = [file for file in files if file.starts_ranks]
    reached = {file.path for file in waiting}
    while waiting:
        for file in importers.get(waiting.pop().path, ()):
            if file.path not in reached:
                reached.add(file.path)
                waiting.append(file)
    return [file for file in named if file.path in reached and (file.runs or file.is_about_ranks)]


_shared: _Project | None = None  # of a process of the pool


def _share(project: _Project) -> None:
    global _shared
    _shared = project


def _lint_shared(path: str) -> _FileResult:
    if _shared is None:
        raise RuntimeError("this process has no project: _share was not called")
    return _shared.lint_file(_shared.by_path[path])


def _lint_all(project: _Project, scripts: Sequence[SourceFile], workers: int | None) -> Iterator[_FileResult]:
    count = workers if workers is not None else os.cpu_count() or 1
    is_small = workers is None and len(scripts) < _MIN_FILES_PER_POOL
    if count <= 1 or is_small or "fork" not in get_all_start_methods():
        yield from (project.lint_file(file) for file in scripts)
        return
    with ProcessPoolExecutor(count, get_context("fork"), initializer=_share, initargs=(project,)) as pool:
        # files of one folder import the same modules, so a process gets a chunk of them
        chunk = max(1, min(16, len(scripts) // (4 * count)))
        yield from pool.map(_lint_shared, [str(file.path) for file in scripts], chunksize=chunk)


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"lint failed: {type(error).__name__}: {error}{where}"
