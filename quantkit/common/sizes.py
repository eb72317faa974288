"""Human-readable numbers: bytes with a unit, seconds as minutes or hours, shares as percent."""

import math

from quantkit.common.errors import QuantkitError

_UNITS = ("B", "kB", "MB", "GB", "TB")


def byte_unit(largest: float) -> tuple[float, str]:
    """The number of bytes and the name of the decimal unit in which `largest` bytes are a number
    from 1 to 1000."""
    power = 0
    while largest >= 1000 and power < len(_UNITS) - 1:
        largest /= 1000
        power += 1
    return 1000.0**power, _UNITS[power]


def format_bytes(count: float) -> str:
    """Bytes in decimal units, at least three digits: 353.0 GB, 10.5 MB, 940 B."""
    scale, unit = byte_unit(count)
    number = count / scale
    return (
        f"{number:.0f} {unit}"
        if scale == 1 or number >= 999.5
        else f"{number:.{1 if number >= 10 else 2}f} {unit}"
    )


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units: 0.4 s, 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for small, large, step, per in (
        ("s", "min", 1, 60),
        ("min", "h", 60, 60),
        ("h", "d", 3600, 24),
    ):
        count = round(whole / step)
        if count < per * per or large == "d":
            rest = f" {count % per} {small}" if count % per else ""
            return f"{count // per} {large}{rest}"
    raise AssertionError(seconds)


def parse_bytes(text: str) -> int:
    """A size such as 16GiB, 64GB or 500kB, in bytes; units in any case."""
    units = {
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
    }
    written = text.lower()
    for unit, factor in units.items():
        if written.endswith(unit):
            try:
                value = float(written.removesuffix(unit))
            except ValueError:
                break
            if 0 < value < math.inf:
                return int(value * factor)
    raise QuantkitError(f"{text!r} is not a size", "write it as 16GiB or 64GB")


def parse_share(text: str) -> float:
    """A share between 0 and 1, written as 25% or 0.25. Raises QuantkitError for anything else."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise QuantkitError(
            f"{text!r} is not a share", "write it as 25%, more than 0% and less than 100%"
        )
    return value
