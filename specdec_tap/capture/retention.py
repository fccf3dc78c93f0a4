"""Keeps a shards folder inside its bounds of size and age, and ends what dead writers left behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import ShardError
from ..shards.repair import abandoned_journals, is_locked, seal_journal
from ..shards.writer import LOCK_NAME, SHARD_NAME
from .status import STATUS_NAME

logger = logging.getLogger("specdec_tap.capture")

MIN_JUMP_S = 5.0
"""Less is drift, or a pause between two readings."""


class Removed(NamedTuple):
    """A shard that was removed."""

    stream: str
    shard: int
    num_bytes: int


class Ages:
    """Ages of files by a clock that may be set while this process runs.

    Time by which the clock was set forward is no age: a shard of this morning is not a year old because the
    machine's clock has moved by a year. What the clock did before this process began is not known here.

    Args:
        wall: Seconds since 1970, as files are stamped.
        steady: Seconds that are never set and go on while the machine sleeps.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._wall, self._steady = wall, steady
        self._last = (wall(), steady())
        self._jumps: list[tuple[float, float]] = []  # clock before it was set, by how much it was

    def look(self) -> None:
        """Notice how the clock was set since the last look."""
        wall, steady = self._wall(), self._steady()
        before = self._last[0] + steady - self._last[1]
        self._last = (wall, steady)
        jump = wall - before
        if jump >= MIN_JUMP_S:
            logger.warning("the clock was set forward by %.0f s; shards are not taken for older by it", jump)
            self._jumps.append((before, jump))
        while jump <= -MIN_JUMP_S and self._jumps:  # set back: what came before may have been wrong
            at, by = self._jumps.pop()
            if by + jump >= MIN_JUMP_S:
                self._jumps.append((at, by + jump))
            jump = min(by + jump, 0.0)

    def of(self, modified_s: float) -> float:
        """Return how old a file with this time of modification is, in seconds, as of the last look."""
        return self._last[0] - modified_s - sum(by for at, by in self._jumps if modified_s <= at)


class _File(NamedTuple):
    modified_s: float
    path: Path
    num_bytes: int
    sealed: bool


def enforce(
    root: Path,
    own_stream: str,
    *,
    max_bytes: int | None,
    max_age_s: float | None,
    ages: Ages | None = None,
    may_go: Callable[[Path], bool] | None = None,
) -> list[Removed]:
    """Remove the oldest sealed shards until the folder is inside its bounds.

    Only sealed shards of this writer's stream and of streams without a living writer are removed: another
    living writer has records in the making that point at its own.

    Args:
        root: The shards folder.
        own_stream: Name of the caller's stream.
        max_bytes: Most bytes of all shards together, journals included; None: no limit.
        max_age_s: Oldest a sealed shard may get, by its modification time, in seconds; None: no limit.
        ages: Kept by a caller that comes again, so that a clock that is set meanwhile ages nothing.
        may_go: Asked before a shard is removed; where it says no (a store does not have it yet) the shard
            and later ones of its stream stay, and the folder may be larger than its bounds until then.

    Returns:
        What was removed, oldest first.
    """
    files = sorted(_shards(root))
    total = sum(file.num_bytes for file in files)
    living: dict[Path, bool] = {}
    waiting = set()
    removed = []
    ages = ages or Ages()
    ages.look()
    for file in files:
        too_old = max_age_s is not None and ages.of(file.modified_s) > max_age_s
        if not file.sealed or not (too_old or (max_bytes is not None and total > max_bytes)):
            continue
        folder = file.path.parent
        if folder.name != own_stream:
            if folder not in living:
                living[folder] = is_locked(folder / LOCK_NAME)
            if living[folder]:
                continue
        # Readers take what is missing at the front for removed, and in the middle for damage.
        if folder in waiting or (may_go is not None and not may_go(file.path)):
            waiting.add(folder)
            continue
        try:
            file.path.unlink()
        except FileNotFoundError:  # another writer was first
            pass
        except OSError as err:
            logger.warning("cannot remove %s (%s)", file.path, err)
            continue
        total -= file.num_bytes
        removed.append(Removed(folder.name, int(file.path.stem), file.num_bytes))
    return removed


def end_dead_streams(root: Path) -> int:
    """Seal the journals of writers that died and mark their streams closed; returns how many were sealed."""
    sealed = 0
    for path in list(abandoned_journals(root)):
        try:
            report = seal_journal(path)
        except (ShardError, OSError) as err:
            logger.warning("left an abandoned journal as it is: %s", err)
            continue
        logger.info("sealed the journal of a writer that died: %s", report)
        sealed += 1
        with contextlib.suppress(OSError, ValueError):
            _mark_closed(path.parent / STATUS_NAME)
    return sealed


def write_status(path: Path, status: dict[str, object]) -> None:
    """Replace the status file in one step, mode 0600."""
    temp = path.with_suffix(".tmp")
    fd = os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:  # writes all or raises, where os.write may stop half way
        file.write(json.dumps(status).encode())
    temp.replace(path)


def _mark_closed(path: Path) -> None:
    status = json.loads(path.read_text())
    write_status(path, {**status, "closed": True, "live_requests": 0})


def _shards(root: Path) -> Iterator[_File]:
    """Every shard and journal below a folder; what is no regular file or has another name is left alone."""
    for folder in os.scandir(root):
        if not folder.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # another writer removed it meanwhile
            for entry in os.scandir(folder.path):
                if SHARD_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    sealed = entry.name.endswith(".safetensors")
                    yield _File(info.st_mtime, Path(entry.path), info.st_size, sealed)
