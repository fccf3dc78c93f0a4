"""Turn the journal of a dead writer, or a shard with a broken index, into a sealed shard."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import IncompleteShardError, ShardError, StreamBusyError
from .frames import OPEN_SUFFIX, SEALED_SUFFIX
from .scan import scan_frames
from .writer import publish, write_seal


@dataclass(frozen=True, slots=True)
class SealReport:
    """What ``seal_journal`` kept and what it cut off."""

    path: Path
    num_records: int
    num_blocks: int
    lost_bytes: int

    def __str__(self) -> str:
        lost = f", cut off {self.lost_bytes:,} bytes of a torn frame" if self.lost_bytes else ""
        return f"{self.path}: kept {self.num_records:,} records and {self.num_blocks:,} blocks{lost}"


def seal_journal(path: Path) -> SealReport:
    """Seal one ``.open`` file whose writer is gone, keeping every whole frame.

    Every payload's checksum is read. The first frame that is torn or damaged ends the journal, as frames
    behind it could be addressed wrongly.

    Raises:
        StreamBusyError: Its writer is alive.
        IncompleteShardError: Not even the META frame is whole, so there is nothing to keep.
        ShardError: Anything else; the file is left as it was.
    """
    if path.suffix != OPEN_SUFFIX:
        raise ShardError(
            f"{str(path)!r} is not a journal; expected a name that ends in {OPEN_SUFFIX!r}", path=path
        )
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise StreamBusyError(f"the writer of {str(path)!r} is alive; stop it first", path=path) from err
        scanned = scan_frames(fd, check_payloads=True)
        if scanned.header is None:
            raise IncompleteShardError(
                f"{str(path)!r} holds no whole frame, so there is nothing to recover; delete it by hand",
                path=path,
            )
        size = os.fstat(fd).st_size
        os.ftruncate(fd, scanned.end)
        write_seal(fd, scanned.header, scanned.totals, scanned.index, scanned.end, scanned.sequence)
        sealed = path.with_suffix(SEALED_SUFFIX)
        publish(path, sealed)
    finally:
        os.close(fd)
    totals = scanned.totals
    lost = 0 if scanned.was_sealed else size - scanned.end
    return SealReport(sealed, totals.num_records, totals.num_blocks, lost)
