"""Names and prose in plain technical English, as far as tools/wording.py can tell."""

from tests.conftest import REPOSITORY
from tools import wording


def test_the_project_uses_the_words_of_the_field():
    found = wording.scan(REPOSITORY)
    assert len(found) <= wording.ALLOWED, wording.summarize(found)


def test_names_strings_and_comments_are_scanned():
    text = 'told = f"rank {rank} is no rank"  # nobody\nset_told(x.roll(1), "luck")\n'
    found = [(each.line, each.word) for each in wording.scan_code("src/spare.py", text)]
    assert found == [(0, "spare"), (1, "told"), (1, "is no r"), (1, "nobody"), (2, "told")]


def test_code_blocks_of_a_page_are_ignored_and_lines_are_counted():
    page = "good\n```\nluck\n```\nbad luck\n"
    assert [(each.line, each.word) for each in wording.scan_prose("a.md", wording.without_code(page))] == [(5, "luck")]
