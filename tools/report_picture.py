"""Take the picture of docs/images/report.png from a page of `samestep report` about two runs, with Chromium.

python tools/report_picture.py runs/demo/report.html
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent.parent / "docs" / "images" / "report.png"
FIRST = "difference"  # section; the head above it would show the machine
WIDTH, HEIGHT = 1180, 1555


def main() -> int:
    """Take the picture; the exit status is 1 without Chromium."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        print("no Chromium: `make browser` installs it on Debian and Ubuntu")
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(Path(sys.argv[1]).absolute().as_uri())
        page.wait_for_selector("body[data-drawn=all]")
        top = page.locator(f"#{FIRST}").evaluate("each => each.getBoundingClientRect().top + window.scrollY")
        page.screenshot(path=OUT, full_page=True, clip={"x": 0, "y": top - 12, "width": WIDTH, "height": HEIGHT})
        browser.close()
    print(f"{OUT.relative_to(OUT.parents[2])}: {OUT.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
