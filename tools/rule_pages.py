"""The page docs/rules.md: what each rule of `samestep lint` finds, from the docstrings of the rule modules.

`python -m tools.rule_pages` prints it, `--write PAGE` writes it, and `--check PAGE` fails if the page is outdated.
"""

import re
import sys
from collections.abc import Iterator
from typing import Final

from samestep.cli.verify_command import FAMILIES
from samestep.lint.rule import Rule, page_of
from samestep.lint.rules import RULES
from tools.check_pages import main

HEAD: Final = """\
# Rules of lint

<!-- Written by `python -m tools.rule_pages --write docs/rules.md` from the docstrings of the rule modules -->

[`samestep lint`](lint.md) applies these rules. `samestep lint --explain SS101` prints one of them on the terminal, and
`samestep lint --list` prints the list. An error makes the result wrong, a warning may, and a note, which needs
`--strict`, is about a legitimate choice or about something that only a run can decide.
"""
_ISSUE: Final = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def table() -> str:
    """The list of rules, with links to their sections."""
    rows = [
        f"| [{each.code}](#{each.code.lower()}-{each.name}) | {each.name} | {each.severity} | {_title(each)} |"
        for each in RULES
    ]
    return "\n".join(["| code | name | severity | what is wrong |", "|---|---|---|---|", *rows])


def _title(rule: Rule) -> str:
    return page_of(rule).split("\n", 1)[0].rstrip(".")


def section(rule: Rule) -> str:
    """The section of one rule; its examples are not run, and its sources are links."""
    text = page_of(rule).replace("```python\n", '```python {.no-run reason="an example for lint"}\n')
    text = _ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", text)
    text = re.sub(r"^(Bad|Good|Source):", r"**\1.**", text, flags=re.MULTILINE)
    return f"### {rule.code} {rule.name}\n\n{rule.severity.capitalize()}. {text}\n\n**Repair.** {rule.repair}."


def page() -> str:
    """The complete page."""
    return "\n\n".join([HEAD.rstrip("\n"), table(), *_families()]) + "\n"


def _families() -> Iterator[str]:
    for digit, (title, _) in FAMILIES.items():
        rules = [each for each in RULES if each.code[2] == digit]
        if rules:
            yield f"## {title}"
            yield from map(section, rules)


if __name__ == "__main__":
    sys.exit(main(page, __doc__, "-m tools.rule_pages"))
