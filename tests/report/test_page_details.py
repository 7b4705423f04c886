"""Details of the page in a real browser: what is slow, best, forecast, cut off, not finite, or longer than expected."""

import pytest

from samestep.report.page import build_page, write_report
from samestep.report.run_data import read_run
from tests.report.run_folders import BEGIN, event, losses, start, times, write_lines, write_run

pytestmark = pytest.mark.slow
GIB = 2**30
FINISHED = event("end", 90, status="finished", steps=90)


def checkpoint(step: int, accuracy: float | None, error: str | None = None):
    metric = ["test/accuracy", accuracy] if accuracy is not None else None
    return event("checkpoint", step, checkpoint=f"/gone/step-{step}", step=step, bytes=GIB, seconds=1.5,
                 waited_seconds=0.02, metric=metric, error=error)  # fmt: skip


def planned():
    memory = {"weights": GIB, "activations": 2 * GIB, "overhead": GIB, "total": 4 * GIB}
    chosen = {"name": "ddp", "reason": "is the fastest that fits", "memory": memory, "seconds": {"total": 0.08}}
    return event("plan", 1, chosen=chosen, others=[], margin=0.1, model="Net")


@pytest.fixture
def show(open_page, tmp_path):
    """`show(events, metrics, records)` opens the page of such a run."""

    def show_(events, metrics=(), records=(), **options):
        folder = write_run(tmp_path / "run", events, metrics, records)
        return open_page(write_report([read_run(folder)], tmp_path / "report.html"), **options)

    return show_


def test_the_slowest_rank_is_named_with_what_it_spends_its_time_on(show):
    slow = {"forward": [0.3, 0.3], "backward": [0.5, 0.5], "data": [0.01, 0.16]}
    records = [times(step, step, phases=slow, communication=[0.19, 0.04]) for step in range(9, 90, 10)]
    page = show([start(), FINISHED], losses(range(90)), records)
    expected = (
        "Rank 1 is the slowest: without communication it needs 15 ms per step more than the median of the ranks, "
    )
    assert expected + "most of it in data." in page.text("#time")
    page.page.locator(".bar").nth(2).locator(".part-data").hover()
    assert page.text(".tip") == "rank 1: data 16 ms, 16.0%"
    page.page.locator("summary", has_text="Time per step by rank, run").click()
    rows = [row.split() for row in page.page.locator("details tbody tr").all_inner_texts()]
    assert ["rank", "1", "30", "ms", "50", "ms", "4", "ms", "16", "ms"] in rows


def test_ranks_of_an_earlier_start_are_measured_by_their_own_steps(show):
    few, many = {"forward": [0.5] * 2}, {"forward": [0.5] * 4}
    events = [start(ranks=4), start(50, ranks=2), FINISHED]
    records = [times(9, 9, ranks=4, phases=many), *(times(step, 51 + step, phases=few) for step in (19, 29))]
    page = show(events, losses(range(30)), records)
    totals = page.page.locator(".bar > span:last-child").all_inner_texts()
    assert totals[1:] == ["70 ms"] * 4


def test_the_forecast_of_the_plan_stands_beside_what_was_measured(show):
    records = [
        times(step, step, gpu_percent=[97, 96], memory_bytes=[2.5 * GIB, 2.4 * GIB]) for step in range(9, 90, 10)
    ]
    page = show([start(), planned(), FINISHED], losses(range(90)), records)
    rows = page.page.get_by_role("table", name="Plan of run").locator("tbody tr").all_inner_texts()
    assert rows[0].split() == ["memory", "per", "GPU", "3.0", "GiB", "2.5", "GiB", "-16.7%"]
    assert rows[1].split() == ["time", "per", "step", "80", "ms", "100", "ms", "+25.0%"]
    assert page.page.locator("#plan .bar").all_inner_texts() == ["forecast\n3.0 GiB", "measured\n2.5 GiB"]
    (*_, line) = page.data()["charts"]["usage memory_bytes 0"]["series"]
    assert (line["label"], line["value"]) == ("forecast of the plan", [3.0, 3.0])
    assert "GPU utilization, %" in page.text("#time")


def test_the_best_checkpoint_is_named_and_removed_ones_are_folded(show):
    events = [start(), checkpoint(10, 0.5), checkpoint(20, 0.9), checkpoint(30, 0.7), checkpoint(40, None, "disk full")]
    page = show([*events, FINISHED], losses(range(90)))
    rows = page.page.get_by_role("table", name="Checkpoints of run", exact=True).locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["step-20", "step-40"]
    assert rows[0].split("\t")[-1] == "best, removed"
    assert rows[1].split("\t")[-1] == "failed: disk full"
    page.page.get_by_text("2 removed checkpoints").click()
    assert page.page.get_by_role("table", name="Removed checkpoints of run").is_visible()


