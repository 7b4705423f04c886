"""The head of the page: what the runs are, what has become of them, and the numbers that matter most."""

from collections.abc import Sequence
from typing import Final

from samestep.report.facts import facts_of, tiles_of
from samestep.report.markup import Markup, definitions, element, join, table
from samestep.report.run_data import RunData
from samestep.report.verdict import describe_run

_EQUAL_FACTS: Final = ("code", "global batch", "seed", "precision", "model", "steps")
"""Facts in which runs that should give the same result may not differ."""
_IN_TILES: Final = ("steps", "throughput", "GPU-hours", "rank-hours", "peak memory")
_COLORS: Final = 8  # of runs, in page.css


def page_head(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    """The title, the verdicts, and the facts about the runs."""
    title = [element("p", "samestep report", class_="product"), element("h1", _title(names))]
    if len(runs) == 1:
        tiles, facts = tiles_of(runs[0]), facts_of(runs[0])
        pairs = [
            (name, element("code", text) if name == "command" else text)
            for name, text in facts.items()
            if name not in _IN_TILES
        ]
        return join([*title, _verdict(runs[0]), definitions(tiles.items(), "tiles"), definitions(pairs, "facts")])
    facts = [facts_of(run) for run in runs]
    rows = [
        [name, *(_fact_cell(name, [each.get(name, "") for each in facts], at) for at in range(len(runs)))]
        for name in dict.fromkeys(name for each in facts for name in each)
    ]
    verdicts = [
        element("div", element("h3", swatch(number), " ", name), _verdict(run))
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return join([*title, element("div", *verdicts, class_="runs"), table("Facts about the runs", ["", *names], rows)])


def swatch(number: int) -> Markup:
    """The color of a run."""
    return element("span", class_=f"swatch run-{number % _COLORS}", aria_hidden="true")


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verdict(run: RunData) -> Markup:
    verdict = describe_run(run)
    pill = element("span", verdict.status, class_=f"status {verdict.status}")
    return element("p", pill, " ", verdict.text, class_="verdict")


def _fact_cell(name: str, values: Sequence[str], at: int) -> Markup:
    differs = name in _EQUAL_FACTS and values[at] != values[0]
    text = element("code", values[at]) if name == "command" else values[at]
    return element("span", text, class_="differs" if differs else None, title="differs" if differs else None)
