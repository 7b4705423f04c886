"""The page of a report in a real browser: curves, values, words, no network, and no script but its own."""

import json
import math

import numpy as np
import pytest

from samestep.report.page import build_page, write_report
from samestep.report.run_data import read_run
from tests.report.run_folders import BEGIN, event, losses, running, start, times, write_lines, write_run

pytestmark = pytest.mark.slow
FINISHED = event("end", 90, status="finished", steps=90)
MODEL = event("model", 1, model="Net", parameters=1_234_567, trainable=1_234_567, strategy="ddp")
DATA = event("data", 1, name="shard-0", dataset="Images", samples=2000, shuffle=True, weighted=False, drop_last=False,
             dropped=0, steps_per_epoch=8, micro_batches=2, rows=64, padding_per_epoch=48, num_workers=4)  # fmt: skip


def page_of(*folders, out):
    return write_report([read_run(folder) for folder in folders], out)


def finished_run(folder, of=lambda step: math.exp(-step / 30)):
    evaluation = event("evaluation", 45, step=44, epoch=4, seconds=3.0)
    checkpoint = event("checkpoint", 50, checkpoint=str(folder / "step-45"), step=45, bytes=3 * 2**20, seconds=1.5,
                       waited_seconds=0.02, metric=["test/accuracy", 0.9], error=None)  # fmt: skip
    metrics = [*losses(range(90), of), {"step": 44, "epoch": 4, "time": BEGIN + 45, "test/accuracy": 0.9}]
    events = [start(), MODEL, DATA, evaluation, checkpoint, FINISHED]
    return write_run(folder, events, metrics, [times(step, step) for step in range(9, 90, 10)])


def test_the_page_of_a_finished_run(open_page, tmp_path):
    folder = finished_run(tmp_path / "first")
    page = open_page(page_of(folder, out=tmp_path / "report.html"))
    assert "Finished after 90 steps in 1 min 30 s." in page.text("header")
    facts = page.text("header")
    for text in ("train.py --lr 0.1", "2 \u00d7 NVIDIA H200", "Net, 1,234,567 parameters", "ddp", "bf16, tf32", "256",
                 "64 rows per rank, 2 per step", "0.05"):  # fmt: skip
        assert text in facts, text
    assert page.colored_pixels("train/loss") > 300
    legend = page.hover("train/loss", 0.5)
    assert 40 <= int(legend["step"]) <= 50
    assert float(legend["train/loss"]) == pytest.approx(math.exp(-int(legend["step"]) / 30), rel=1e-6)
    assert "padding rows per epoch" in page.text("#data")
    assert "3.0 MiB" in page.text("#checkpoints")
    shares = page.text("#time")
    assert "30.0%" in shares  # forward: 0.3 of 1.0 s
    assert "20.0%" in shares  # waiting
    assert "100 ms" in shares  # the mean step


def test_the_numbers_in_the_page_are_those_of_the_file(open_page, tmp_path):
    folder = finished_run(tmp_path / "first", of=lambda step: 0.1 + step * math.pi)
    page = open_page(page_of(folder, out=tmp_path / "report.html"))
    (series,) = page.data()["charts"]["train/loss"]["series"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]
    assert list(zip(series["step"], series["value"], strict=True)) == expected


def test_two_runs_are_compared_with_their_largest_difference_and_where_it_is(open_page, tmp_path):
    one = finished_run(tmp_path / "1-rank")
    other = finished_run(tmp_path / "2-ranks", of=lambda step: math.exp(-step / 30) * (1 + 1e-7 * (step == 37)))
    page = open_page(page_of(one, other, out=tmp_path / "report.html"))
    text = page.text("#difference")
    assert "the largest relative difference is 1.0e-07: train/loss of 2-ranks at step 37" in text
    assert "among 91 values at common steps" in text
    rows = page.page.locator("#difference tbody tr").all_inner_texts()
    assert any(row.split()[:4] == ["test/accuracy", "1", "1", "0"] for row in rows)
    assert len(page.data()["charts"]["train/loss"]["series"]) == 2
    legend = page.chart("train/loss").locator(".u-legend").inner_text()
    assert "1-rank" in legend
    assert "2-ranks" in legend
    assert page.colored_pixels("difference train/loss") > 0
    assert "Equal in all runs" in page.text("header")