def test_values_that_are_not_finite_are_counted_marked_and_shown_at_the_pointer(show):
    metrics = losses(range(11))
    metrics[5]["train/loss"] = None
    metrics += [{"step": step, "time": BEGIN + step, "lost": None, "infinite": {"lost": 1}} for step in range(11)]
    page = show([start(), FINISHED], metrics)
    assert "1 of 11 values NaN or infinite, the first at step 5" in page.text("#curves")
    assert page.hover("train/loss", 0.5) == {"step": "5", "train/loss": "nan"}
    assert page.hover("lost", 0.5)["lost"] == "inf"
    assert page.colored_pixels("lost") > 0  # the marks of values that no axis can show


def test_lines_of_the_file_that_are_not_records_are_named(show, tmp_path):
    (tmp_path / "run").mkdir()
    folder = write_run(tmp_path / "run", [start(), FINISHED], losses(range(5)))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\nnot a record\n")
    text = build_page([read_run(folder)], tmp_path / "report.html")
    assert "run/metrics.jsonl: 2 lines are not records, the first is line 6; the page leaves out what they" in text


def test_a_pause_between_two_starts_is_a_gap_over_time(show):
    events = [start(), start(80), event("restored", 80, checkpoint="x/step-10", step=10, corrupt=[]), FINISHED]
    metrics = losses(range(10), of=lambda step: 1.0) + losses(range(10, 20), lambda step: 1.0, lambda step: 70.0 + step)
    page = show(events, metrics)
    drawn = """() => {
      const canvas = document.querySelector('[data-chart="train/loss"] canvas');
      const { data } = canvas.getContext("2d").getImageData(canvas.width / 2 - 30, 0, 60, canvas.height);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) {
        const [r, g, b] = data.slice(i, i + 3);
        count += Math.max(r, g, b) - Math.min(r, g, b) > 60;
      }
      return count;
    }"""
    assert page.page.evaluate(drawn) >= 60  # a line through all 60 columns of pixels
    page.page.get_by_label("time", exact=True).check()
    page.page.wait_for_selector("body[data-drawn=all]")
    assert page.page.evaluate(drawn) < 10


def test_all_charts_over_steps_have_the_same_axis(show):
    metrics = [*losses(range(101)), {"step": 50, "time": BEGIN + 50, "test/accuracy": 0.9}]
    page = show([start(), FINISHED], metrics)
    assert page.hover("test/accuracy", 0.5) == {"step": "50", "test/accuracy": "0.9"}


def test_a_zoom_survives_a_change_of_the_smoothing(show):
    page = show([start(), FINISHED], losses(range(101)))
    area = page.chart("train/loss").locator(".u-over").bounding_box()
    page.page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 50)
    page.page.mouse.down()
    page.page.mouse.move(area["x"] + area["width"] * 0.6, area["y"] + 60)
    page.page.mouse.up()
    assert 50 <= int(page.hover("train/loss", 0.02)["step"]) <= 52
    page.page.get_by_label("smoothing").fill("50")
    page.page.wait_for_selector("body[data-drawn=all]")
    assert 50 <= int(page.hover("train/loss", 0.02)["step"]) <= 52
    page.page.get_by_role("button", name="reset zoom").click()
    page.page.wait_for_selector("body[data-drawn=all]")
    assert int(page.hover("train/loss", 0.02)["step"]) <= 3


def test_without_a_pointer_the_legend_has_the_last_values(show):
    page = show([start(), FINISHED], losses(range(10)))
    assert page.chart("train/loss").locator(".u-legend .u-value").all_inner_texts() == ["9", "0.1"]


def test_a_log_scale_without_positive_values_says_so(show):
    page = show([start(), FINISHED], losses(range(10), of=lambda step: -1.0 - step))
    before = page.colored_pixels("train/loss")
    page.page.get_by_label("log scale").check()
    page.page.wait_for_selector("body[data-drawn=all]")
    assert before > 0
    assert page.colored_pixels("train/loss") == 0


@pytest.mark.parametrize("width", [390, 1200])
def test_very_long_names_and_many_ranks_fit(show, width):
    name = "m" * 500
    metrics = [{"step": step, "time": BEGIN + step, name: 1e300 * step, "tiny": 1e-12 * step} for step in range(5)]
    ranks = {"phases": {"forward": [0.1] * 16}, "communication": [0.1] * 16}
    records = [times(step, step, ranks=16, **ranks) for step in range(9, 90, 10)]
    events = [
        start(ranks=16, command=["train.py", "x" * 3000]),
        event("warning", 2, text="y" * 3000, category="W", file="f", line=1),
    ]
    page = show([*events, FINISHED], metrics, records, width=width)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width


def test_colors_of_terminals_and_control_characters_are_removed(show):
    end = event(
        "end", 9, status="failed", steps=1, error="\x1b[31mValueError\x1b[0m: bad\x07", traceback="\x1b[1mTrace\x1b[0m"
    )
    page = show([start(), end], losses(range(3)))
    assert "ValueError: bad" in page.text("header")
    assert page.page.locator("#failures pre").inner_text() == "Trace"


def test_the_same_folder_twice_is_compared_with_itself(tmp_path):
    folder = write_run(tmp_path / "run", [start(), FINISHED], losses(range(5)))
    text = build_page([read_run(folder), read_run(folder)], tmp_path / "report.html")
    assert "All 5 values at common steps are equal to those of run (1), bit by bit." in text


