"""Horizontal bars of several parts, one per row, as SVG that fits any width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from samestep.report.markup import Markup, element

_THINNEST: Final = 0.01  # percent of the width


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    style: str  # the class of its color, in page.css
    text: str  # what it is, shown at the pointer
    size: float


@dataclass(frozen=True)
class Bar:
    """A bar with a text at its end."""

    segments: Sequence[Segment]
    total: str

    @property
    def size(self) -> float:
        """The length of all parts."""
        return sum(segment.size for segment in self.segments)


def draw_bars(bars: Mapping[str, Bar], title: str) -> Markup:
    """Bars with their labels, one below the other, all on the same scale."""
    longest = max((bar.size for bar in bars.values()), default=0.0) or 1.0
    rows = [
        element("div", element("span", label), _draw(label, bar, longest), element("span", bar.total), class_="bar")
        for label, bar in bars.items()
    ]
    return element("div", *rows, class_="bars", role="img", aria_label=title)


def _draw(label: str, bar: Bar, longest: float) -> Markup:
    shapes, x = list[Markup](), 0.0
    for segment in bar.segments:
        width = 100 * segment.size / longest
        if width >= _THINNEST:
            text = element("title", f"{label}: {segment.text}")
            shapes.append(
                element("rect", text, x=f"{x:.2f}%", width=f"{width:.2f}%", height="100%", class_=segment.style)
            )
        x += width
    return element("svg", *shapes)


def legend(segments: Sequence[Segment], title: str | None = None) -> Markup:
    """The colors of segments with their texts."""
    shown = (
        element("span", element("span", class_=f"swatch {each.style}", aria_hidden="true"), " ", each.text)
        for each in segments
    )
    return element("p", element("span", title) if title else None, *shown, class_="legend")
