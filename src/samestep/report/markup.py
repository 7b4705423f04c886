"""HTML and SVG elements as text; whatever is not markup already is escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from samestep.messages import plain_text

_VOID: Final = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | float | None
"""Text, a number, markup, or nothing."""


def element(tag: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element with its content and attributes; `class_` is `class`, and `_` in a name is `-`.

    >>> element("a", "<script>", href="x", class_="link")
    '<a href="x" class="link">&lt;script&gt;</a>'
    """
    start = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{start}>")
    return Markup(f"<{tag}{start}>{join(content)}</{tag}>")


def join(content: Iterable[Content]) -> Markup:
    """Pieces of content, one after the other."""
    return Markup("".join(_as_markup(each) for each in content))


def table(
    caption: str, headings: Sequence[str], rows: Iterable[Sequence[Content]], *, numbers: Sequence[str] = ()
) -> Markup:
    """A table that screen readers can read: a caption, headings of columns, and the first cell as heading of its row.

    Columns in `numbers` are aligned to the right.
    """
    classes = ["number" if heading in numbers else None for heading in headings]
    head = join(element("th", text, scope="col", class_=each) for text, each in zip(headings, classes, strict=True))
    body = join(element("tr", *_cells(row, classes)) for row in rows)
    whole = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _cells(row: Sequence[Content], classes: Sequence[str | None]) -> Iterable[Markup]:
    for index, (cell, each) in enumerate(zip(row, classes, strict=True)):
        yield element("td", cell, class_=each) if index else element("th", cell, scope="row", class_=each)


@dataclass(frozen=True)
class Section:
    """A section of the page; `key` is its anchor."""

    key: str
    title: str
    content: Markup

    def to_markup(self) -> Markup:
        """The section with its heading."""
        heading = element("h2", self.title, id=f"{self.key}-title")
        return element("section", heading, self.content, id=self.key, aria_labelledby=f"{self.key}-title")

    def link(self) -> Markup:
        """A link to the section."""
        return element("a", self.title, href=f"#{self.key}")


def section(key: str, title: str, *content: Content) -> Section:
    """A section with this content."""
    return Section(key, title, join(content))


def definitions(pairs: Iterable[tuple[str, Content]], class_: str | None = None) -> Markup:
    """A list of names with their values; those without a value are left out."""
    shown = ((name, value) for name, value in pairs if value not in (None, ""))
    items = (element("div", element("dt", name), element("dd", value)) for name, value in shown)
    return element("dl", *items, class_=class_)


def _as_markup(content: Content) -> str:
    if content is None:
        return ""
    return content if isinstance(content, Markup) else escape(plain_text(str(content)))


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(plain_text(str(value)))}"'
