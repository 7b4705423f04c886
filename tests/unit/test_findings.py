"""How findings are shown: the source with the statement marked, what was seen, consequences, and long texts."""

from dataclasses import replace

import pytest

from samestep.findings import Finding, Location, count_findings, format_findings, labeled_lines, source_lines

SOURCE = """\
import torch


def train(loader):
    for epoch in range(
        3,
    ):
        if epoch == 1: print("one")
        torch.save(
            epoch,
            "last.pt",
        )

    return loader
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SOURCE)
    return str(tmp_path / "train.py")


def finding(location=None, **values):
    found = Finding(
        "SS501",
        "file-written-by-several-ranks",
        "error",
        location,
        "2 ranks write last.pt",
        "it may be corrupt",
        "write on rank 0",
    )
    return replace(found, **values)


def test_a_finding_shows_the_statement_what_was_seen_and_its_repair(file):
    follow = finding(Location(file, 13), code="SS502", name="unsynchronized-read", summary="rank 1 reads it " * 10)
    shown = finding(
        Location(file, 9, "train"),
        ranks=(0, 1),
        evidence=["rank 0 writes at train.py:9", "rank 1 writes at train.py:9"],
        related=[Location(file, 9), Location(file, 5)],
        follows=[follow],
    )
    assert format_findings([shown], 100).splitlines() == [
        "train.py:9: error SS501 file-written-by-several-ranks",
        '     8 | if epoch == 1: print("one")',
        "  >  9 | torch.save(",
        "  > 10 |     epoch,",
        '  > 11 |     "last.pt",',
        "  > 12 | )",
        "  seen      2 ranks write last.pt",
        "            rank 0 writes at train.py:9",
        "            rank 1 writes at train.py:9",
        "  ranks     0, 1",
        "  why       it may be corrupt",
        "  repair    write on rank 0",
        "  related   train.py:5: for epoch in range(",
        "  explains  train.py:13: SS502 unsynchronized-read: rank 1 reads it rank 1 reads it rank 1 reads ...",
    ]


def test_a_finding_without_a_line_has_no_source():
    assert format_findings([finding()]).splitlines()[:2] == [
        "error SS501 file-written-by-several-ranks",
        "  seen      2 ranks write last.pt",
    ]


def test_findings_are_separated_by_an_empty_line():
    assert format_findings([finding(), finding()]).count("\n\nerror SS501") == 1


@pytest.mark.parametrize(
    ("line", "marked"),
    [(1, [1]), (4, [4]), (5, [5, 6, 7]), (6, [5, 6, 7]), (8, [8]), (10, [9, 10, 11, 12]), (13, [13]), (14, [14])],
)
def test_the_statement_of_a_line_is_marked_and_only_the_head_of_a_loop(file, line, marked):
    assert [number for number, _, is_marked in source_lines(Location(file, line)) if is_marked] == marked


def test_of_a_long_statement_the_lines_after_the_location_are_shown(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("\n".join(["values = [", *(f"    {number}," for number in range(40)), "]", ""]))
    assert [number for number, _, _ in source_lines(Location(str(path), 20))] == list(range(18, 28))


def test_a_file_that_python_cannot_parse_or_that_is_gone_is_no_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("a\n\tb(\fc\n")
    assert source_lines(Location(str(path), 2)) == [(1, "a", False), (2, "        b(\fc", True)]
    assert source_lines(Location(str(path), 9)) == source_lines(Location(str(tmp_path / "gone.py"), 1)) == []


def test_a_long_text_is_wrapped_beside_its_label():
    lines = ["".join(text for text, _ in line) for line in labeled_lines("why", "one two-three four five", 30, 6)]
    assert lines == ["  why   one two-three four", "        five"]


def test_findings_are_counted_by_severity():
    assert count_findings([]) == "no faults"
    assert count_findings([finding(), finding(), finding(severity="note")]) == "2 errors and 1 note"
