"""summary.json: how a run ended, there as a whole or not at all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from samestep.disk import replace_text
from samestep.errors import LogError


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write the summary so that a reader finds the old file or the new one, never a part, also after a crash.

    Keys are sorted. Numbers that are not finite become null, as JSON has no word for them.
    """
    text = json.dumps(_plain("summary", dict(summary)), indent=2, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def _plain(place: str, value: object) -> object:
    """The value in JSON's own kinds."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(key): _plain(f"{place}[{key!r}]", item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(f"{place}[{index}]", item) for index, item in enumerate(value)]
        case _:
            raise LogError(
                f"{place} is a {type(value).__name__}, which JSON cannot hold: "
                "give a number, a text, or lists and dicts of them, e.g. float(x)"
            )
