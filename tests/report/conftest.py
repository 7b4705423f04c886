"""A real browser: headless Chromium, as Debian packages it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leak_checks

NEEDED = "SAMESTEP_TESTS_NEED_BROWSER"  # set in CI, where a skipped test must fail instead
# Without these Chromium looks for updates and for its services in the network.
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """The browser, started once."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        reason = "no Chromium: `make browser` installs it on Debian and Ubuntu"
        assert NEEDED not in os.environ, reason
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    before = leak_checks.descendants(os.getpid())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        started = leak_checks.descendants(os.getpid()) - before
        leak_checks.shared_processes.update(started)
        yield browser
        browser.close()
    leak_checks.shared_processes.difference_update(started)


class OpenedPage:
    """A report in the browser; every error, blocked script and request of the page is kept."""

    def __init__(self, page, path: Path) -> None:
        self.page, self.problems, self.requests = page, [], []
        page.on("console", lambda message: self.problems.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-drawn=all]")

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return self.page.inner_text(selector)

    def data(self) -> dict:
        """What the charts draw."""
        return self.page.evaluate("JSON.parse(document.getElementById('chart-data').textContent)")

    def chart(self, key: str):
        """The element of a chart."""
        return self.page.locator(f'[data-chart="{key}"]')

    def colored_pixels(self, key: str) -> int:
        """How many pixels of a chart are neither empty nor grey, as curves are."""
        return self.page.evaluate(
            """key => {
              const canvas = document.querySelector(`[data-chart="${key}"] canvas`);
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              let count = 0;
              for (let i = 0; i < data.length; i += 4) {
                const [r, g, b, a] = data.slice(i, i + 4);
                if (a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60) count++;
              }
              return count;
            }""",
            key,
        )

    def hover(self, key: str, share: float) -> dict[str, str]:
        """Point at a chart, at this share of its width; returns the values in the legend below it."""
        area = self.chart(key).locator(".u-over")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        self.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
        rows = self.chart(key).locator(".u-legend .u-series").all()
        return {row.locator(".u-label").inner_text(): row.locator(".u-value").inner_text() for row in rows}


@pytest.fixture
def open_page(chromium) -> Iterator:
    """`open_page(path)` opens a report; no error may happen until the end of the test, and no request."""
    opened = []

    def open_(path: Path, width: int = 1200, scheme: str = "light") -> OpenedPage:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append((context, OpenedPage(context.new_page(), path), path))
        return opened[-1][1]

    yield open_
    for context, page, path in opened:
        context.close()
        assert page.problems == []
        assert set(page.requests) == {path.as_uri()}
