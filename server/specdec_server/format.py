"""Numbers, sizes and times as people read them; ``static/app.js`` has the same functions for live values."""

from __future__ import annotations

import datetime
from typing import Any

MISSING = "\u2013"
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def count(value: float | None) -> str:
    """Return a whole number with separators.

    Example:
        >>> count(1234567)
        '1,234,567'
    """
    return MISSING if value is None else f"{round(value):,}"


def plural(value: int, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> plural(1, "shard"), plural(1200, "shard")
        ('1 shard', '1,200 shards')
    """
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def size(value: float | None) -> str:
    """Return bytes in decimal units, three digits.

    Example:
        >>> [size(v) for v in (999, 1234, 549821970, 0)]
        ['999 B', '1.23 kB', '550 MB', '0 B']
    """
    if value is None:
        return MISSING
    number, unit = float(value), 0
    while number >= 999.5 and unit < len(_SIZES) - 1:
        number, unit = number / 1000, unit + 1
    return f"{_three(number) if unit else round(number)} {_SIZES[unit]}"


def number(value: float | None) -> str:
    """Return a number with three digits, or whole above 100.

    Example:
        >>> [number(v) for v in (0, 0.0123, 3.14159, 41.5, 1234.5)]
        ['0', '0.0123', '3.14', '41.5', '1,234']
    """
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 99.95 else _three(value)


def fraction(value: float | None) -> str:
    """Return a share of one in percent.

    Example:
        >>> [fraction(v) for v in (0, 0.0004, 0.123, 0.9996, 1)]
        ['0%', '0.04%', '12.3%', '99.96%', '100%']
    """
    if value is None:
        return MISSING
    percent = value * 100
    if percent in (0, 100):
        return f"{percent:.0f}%"
    return f"{percent:.2f}%" if percent < 0.1 or 99.9 <= percent < 100 else f"{percent:.1f}%"


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units.

    Example:
        >>> [duration(v) for v in (0.42, 12.3, 75, 12000, 200000)]
        ['0.42 s', '12 s', '1 min 15 s', '3 h 20 min', '2 d 7 h']
    """
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{_three(seconds)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for big, small, big_name, small_name in (
        (60, 1, "min", "s"),
        (3600, 60, "h", "min"),
        (86400, 3600, "d", "h"),
    ):
        if whole < big * (60 if big < 3600 else 24) or big == 86400:
            rest = whole % big // small
            return f"{whole // big:,} {big_name}" + (f" {rest} {small_name}" if rest else "")
    raise AssertionError("unreachable")


def time_iso(unix_s: float | None) -> str:
    """Return a moment in UTC, for ``<time datetime>``; empty when unknown or no date."""
    try:
        return (
            ""
            if not unix_s
            else datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")
        )
    except (ValueError, OverflowError, OSError):
        return ""


def time_text(unix_s: float | None) -> str:
    """Return a moment for reading, in UTC; the page's script turns it into local time."""
    iso = time_iso(unix_s)
    return f"{iso[:10]} {iso[11:19]} UTC" if iso else MISSING


def _three(value: float) -> str:
    """Three significant digits, without an exponent or trailing zeros after a whole number."""
    if value == 0:
        return "0"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    while digits < 6 and abs(value) * 10**digits < 99.5 and abs(value) < 1:
        digits += 1
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if abs(value) < 1 else text


FILTERS: dict[str, Any] = {
    "count": count,
    "plural": plural,
    "size": size,
    "number": number,
    "fraction": fraction,
    "duration": duration,
    "time_iso": time_iso,
    "time_text": time_text,
}
