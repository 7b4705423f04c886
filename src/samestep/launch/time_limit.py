"""Time limits as people and SLURM write them, read as seconds."""

import re

from samestep.errors import LaunchError

# SLURM's own forms, in the order of its manual; a number alone is minutes.
_FORMS = (
    r"(?P<m>\d+)",
    r"(?P<m>\d+):(?P<s>[0-5]?\d)",
    r"(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)",
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?:in)?)?(?:(?P<s>\d+)s)?",
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def read_time_limit(option: str, text: str) -> int:
    """Seconds of a limit such as 4:00:00, 1-12:00 or 3h55m; `option` is named where it is none of these.

    >>> read_time_limit("--time", "90"), read_time_limit("--time", "3h55m"), read_time_limit("--time", "1-12")
    (5400, 14100, 129600)
    """
    for form in _FORMS:
        match = re.fullmatch(form, text.strip().lower(), re.ASCII)
        seconds = sum(_SECONDS[unit] * int(number or 0) for unit, number in match.groupdict().items()) if match else 0
        if seconds:
            return seconds
    raise LaunchError(
        f"{option} {text} is not a time limit: type hours, minutes and seconds as in 4:00:00 or 3h55m, days before "
        "them as in 1-12:00:00 or 1d12h, or a number of minutes"
    )