def test_facts_that_differ_stand_beside_each_other_and_those_that_should_not_are_red(open_page, tmp_path):
    runs = [
        write_run(tmp_path / name, [start(ranks=ranks, seed=seed), FINISHED], losses(range(5)))
        for name, ranks, seed in (("a", 1, 3), ("b", 2, 4))
    ]
    page = open_page(page_of(*runs, out=tmp_path / "report.html"))
    rows = page.page.get_by_role("table", name="What differs between the runs").locator("tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["GPU-hours", "0.025", "0.05"], ["ranks", "1 on gpu-07", "2 on gpu-07"], ["seed", "3", "4"],
    ]  # fmt: skip
    assert page.page.locator(".differs").all_inner_texts() == ["4"]
    assert "256" in page.text(".facts")


def test_equal_runs_are_called_equal_bit_by_bit(tmp_path):
    runs = [read_run(finished_run(tmp_path / name)) for name in ("a", "b")]
    assert "All 91 values at common steps are equal to those of a, bit by bit." in build_page(
        runs, tmp_path / "report.html"
    )


def test_a_failed_run_shows_its_cause_first_with_the_report_and_a_link_to_the_logs(open_page, tmp_path):
    folder, logs = tmp_path / "failed", tmp_path / "failed" / "logs"
    failure = event("failure", 21, cause="rank 1: ValueError: bad sample 7", report="rank 1 failed first\n  line 31",
                    logs=str(logs), ranks_ended=[{"rank": 1, "time": BEGIN + 15, "how": "exit code 1"}])  # fmt: skip
    end = event("end", 20, status="failed", steps=19, error="RankMissing: rank 1 has failed", traceback="Traceback")
    write_run(folder, [start(), end], losses(range(19)), launches=[event("launch", 0, ranks=2), failure])
    page = open_page(page_of(folder, out=folder / "report.html"))
    assert "Failed after 19 steps" in page.text("header")
    assert page.page.locator("main > section").first.get_attribute("id") == "failures"
    assert "rank 1: ValueError: bad sample 7" in page.text("#failures")
    assert page.page.locator("#failures a").get_attribute("href") == "logs"
    ends = page.page.locator(".timeline rect.failed")
    assert [end.get_attribute("data-tip") for end in ends.all()] == [
        "20 s on 2 ranks, failed",
        "15 s on 2 ranks, exit code 1",
    ]
    ends.last.hover()
    assert page.text(".tip") == "15 s on 2 ranks, exit code 1"


def test_restarts_are_marked_in_curves_and_in_the_timeline(open_page, tmp_path):
    events = [start(), start(100, ranks=1), event("restored", 101, checkpoint="out/step-40", step=40, corrupt=[]),
              event("profile", 110, steps=[42, 44], ranks=[0], files=["profile/rank-0-steps-42-44.json.gz"]),
              event("end", 130, status="finished", steps=70)]  # fmt: skip
    metrics = losses(range(60)) + losses(range(40, 70), seconds=lambda step: 60 + step)
    page = open_page(page_of(write_run(tmp_path / "run", events, metrics), out=tmp_path / "report.html"))
    assert page.data()["marks"] == [{"run": 0, "step": 40, "time": 100, "text": "resumed, 2 \u2192 1 rank"}]
    assert "Before, it was killed; it resumed on 1 rank instead of 2." in page.text("header")
    assert page.page.locator(".timeline rect.killed").count() == 2
    assert page.page.locator(".timeline rect.finished").count() == 1
    page.page.get_by_text("events as a list").click()
    assert "resumed from step-40, step 40" in page.text("#timeline")
    assert "profile of steps 42 to 44: profile/rank-0-steps-42-44.json.gz" in page.text("#timeline")


def test_text_of_the_user_is_text(open_page, tmp_path):
    attack = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    events = [
        start(command=["train.py", attack], hosts={attack: 2}),
        event("model", 1, model=attack, parameters=1, trainable=1, strategy="ddp"),
        event("warning", 2, text=attack, category="UserWarning", file=attack, line=1),
        event("end", 9, status="failed", steps=1, error=attack, traceback=attack),
    ]
    metrics = [{"step": step, "time": BEGIN + step, attack: 1.0 + step} for step in range(5)]
    metrics += [{"step": 5, "time": BEGIN + 5, "__proto__": 1.0, "<script>": 2.0}]
    page = open_page(page_of(write_run(tmp_path / "run", events, metrics), out=tmp_path / "report.html"))
    assert page.page.evaluate("window.hacked") is None
    assert attack in page.text("header")
    assert attack in page.text("#curves")
    assert attack in page.text("#warnings")
    assert page.page.locator("script").count() == 2


def test_the_policy_blocks_scripts_that_are_not_the_pages_own(chromium, tmp_path):
    path = page_of(finished_run(tmp_path / "run"), out=tmp_path / "report.html")
    text = path.read_text()
    path.write_text(text.replace("</main>", "<script>window.hacked = 1</script></main>"))
    tab = chromium.new_page()
    blocked = []
    tab.on("console", lambda message: blocked.append(message.text))
    tab.goto(path.as_uri())
    assert tab.evaluate("window.hacked") is None
    assert any("Content Security Policy" in each for each in blocked)
    tab.close()


