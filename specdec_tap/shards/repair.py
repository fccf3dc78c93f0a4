"""Turn the journal of a dead writer, or a shard whose header or index is damaged, into a sealed shard.

Nothing that could be wanted is deleted. Bytes behind the last usable frame are dropped only when they are
one torn frame (nobody was promised it); if a valid frame stands behind them they are copied to a ``.tail``
file first.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import IncompleteShardError, ShardError, StreamBusyError
from .frames import FRAME_HEAD_BYTES, OPEN_SUFFIX, SEALED_SUFFIX, check_payload, unpack_frame_head
from .scan import Scan, find_frame, scan_frames
from .source import FdSource, read_exactly
from .writer import SHARD_NAME, publish, write_seal


@dataclass(frozen=True, slots=True)
class SealReport:
    """What ``seal_journal`` or ``rebuild_sealed`` kept, and what it could not."""

    path: Path
    num_records: int
    num_blocks: int
    damaged_frames: int
    cut_bytes: int
    """Bytes behind the last whole frame that are no longer in the shard."""
    tail_path: Path | None
    """Where those bytes were kept, when they hold more than one torn frame."""

    def __str__(self) -> str:
        text = f"{self.path}: kept {self.num_records:,} records and {self.num_blocks:,} blocks"
        if self.damaged_frames:
            text += f"; {self.damaged_frames:,} damaged frames stay unreadable"
        if self.tail_path is not None:
            text += f"; {self.cut_bytes:,} bytes behind a damaged frame were saved as {self.tail_path.name}"
        elif self.cut_bytes:
            text += f"; {self.cut_bytes:,} bytes of a torn frame were cut off"
        return text


def seal_journal(path: Path) -> SealReport:
    """Seal one ``.open`` file whose writer is gone, keeping every whole frame.

    Every payload's checksum is read. The first frame whose head is damaged ends the journal, since the blocks
    behind it could not be numbered.

    Raises:
        StreamBusyError: Its writer is alive.
        IncompleteShardError: Not even the META frame is whole, so there is nothing to keep.
        ShardError: Anything else; the file is left as it was.
    """
    if path.suffix != OPEN_SUFFIX:
        raise ShardError(f"{path}: is not a journal; expected a name that ends in {OPEN_SUFFIX!r}", path=path)
    fd = _open_for_repair(path)
    try:
        report = _reseal(fd, path)
        sealed = path.with_suffix(SEALED_SUFFIX)
        publish(path, sealed)
    finally:
        os.close(fd)
    return SealReport(sealed, *report)


def rebuild_sealed(path: Path) -> SealReport:
    """Write header and index of a sealed shard anew, from its frames. For a damaged header or index, or a
    cut end.

    Raises:
        IncompleteShardError: Not even the META frame is whole.
        ShardError: Anything else; the file is left as it was.
    """
    if path.suffix != SEALED_SUFFIX:
        raise ShardError(
            f"{path}: is not a sealed shard; expected a name that ends in {SEALED_SUFFIX!r}", path=path
        )
    fd = _open_for_repair(path)
    try:
        return SealReport(path, *_reseal(fd, path))
    finally:
        os.close(fd)


def abandoned_journals(root: Path) -> Iterator[Path]:
    """Journals below a shards folder (or in one stream's folder) that no living writer holds."""
    for folder in (root, *sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink())):
        for path in sorted(folder.iterdir()):
            if SHARD_NAME.fullmatch(path.name) and path.suffix == OPEN_SUFFIX and not is_locked(path):
                yield path


def is_locked(path: Path) -> bool:
    """Whether a living writer holds this journal. False also for what is not a regular file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _open_for_repair(path: Path) -> int:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ShardError(f"{path}: is not a regular file", path=path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as err:
        raise ShardError(f"{path}: {err.strerror}", path=path) from err
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(fd)
        raise StreamBusyError(f"{path}: its writer is alive; stop it first", path=path) from err
    return fd


def _reseal(fd: int, path: Path) -> tuple[int, int, int, int, Path | None]:
    scan = scan_frames(FdSource(fd), check_payloads=True)
    if scan.header is None:
        raise IncompleteShardError(
            f"{path}: holds no whole META frame, so there is nothing to recover; delete it by hand", path=path
        )
    cut, tail = _save_tail(fd, path, scan)
    try:
        os.ftruncate(fd, scan.end)
        write_seal(fd, scan.header, scan.totals, scan.index, scan.end, scan.sequence)
    except OSError as err:
        raise ShardError(
            f"{path}: cannot write its index ({err.strerror}); free some space", path=path
        ) from err
    return scan.totals.num_records, scan.totals.num_blocks, len(scan.damaged), cut, tail


def _is_whole(source: FdSource, at: int, size: int) -> bool:
    """Whether a frame with the right checksum stands at ``at``, whatever it holds."""
    if at + FRAME_HEAD_BYTES > size:
        return False
    try:
        head = unpack_frame_head(source.read(at, FRAME_HEAD_BYTES), at)
        check_payload(head, source.read(at + FRAME_HEAD_BYTES, head.payload_bytes), at)
    except ShardError:
        return False
    return True


def _save_tail(fd: int, path: Path, scan: Scan) -> tuple[int, Path | None]:
    """Copy what stands behind the last usable frame if it is more than one torn frame."""
    size = os.fstat(fd).st_size
    ended = scan.was_sealed or scan.problem is not None
    behind = scan.end if not scan.was_sealed and _is_whole(FdSource(fd), scan.end, size) else scan.end + 1
    if not ended or find_frame(FdSource(fd), behind, size) is None:
        return (0 if scan.was_sealed else size - scan.end), None
    tail = path.with_name(f"{path.stem}.{scan.end}.tail")
    try:
        out = os.open(tail, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for at in range(scan.end, size, 1 << 20):
                os.write(out, read_exactly(fd, at, min(1 << 20, size - at)))
            os.fsync(out)
        finally:
            os.close(out)
    except OSError as err:
        raise ShardError(
            f"{path}: cannot save the {size - scan.end:,} bytes behind its damaged frame as {tail.name} "
            f"({err.strerror}); nothing was changed",
            path=path,
        ) from err
    return size - scan.end, tail
