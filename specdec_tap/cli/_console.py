"""What the subcommands print with: progress bars, tables and numbers, on a terminal or in a log file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError

PLAIN_INTERVAL_S = 15.0


class Bar:
    """Handle of one progress bar. ``update`` is cheap enough to be called for every request."""

    def __init__(self, show: Callable[[float, float | None, str], None]) -> None:
        self._show = show

    def update(self, done: float, note: str = "", total: float | None = None) -> None:
        """Show that ``done`` of the total is done, with a short note beside it."""
        self._show(done, total, note)


@contextlib.contextmanager
def progress_bar(title: str, total: float | None, *, unit: str = "") -> Iterator[Bar]:
    """Show progress on standard error: a rich bar on a terminal, a line every 15 seconds in a log.

    Args:
        title: What is being done.
        total: Number of steps; None shows elapsed time only.
        unit: Word after the numbers, for example ``requests``.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        count = [MofNCompleteColumn(), TextColumn(unit)] if total is not None else []
        remaining = [TextColumn("left"), TimeRemainingColumn()] if total is not None else []
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            *count,
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            *remaining,
            console=Console(stderr=True),
        ) as progress:
            task = progress.add_task(title, total=total, note="")

            def show(done: float, new_total: float | None, note: str) -> None:
                changes: dict[str, Any] = {} if new_total is None else {"total": new_total}
                progress.update(task, completed=done, note=note, **changes)

            yield Bar(show)
        return

    begun = time.monotonic()
    shown = begun

    def show_plain(done: float, new_total: float | None, note: str) -> None:
        nonlocal shown, total
        total = new_total if new_total is not None else total
        now = time.monotonic()
        if now - shown >= PLAIN_INTERVAL_S:
            shown = now
            count = f"{done:,.0f} of {total:,.0f} {unit}, " if total is not None else ""
            print(
                f"{title}: {count}{note + ', ' if note else ''}{now - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    yield Bar(show_plain)


def print_table(
    title: str, rows: Sequence[tuple[str, ...]], *, headers: Sequence[str] = (), to: TextIO | None = None
) -> None:
    """Print rows as a rich table on ``to`` (standard output), wide enough for its content also in a log."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=bool(headers))
    columns = max((len(row) for row in rows), default=len(headers))
    for index in range(columns):
        table.add_column(headers[index] if headers else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    to = sys.stdout if to is None else to
    Console(file=to, width=None if to.isatty() else 120).print(table)


def write_json(path: Path | None, value: Any) -> None:
    """Write ``value`` to ``path`` atomically (``-`` is standard output); do nothing for None.

    Raises:
        InputError: The file cannot be written.
    """
    if path is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise InputError(f"{str(path)!r} cannot be written ({err.strerror or err})") from err


def check_writable_file(path: Path | None, flag: str) -> None:
    """Raise InputError if an output file cannot be made: found out before an hour's work, not after."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise InputError(f"{flag} {str(path)!r} is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"{flag} {str(path)!r} is in a folder that does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{flag} {str(path)!r} is in a folder that cannot be written")


def human_bytes(count: float) -> str:
    """Return a size in decimal units.

    Example:
        >>> human_bytes(1_500_000)
        '1.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def positive_int(text: str) -> int:
    """Argparse type: a whole number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def positive_float(text: str) -> float:
    """Argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value
