"""The page docs/checks.md: what each check of `samestep verify` compares, from the docstrings of the check modules.

`python tools/check_pages.py` prints it, `--write PAGE` writes it, and `--check PAGE` fails if the page is outdated.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from samestep.cli.verify_command import FAMILIES, all_checks, page_of
from samestep.verify.check import Check

PARTS = ("What it compares", "Fault", "Repair")
HEAD = """\
# Checks of verify

<!-- Written by `python tools/check_pages.py --write docs/checks.md` from the docstrings of the check modules -->

[`samestep verify`](verify.md) runs these checks. `samestep verify --explain SS101` prints one of them on the terminal,
and `samestep verify --list` prints the list. An error makes the result wrong, a warning may, and a note is about a
legitimate choice that depends on the number of ranks. Notes need `--strict`.
"""


class PageError(Exception):
    """A page cannot be written or is outdated; the message says what to do."""


def parts(check: Check) -> dict[str, str]:
    """The paragraphs of the docstring of a check: its title, and then one for each of PARTS."""
    title, *paragraphs = page_of(check).split("\n\n")
    found = {"": title}
    for paragraph in paragraphs:
        name, _, text = paragraph.partition(": ")
        if name in PARTS:
            found[name] = text
        else:  # continues the one before
            found[list(found)[-1]] += f"\n\n{paragraph}"
    missing = [name for name in PARTS if name not in found]
    if missing:
        raise PageError(
            f"{check.find.__module__}: its docstring has no paragraph that begins with {missing[0]!r}: add it, "
            f"since the docstring is the page of the check"
        )
    return found


def section(check: Check) -> str:
    """The section of one check."""
    texts = parts(check)
    kind = f"{check.severity.capitalize()}{', only with `--strict`' * check.is_strict}."
    rows = [f"### {check.code} {check.name}", f"{kind} {texts['']}"]
    texts["Why it matters"] = f"{check.consequence}."
    for name in (*PARTS[:2], "Why it matters", *PARTS[2:]):
        rows.append(f"**{name}.** {texts[name][0].upper()}{texts[name][1:]}")
    return "\n\n".join(rows)


def table(checks: list[Check]) -> str:
    """The list of checks, with links to their sections."""
    rows = [
        f"| [{each.code}](#{each.code.lower()}-{each.name}) | {each.name} "
        f"| {each.severity}{' (`--strict`)' * each.is_strict} | {parts(each)[''].rstrip('.')} |"
        for each in checks
    ]
    return "\n".join(["| code | name | severity | what is wrong |", "|---|---|---|---|", *rows])


def page() -> str:
    """The complete page."""
    return "\n\n".join([HEAD.rstrip("\n"), table(all_checks()), *_families()]) + "\n"


def _families() -> Iterator[str]:
    for digit, (title, _) in FAMILIES.items():
        checks = [each for each in all_checks() if each.code[2] == digit]
        if checks:
            yield f"## {title}"
            yield from map(section, checks)


def main(page: Callable[[], str] = page, description: str = __doc__, name: str = "tools/check_pages.py") -> int:
    """Print, write or check a page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="PAGE")
    action.add_argument("--check", type=Path, metavar="PAGE")
    options = parser.parse_args()
    try:
        text = page()
        if options.write:
            options.write.write_text(text)
        elif options.check and (not options.check.exists() or options.check.read_text() != text):
            raise PageError(f"{options.check} is outdated: run `python {name} --write {options.check}`")
        elif not options.check:
            print(text, end="")
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