def test_a_shorter_run_and_metrics_of_one_run_are_named(show, open_page, tmp_path):
    metrics = [*losses(range(5)), {"step": 4, "time": BEGIN, "only/here": 1.0}]
    one = write_run(tmp_path / "one", [start(), event("end", 9, status="finished", steps=10)], losses(range(10)))
    other = write_run(tmp_path / "other", [start(), event("end", 9, status="finished", steps=5)], metrics)
    page = open_page(write_report([read_run(one), read_run(other)], tmp_path / "report.html"))
    text = page.text("#difference")
    assert "All 5 values at common steps are equal to those of one, bit by bit." in text
    assert "The runs have different numbers of steps: one 10, other 5. Only common steps are compared." in text
    assert "Only other has, compared with one: only/here." in text


def test_many_charts_can_be_filtered(show):
    metrics = [{"step": step, "time": BEGIN + step, **{f"val/{n}": 1.0 for n in range(20)}} for step in range(3)]
    page = show([start(), FINISHED], metrics)
    page.page.get_by_label("filter metrics").fill("VAL 17")
    assert page.page.locator("#curves figcaption:visible").all_inner_texts() == ["val/17"]


def test_charts_of_many_metrics_are_grouped_by_the_first_part_of_their_names_in_the_order_of_numbers(show):
    values = {"train/loss": 1.0, **{f"layers/{n}/norm": 1.0 for n in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1)}}
    page = show([start(), FINISHED], [{"step": step, "time": BEGIN + step, **values} for step in range(3)])
    assert page.page.locator(".group > summary").all_inner_texts() == ["train (1)", "layers (10)"]
    titles = page.page.locator(".group").last.locator("figcaption").all_inner_texts()
    assert titles == [f"layers/{n}/norm" for n in range(1, 11)]
    page.page.get_by_label("filter metrics").fill("layers")
    assert page.page.locator(".group:visible").count() == 1


def test_a_loss_that_was_not_finite_is_part_of_the_head(show):
    metrics = losses(range(11))
    metrics[5]["train/loss"] = None
    page = show([start(), FINISHED], metrics)
    assert "train/loss was NaN or infinite at 1 of 11 steps, first at step 5." in page.text("header")


@pytest.mark.parametrize(
    ("is_changed", "text"),
    [(True, "commit 0123456789ab on main, dirty: uncommitted changes"), (False, "commit 0123456789ab on main, clean")],
)
def test_the_head_has_the_commit_and_whether_it_was_dirty(tmp_path, is_changed, text):
    code = event("code", 1, commit="0123456789abcdef", branch="main", is_changed=is_changed)
    folder = write_run(tmp_path / "run", [start(), code, FINISHED], losses(range(5)))
    assert f"<dd>{text}</dd>" in build_page([read_run(folder)], tmp_path / "report.html")


def test_hangs_and_out_of_memory_restarts_are_in_the_timeline_of_a_script_without_a_run(open_page, tmp_path):
    launches = [
        event("launch", 0, command=["plain.py"], ranks=2),
        event("attempt", 1, attempt=0, world_size=2, pids={"0": 7, "1": 8}),
        event("failure", 10, cause="rank 1: out of memory", report="", ranks_ended=[
            {"rank": 1, "time": BEGIN + 9, "how": "out of memory"}]),
        event("out_of_memory", 10),
        event("attempt", 11, attempt=1, world_size=2, pids={"0": 9, "1": 10}),
        event("hang", 30, summary="rank 1 is at train.py:7", culprits=[1], report="hang/1.txt"),
        event("end", 40, code=1),
    ]  # fmt: skip
    write_lines(tmp_path / "plain" / "logs" / "launcher-gpu-07.jsonl", launches)
    page = open_page(write_report([read_run(tmp_path / "plain")], tmp_path / "report.html"))
    lanes = page.page.locator(".timeline .lane > span").all_inner_texts()
    assert lanes == ["rank 0", "rank 1", "restarts", "out of memory", "hangs", "failures", "time"]
    tips = page.page.locator(".timeline rect.end").evaluate_all("all => all.map(each => each.dataset.tip)")
    assert tips == ["9.0 s on 2 ranks, failed", "29 s on 2 ranks, failed", "8.0 s on 2 ranks, out of memory",
                    "29 s on 2 ranks, failed"]  # fmt: skip
    assert "Failed with exit code 1." in page.text("header")


def test_links_lead_to_the_sections(show):
    page = show([start(), checkpoint(10, 0.5), FINISHED], losses(range(90)))
    page.page.get_by_role("navigation").get_by_role("link", name="Checkpoints").click()
    assert page.page.locator("#checkpoints").evaluate("each => each.getBoundingClientRect().top < window.innerHeight")
    keys = page.page.locator("main > section").evaluate_all("all => all.map(each => '#' + each.id)")
    assert page.page.locator("nav a").evaluate_all("all => all.map(each => each.getAttribute('href'))") == keys
