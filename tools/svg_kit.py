"""Draw boxes, text and arrows as SVG that reads well on light and dark pages.

A `Drawing` collects shapes in pixels and writes them with one style sheet. Every picture has its own background and
follows the color scheme of the reader, so it stays readable on a page of either scheme.
"""

from html import escape
from pathlib import Path

_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# class: fill and stroke on a light page, fill and stroke on a dark page
_FILLS = {
    "page": ("#ffffff", "#d5dae2", "#181c24", "#39414f"),
    "plain": ("#f3f5f8", "#b9c1cd", "#232936", "#4b5566"),
    "blue": ("#dbe7fb", "#3f6fb5", "#22385c", "#7fa8e6"),
    "green": ("#d5efe4", "#2b8a66", "#1b4234", "#63c29c"),
    "orange": ("#fde6cf", "#c26a1e", "#543418", "#eba45f"),
    "red": ("#fbdada", "#bf3b3b", "#5a2323", "#ee8080"),
    "none": ("none", "#8a94a3", "none", "#8a94a3"),
}
_INKS = {"ink": ("#1d2430", "#e8ebf1"), "soft": ("#586273", "#a8b1c0"), "alert": ("#b02a2a", "#f29090")}


def _style() -> str:
    light = [f".{name}{{fill:{fill};stroke:{stroke}}}" for name, (fill, stroke, _, _) in _FILLS.items()]
    dark = [f".{name}{{fill:{fill};stroke:{stroke}}}" for name, (_, _, fill, stroke) in _FILLS.items()]
    light += [f"text.{name}{{fill:{color}}}" for name, (color, _) in _INKS.items()]
    dark += [f"text.{name}{{fill:{color}}}" for name, (_, color) in _INKS.items()]
    fixed = [
        f"text{{font-family:{_SANS};font-size:14px}}",
        f".mono{{font-family:{_MONO};font-size:13px}}",
        ".small{font-size:12px}.title{font-size:16px;font-weight:600}.bold{font-weight:600}.middle{text-anchor:middle}",
        ".line{fill:none;stroke:#7b8696;stroke-width:1.6}.head{fill:#7b8696;stroke:none}",
        ".dashed{stroke-dasharray:4 3}",
    ]
    return "\n".join([*fixed, *light, "@media (prefers-color-scheme: dark){", *dark, "}"])


class Drawing:
    """A picture of `width` x `height` pixels; `title` is read aloud by screen readers."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "page", radius=10)

    def box(self, x: float, y: float, width: float, height: float, kind: str, *, radius: float = 5) -> None:
        """Draw a rectangle; `kind` is a fill of this module, with `dashed` after a space for a dashed border."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "ink") -> None:
        """Write one line whose baseline is at y; `kind` names a color and sizes, e.g. "soft small middle"."""
        classes = kind if set(kind.split()) & set(_INKS) else f"ink {kind}"
        self._shapes.append(f'<text class="{classes}" x="{x:g}" y="{y:g}" xml:space="preserve">{escape(words)}</text>')

    def label(self, x: float, y: float, width: float, height: float, kind: str, *lines: str, words: str = "") -> None:
        """Draw a box with centered lines of text."""
        self.box(x, y, width, height, kind)
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, line, f"middle {words}")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        """Draw a straight, horizontal or vertical arrow."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self._shapes.append(f'<path class="line {kind}" d="M{x1:g} {y1:g} L{x2 - 6 * dx:g} {y2 - 6 * dy:g}"/>')
        corners = [(x2, y2), (x2 - 8 * dx + 4 * dy, y2 - 8 * dy + 4 * dx), (x2 - 8 * dx - 4 * dy, y2 - 8 * dy - 4 * dx)]
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._shapes.append(f'<polygon class="head" points="{points}"/>')

    def path(self, d: str, kind: str = "") -> None:
        """Draw a line given as SVG path data."""
        self._shapes.append(f'<path class="line {kind}" d="{d}"/>')

    def write(self, path: Path) -> None:
        """Write the picture as one SVG file."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.title)}">'
        body = [
            start,
            f"<title>{escape(self.title)}</title>",
            f"<style>\n{_style()}\n</style>",
            *self._shapes,
            "</svg>",
        ]
        path.write_text("\n".join(body) + "\n", encoding="utf-8")