def test_controls_change_the_axes_and_smooth_the_curves(open_page, tmp_path):
    rng = np.random.default_rng(0)
    noisy = finished_run(tmp_path / "run", of=lambda step: 1.0 + 0.3 * float(rng.normal()))
    page = open_page(page_of(noisy, out=tmp_path / "report.html"))
    tab = page.page
    tab.get_by_label("time", exact=True).check()
    assert page.hover("train/loss", 0.5)["time"].startswith("0:4")
    tab.get_by_label("smoothing").fill("90")
    legend = page.hover("train/loss", 0.5)
    assert abs(float(legend["train/loss (smoothed)"]) - 1.0) < abs(float(legend["train/loss"]) - 1.0) + 0.3
    before = page.chart("train/loss").screenshot()
    tab.get_by_label("log scale").check()
    assert page.chart("train/loss").screenshot() != before
    area = page.chart("train/loss").locator(".u-over").bounding_box()
    unzoomed = page.chart("train/loss").screenshot()
    tab.mouse.move(area["x"] + 50, area["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(area["x"] + 150, area["y"] + 60)
    tab.mouse.up()
    assert page.chart("train/loss").screenshot() != unzoomed
    tab.get_by_role("button", name="reset zoom").click()
    assert page.colored_pixels("train/loss") > 100


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1200, "dark"), (390, "light")])
def test_it_fits_a_phone_and_follows_the_color_scheme(open_page, tmp_path, width, scheme):
    page = open_page(page_of(finished_run(tmp_path / "run"), out=tmp_path / "report.html"), width, scheme)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(244, 246, 248)", "dark": "rgb(13, 17, 23)"}[scheme]
    assert page.colored_pixels("train/loss") > 100


def test_tables_and_pictures_have_names_for_screen_readers(open_page, tmp_path):
    page = open_page(page_of(finished_run(tmp_path / "run"), out=tmp_path / "report.html"))
    unnamed = page.page.evaluate(
        """() => [...document.querySelectorAll("table, [role=img], [data-chart], section")].filter(each =>
          !(each.tagName === "TABLE" ? each.caption?.textContent : each.getAttribute("aria-label") ||
            document.getElementById(each.getAttribute("aria-labelledby"))?.textContent)).map(each => each.outerHTML)"""
    )
    assert unnamed == []
    headings = page.page.locator("h1, h2").all_inner_texts()
    assert headings == ["run", "Curves", "Time", "Data", "Timeline", "Checkpoints"]


def test_a_live_run_says_so(open_page, tmp_path):
    page = open_page(page_of(write_run(tmp_path / "run", [running()], losses(range(5))), out=tmp_path / "report.html"))
    assert "Running 5 steps in 4.0 s so far." in page.text("header")
    assert "A run was still running: make the page again to see more." in page.text("footer")


def test_a_million_points_are_a_small_page_that_shows_its_first_picture_in_a_second(open_page, tmp_path):
    steps = 1_000_000
    write_run(tmp_path / "run", [start(), event("end", steps, status="finished", steps=steps)])
    values = np.random.default_rng(0).normal(size=steps)
    values[654_321] = 50.0
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        for step, value in enumerate(values.tolist()):
            file.write(f'{{"step": {step}, "time": {BEGIN + step}, "train/loss": {value}}}\n')
    out = page_of(tmp_path / "run", out=tmp_path / "report.html")
    assert out.stat().st_size < 5e6
    page = open_page(out)
    (series,) = page.data()["charts"]["train/loss"]["series"]
    assert series["step"][series["value"].index(50.0)] == 654_321
    seconds = []
    for _ in range(3):  # the machine may be busy with other tests
        page.page.reload()
        page.page.wait_for_selector("body[data-drawn=all]")
        seconds.append(float(page.page.get_attribute("body", "data-first-chart")) / 1000)
    assert min(seconds) < 1.0


def test_a_page_without_metrics_or_without_a_run_is_a_page(open_page, tmp_path):
    empty = open_page(page_of(write_run(tmp_path / "run", [start()]), out=tmp_path / "report.html"))
    assert "Killed after 0 steps" in empty.text("header")
    write_lines(tmp_path / "plain" / "logs" / "launcher-x.jsonl", [event("launch", 0, command=["plain.py"], ranks=2)])
    plain = open_page(page_of(tmp_path / "plain", out=tmp_path / "plain.html"))
    assert "plain.py" in plain.text("header")
