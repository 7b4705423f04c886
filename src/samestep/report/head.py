"""The head of the page: what the runs are, what has become of them, and the numbers that matter most."""

from collections.abc import Mapping, Sequence
from typing import Final

from samestep.report.facts import facts_of, lost_values, tiles_of
from samestep.report.markup import Markup, definitions, element, join, table
from samestep.report.run_data import RunData
from samestep.report.verdict import describe_run

_EQUAL_FACTS: Final = ("code", "global batch", "seed", "precision", "model", "steps")
"""Facts in which runs that should give the same result may not differ."""
_IN_TILES: Final = ("steps", "throughput", "GPU-hours", "peak memory")
_COLORS: Final = 8  # of runs, in page.css


def page_head(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    """The title, the verdicts, and the facts about the runs."""
    title = [element("p", "samestep report", class_="product"), element("h1", _title(names))]
    facts = [facts_of(run) for run in runs]
    if len(runs) == 1:
        tiles = tiles_of(runs[0])
        shown = {name: text for name, text in facts[0].items() if name not in _IN_TILES and tiles.get(name) != text}
        return join([*title, _verdict(runs[0]), definitions(tiles.items(), "tiles"), _fact_list(shown)])
    verdicts = [
        element("div", element("h3", swatch(number), " ", name), _verdict(run))
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    known = dict.fromkeys(name for each in facts for name in each)
    values = {name: [each.get(name, "") for each in facts] for name in known}
    equal = {name: texts[0] for name, texts in values.items() if len(set(texts)) == 1}
    rows = [
        [name, *(_fact_cell(name, texts, at) for at in range(len(runs)))]
        for name, texts in values.items()
        if name not in equal
    ]
    differing = table("What differs between the runs", ["", *names], rows) if rows else None
    return join([*title, element("div", *verdicts, class_="runs"), differing, element("h3", _EQUAL), _fact_list(equal)])


_EQUAL: Final = "Equal in all runs"


def _fact_list(facts: Mapping[str, str]) -> Markup:
    return definitions(
        ((name, element("code", text) if name == "command" else text) for name, text in facts.items()), "facts"
    )


def swatch(number: int) -> Markup:
    """The color of a run."""
    return element("span", class_=f"swatch run-{number % _COLORS}", aria_hidden="true")


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verdict(run: RunData) -> Markup:
    """The status in its color, which begins the sentence, and the cause."""
    verdict = describe_run(run)
    pill = element("span", verdict.status.capitalize(), class_=f"status {verdict.status}")
    rest = verdict.sentence[len(verdict.status) :].lstrip(".: ")
    cause = (
        element("p", verdict.cause, class_="cause" if verdict.is_good else "cause differs") if verdict.cause else None
    )
    lost = [element("p", text, class_="cause differs") for text in lost_values(run)]
    return join([element("p", pill, " ", rest, class_="verdict"), cause, *lost])


def _fact_cell(name: str, values: Sequence[str], at: int) -> Markup:
    differs = name in _EQUAL_FACTS and values[at] != values[0]
    text = element("code", values[at]) if name == "command" else values[at]
    return element("span", text, class_="differs" if differs else None, title="differs" if differs else None)
