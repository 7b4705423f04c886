"""docs/hangs.md has a row for each kind of cause, with what to do about it."""

import re
from pathlib import Path

from samestep.hang.hang_cause import REMEDIES

PAGE = Path(__file__).parent.parent.parent / "docs" / "hangs.md"


def test_the_page_has_the_kinds_of_causes_and_the_remedies_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.+) \|$", PAGE.read_text(), re.M)
    assert dict(rows) == REMEDIES
