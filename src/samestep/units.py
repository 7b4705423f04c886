"""How amounts read to people: memory and time spans."""


def bytes_text(count: float) -> str:
    """An amount of memory in the largest unit that leaves at least one.

    >>> bytes_text(1.25 * 2**30), bytes_text(64 * 2**20)
    ('1.2 GiB', '64.0 MiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time span as hours, minutes and seconds.

    >>> duration(83.4), duration(90061)
    ('1:23', '25:01:01')
    """
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_text(seconds: float) -> str:
    """A short time with three digits.

    >>> seconds_text(0.01234), seconds_text(2.5), seconds_text(1234.5)
    ('12.3 ms', '2.50 s', '1,234 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"
