"""What is said of ranks that did not come: who, where they are, and what to do."""

from samestep.errors import RankMissing
from samestep.ranks.places import Place

ORDER_RULE = "every rank must make the same calls in the same order (is one of them under `if run.first:`?)"
_SHOWN = 8


def tell(places: dict[int, Place]) -> str:
    """Where ranks are, in words."""
    told = (f"rank {rank} {place.tell()}" for rank, place in sorted(places.items())[:_SHOWN])
    return "; ".join(told) or "no rank tells why"


def gone_astray(rank: int, here: Place, astray: dict[int, Place]) -> RankMissing:
    """Peers that will not come: they failed, ended, or wait somewhere else."""
    rule = "" if all(place.state == "failed" for place in astray.values()) else f": {ORDER_RULE}"
    return RankMissing(f"{_waits(rank, here)}, but {tell(astray)}{rule}")


def come_late(
    rank: int, here: Place, missing: dict[int, Place], waited: float, timeout: float, option: str
) -> RankMissing:
    """Peers that have not come; before the timeout that means that a connection broke."""
    remedy = (
        f"If that rank does honest work, give it time with Run({option}=...); if it is stuck, its stack shows where: "
        "py-spy dump --pid PID"
        if waited >= timeout
        else "The connection to a rank was lost: it died or was killed; look for its last lines"
    )
    return RankMissing(f"{_waits(rank, here)} since {waited:.0f} s: {tell(missing)}. {remedy}")


def store_gone(rank: int, here: Place) -> RankMissing:
    """Nobody can be asked any more."""
    return RankMissing(
        f"{_waits(rank, here)}, and the store of the ranks is gone: the rank that served it has ended or died; look "
        "for its message"
    )


def _waits(rank: int, here: Place) -> str:
    return f"rank {rank} waits in {here.act} at {here.site}"
