"""One HTML file that shows what runs did: no network, no server, and nothing in it that could run but its own script.

The curves are drawn by uPlot (https://github.com/leeoniya/uPlot, MIT), which is part of this package; docs/report.md
says why it was chosen.
Everything else is HTML and SVG without a script. A Content-Security-Policy allows the page's own script and styles by
their hashes and forbids all else.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

from samestep import __version__
from samestep.disk import describe_os_error, write_atomically
from samestep.errors import ReportError
from samestep.report import chart_data, sections, time_sections
from samestep.report.head import page_head
from samestep.report.markup import Markup, element, join
from samestep.report.run_data import RunData, reading
from samestep.report.verdict import describe_run

_ASSETS: Final = files("samestep.report") / "assets"


def write_report(runs: Sequence[RunData], out: Path) -> Path:
    """Write the page of one run, or of several runs that are compared with the first; returns its absolute path."""
    out = out.resolve()
    with reading(runs[0].folder if len(runs) == 1 else Path(os.path.commonpath([run.folder for run in runs]))):
        page = build_page(runs, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and not out.is_file():  # a pipe or a device, which must not be replaced by a file
            out.write_text(page, encoding="utf-8")
        else:
            write_atomically(out, page)
    except OSError as error:  # the folder of somebody else's run, a full disk
        reason = describe_os_error(error)
        raise ReportError(f"the page {out} cannot be written ({reason}); --out writes it to another file") from error
    return out


def build_page(runs: Sequence[RunData], out: Path) -> str:
    """The text of the page; links in it are relative to `out`."""
    names = run_names(runs)
    charts = chart_data.metric_charts(runs)
    usage = [
        chart
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
        for chart in chart_data.usage_charts(run, number, name if names[1:] else "")
    ]
    compared = chart_data.find_differences(runs)
    differences = chart_data.difference_charts(compared)
    failures = sections.failure_section(runs, names, out)
    is_good = all(describe_run(run).is_good for run in runs)
    shown = [
        failures if not is_good else None,
        sections.differences(compared, differences, runs, names),
        sections.curves(charts, runs, names),
        time_sections.time_section(runs, names, usage),
        time_sections.plan_section(runs, names),
        sections.data_section(runs, names),
        sections.timeline_section(runs, names),
        failures if is_good else None,  # it was resumed since
        sections.checkpoint_section(runs, names),
        sections.warning_section(runs, names),
    ]
    found = [each for each in shown if each is not None]
    body = join(
        [
            element("header", page_head(runs, names)),
            element("nav", *(each.link() for each in found), aria_label="Sections") if found else None,
            element("main", *(each.to_markup() for each in found)),
            _footer(runs),
        ]
    )
    drawn = {chart.key: chart.to_json() for chart in (*charts, *usage, *differences)}
    data = {"names": names, "charts": drawn, "marks": chart_data.marks(runs)}
    return _document(" and ".join(names), body, json.dumps(data, allow_nan=False, separators=(",", ":")))


def run_names(runs: Sequence[RunData]) -> list[str]:
    """A short name for each run; runs with folders of the same name get the name of the folder above, too.

    >>> from unittest.mock import Mock
    >>> run_names([Mock(folder=Path("/a/one/out")), Mock(folder=Path("/a/two/out"))])
    ['one/out', 'two/out']
    """
    depth, folders = 1, {run.folder for run in runs}
    deepest = max(len(folder.parts) for folder in folders)
    while len({_name(folder, depth) for folder in folders}) < len(folders) and depth < deepest:
        depth += 1
    names = [_name(run.folder, depth) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _name(folder: Path, depth: int) -> str:
    return "/".join(part for part in folder.parts[-depth:] if part != "/") or str(folder)


def _footer(runs: Sequence[RunData]) -> Markup:
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
    live = " A run was still running: make the page again to see more." if _is_live(runs) else ""
    folders = join(element("li", element("code", str(run.folder))) for run in runs)
    return element(
        "footer", element("p", f"Made by samestep {__version__} at {made} from:{live}"), element("ul", folders)
    )


def _is_live(runs: Sequence[RunData]) -> bool:
    return any(describe_run(run).status == "running" for run in runs)


def _document(title: str, body: Markup, data: str) -> str:
    style = _read("uPlot.min.css") + _read("page.css")
    script = _read("uPlot.iife.min.js") + "\n" + _read("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    in_script = data.replace("<", "\\u003c")  # so that no text in it can end the element
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("link", rel="icon", href="data:,"),
            element("title", f"{title} - samestep"),
            Markup(f"<style>{style}</style>"),
        ]
    )
    scripts = Markup(f'<script type="application/json" id="chart-data">{in_script}</script><script>{script}</script>')
    page = element("html", element("head", head), element("body", body, scripts), lang="en")
    return f"<!doctype html>\n{page}\n"


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
