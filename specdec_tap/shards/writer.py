"""Append-only writing of one stream of shards, safe against kill, power cut and a full disk.

A frame is acknowledged when ``append_*`` returns: it is in the kernel then, so a killed process loses at most
the frame in flight. ``fsync`` runs every ``fsync_interval_s``, so a power cut loses at most about that
much. Sealing writes INDEX and header, then fsync, rename, fsync of the directory, in this order, so a name
that ends in ``.safetensors`` always means a whole file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ShardError, ShardWriteError, StreamBusyError
from .codec import read_block_head
from .frames import (
    BLOCK,
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    INDEX,
    META,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    Totals,
    pack_frame_head,
    pack_header_area,
)
from .layout import MAX_SHARD, BlockRef, RecordMeta, ShardHeader, check_stream_name, dump_json
from .records import MAX_FRAMES, Index, encode_index, encode_record

logger = logging.getLogger("specdec_tap.shards.writer")

LOCK_NAME = ".writer.lock"
SHARD_NAME = re.compile(r"([0-9]{6,9})(\.safetensors|\.open)")


def shard_name(number: int, suffix: str) -> str:
    """File name of a shard: at least six digits, then ``.safetensors`` or ``.open``."""
    return f"{number:06d}{suffix}"


class ShardWriter:
    """Writes blocks and records of one stream; rolls to a new shard by size and age.

    One writer per stream folder, enforced with ``flock``. Methods may be called from several threads, one
    at a time inside. Use as a context manager, or call ``close()``.
    """

    def __init__(
        self,
        root: Path | str,
        header: ShardHeader,
        *,
        max_shard_bytes: int = 1 << 30,
        max_shard_age_s: float = 600.0,
        min_free_bytes: int = 0,
        fsync_interval_s: float = 1.0,
    ) -> None:
        """Take the stream's folder and open a journal in it.

        Args:
            root: The shards folder; created with mode 0700 if missing.
            header: ``shard`` and ``created_unix_s`` are ignored, every file gets its own.
            max_shard_bytes: Roll before a file would grow past this. One frame may be larger.
            max_shard_age_s: Roll a file that has frames once it is this old; checked by ``append_*`` and
                ``flush``.
            min_free_bytes: Refuse to write when the file system would have less left.
            fsync_interval_s: At most this much time between two fsyncs while frames arrive; ``flush``
                always does one.

        Raises:
            StreamBusyError: Another writer is alive in this folder.
            ShardWriteError: The folder cannot be created or written.
        """
        self._header = header
        self._root = Path(root)
        self._dir = self._root / check_stream_name(header.stream)
        self._max_shard_bytes = max_shard_bytes
        self._max_shard_age_s = max_shard_age_s
        self._min_free_bytes = min_free_bytes
        self._fsync_interval_s = fsync_interval_s
        self._mutex = threading.RLock()
        self._closed = False
        self._fd = -1
        with self._disk("cannot use the stream folder"):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir.mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = os.open(
                self._dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        try:
            self._take_lock()
            with self._disk("cannot use the stream folder"):
                self._seal_abandoned()
                self._number = self._next_number()
                self._open_journal()
        except BaseException:  # nobody else can let go of the lock
            os.close(self._lock_fd)
            raise

    # ---- what callers use

    @property
    def path(self) -> Path:
        """The journal being written, or the one the next append will create."""
        return self._dir / shard_name(self._number, OPEN_SUFFIX)

    @property
    def shard(self) -> int:
        """Number of that journal inside the stream."""
        return self._number

    @property
    def header(self) -> ShardHeader:
        """As given, with the current shard number."""
        return self._header.replace(shard=self._number)

    def append_block(
        self, payload: bytes, *, position: int | None = None, num_rows: int | None = None
    ) -> BlockRef:
        """Append an encoded block.

        Args:
            payload: From ``encode_block`` with this writer's header.
            position: If given, must be the block's.
            num_rows: If given, must be the block's.

        Returns:
            The block's address, for the pieces of records in this stream.

        Raises:
            ShardWriteError: Disk full or failing. The journal is valid without this block.
            CorruptShardError: ``payload`` is not a block of this header.
        """
        head = read_block_head(self._header, payload)
        if position not in (None, head.position) or num_rows not in (None, head.num_rows):
            raise ConfigError(
                f"block starts at position {head.position:,} with {head.num_rows} rows; "
                f"the caller says position {position}, {num_rows} rows"
            )
        with self._mutex:
            offset = self._append(BLOCK, payload)
            self._index.blocks.append((offset, len(payload), *head))
            self._totals = self._totals.plus(
                num_blocks=1,
                num_rows=head.num_rows,
                final_rows=head.final_rows,
                raw_bytes=self._header.raw_bytes(head.num_rows, head.final_rows),
                stored_bytes=len(payload),
            )
            return BlockRef(self._number, len(self._index.blocks) - 1)

    def append_record(self, meta: RecordMeta) -> int:
        """Append a record; its blocks must have been appended to this stream before.

        Returns:
            The record's ordinal inside the current shard (``self.shard``).

        Raises:
            ShardWriteError: Disk full or failing. The journal is valid without this record.
        """
        payload = encode_record(meta)
        with self._mutex:
            offset = self._append(RECORD, payload)
            self._index.records.append((offset, len(payload), meta.num_tokens, meta.covered_rows))
            self._totals = self._totals.plus(
                num_records=1,
                num_tokens=meta.num_tokens,
                response_tokens=meta.response_tokens,
                record_rows=meta.covered_rows,
            )
            return len(self._index.records) - 1

    def flush(self) -> None:
        """Make everything appended so far survive a power cut; roll if the journal is old enough."""
        with self._mutex:
            if self._fd < 0:
                return
            with self._disk("cannot fsync"):
                os.fdatasync(self._fd)
                self._synced_s = time.monotonic()
            if self._is_old():
                self._seal()

    def rotate(self) -> None:
        """Seal the current shard, if it holds anything; the next append opens a new one."""
        with self._mutex:
            if self._fd >= 0 and self._has_frames():
                self._seal()

    def close(self) -> None:
        """Seal and let go of the folder. Safe to call twice.

        Raises:
            ShardWriteError: Sealing failed; the journal stays and ``specdec-tap shards repair`` can seal it.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                if self._fd >= 0:
                    if self._has_frames():
                        self._seal()
                    else:
                        # Only our own META frame is in it: nothing that anybody was promised.
                        with contextlib.suppress(OSError):
                            self.path.unlink()
            finally:
                if self._fd >= 0:
                    os.close(self._fd)
                    self._fd = -1
                os.close(self._lock_fd)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside

    @contextlib.contextmanager
    def _disk(self, what: str) -> Iterator[None]:
        try:
            yield
        except ShardError:
            raise
        except OSError as err:
            full = err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            hint = (
                "free some space or lower the capture's max_bytes"
                if full
                else "check the folder and its permissions"
            )
            raise ShardWriteError(
                f"{what} {str(self._dir)!r}: {err.strerror or err}; {hint}", path=self._dir, errno=err.errno
            ) from err

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise StreamBusyError(
                f"another writer is alive in {str(self._dir)!r}; give each writer its own stream",
                path=self._dir,
            ) from err
        except OSError as err:
            raise ShardWriteError(
                f"file locks do not work in {str(self._dir)!r} ({err.strerror}); use a local folder "
                "or mount it "
                "with locks",
                path=self._dir,
                errno=err.errno,
            ) from err

    def _next_number(self) -> int:
        """One more than any number ever used here, so that no BlockRef can come to mean another block."""
        text = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
        used = int(text) if text.isdigit() else 0
        for entry in os.scandir(self._dir):
            match = SHARD_NAME.fullmatch(entry.name)
            if match:
                used = max(used, int(match[1]))
        if used >= MAX_SHARD:
            raise ShardError(f"stream {str(self._dir)!r} has used all {MAX_SHARD:,} numbers", path=self._dir)
        return used + 1

    def _seal_abandoned(self) -> None:
        """Seal journals whose writer died; ours is the only lock now, so they have no writer."""
        from .repair import seal_journal

        for entry in sorted(os.scandir(self._dir), key=lambda e: e.name):
            if entry.name.startswith(".") and entry.name.endswith(".creating"):
                Path(entry.path).unlink()
            elif SHARD_NAME.fullmatch(entry.name) and entry.name.endswith(OPEN_SUFFIX):
                try:
                    report = seal_journal(Path(entry.path))
                    logger.warning("sealed the journal of a writer that died: %s", report)
                except (ShardError, OSError) as err:
                    # Capture must start even so; the file stays as it is for `specdec-tap shards repair`.
                    logger.warning("left an abandoned journal as it is: %s", err)

    def _open_journal(self) -> None:
        self._journal_header = self._header.replace(shard=self._number, created_unix_s=time.time())
        meta = dump_json(self._journal_header.to_json())
        temporary = self._dir / f".{self._number:06d}.creating"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = bytes(HEADER_AREA_BYTES) + pack_frame_head(META, 0, meta) + meta
            _write_all(fd, [start], 0)
            os.fsync(fd)
            # The name appears only with a whole META frame behind it.
            temporary.rename(self.path)
            _fsync_dir(self._dir)
            os.pwrite(self._lock_fd, b"%09d\n" % self._number, 0)
        except BaseException:  # nobody else can close the new journal
            os.close(fd)
            raise
        self._fd = fd
        self._end = len(start)
        self._torn = False
        self._sequence = 1
        self._index = Index()
        self._totals = Totals()
        self._opened_s = self._synced_s = time.monotonic()

    def _has_frames(self) -> bool:
        return self._sequence > 1

    def _is_old(self) -> bool:
        return self._has_frames() and time.monotonic() - self._opened_s >= self._max_shard_age_s

    def _append(self, kind: int, payload: bytes) -> int:
        """Write one frame; returns its offset."""
        if self._closed:
            raise ShardError("the writer is closed", path=self._dir)
        frame_bytes = FRAME_HEAD_BYTES + len(payload)
        if self._fd >= 0 and (
            self._is_old()
            or self._sequence > MAX_FRAMES
            or (self._has_frames() and self._end + frame_bytes > self._max_shard_bytes)
        ):
            self._seal()
        if self._fd < 0:
            with self._disk("cannot open a new shard in"):
                self._open_journal()
        with self._disk("cannot write to the shard in"):
            self._untear()
            if self._min_free_bytes:
                stat = os.fstatvfs(self._fd)
                free = stat.f_bavail * stat.f_frsize
                if free - frame_bytes < self._min_free_bytes:
                    raise ShardWriteError(
                        f"{free:,} bytes are free under {str(self._dir)!r}; min_free_bytes asks to leave "
                        f"{self._min_free_bytes:,}. Free some space or lower it",
                        path=self._dir,
                        errno=errno.ENOSPC,
                    )
            head = pack_frame_head(kind, self._sequence, payload)
            self._write_frame([head, payload])
            offset = self._end
            self._end += frame_bytes
            self._sequence += 1
        if time.monotonic() - self._synced_s >= self._fsync_interval_s:
            with self._disk("cannot fsync"):
                os.fdatasync(self._fd)
                self._synced_s = time.monotonic()
        return offset

    def _write_frame(self, parts: list[bytes]) -> None:
        try:
            _write_all(self._fd, parts, self._end)
        except BaseException:  # also Ctrl-C leaves half a frame
            self._torn = True
            with contextlib.suppress(OSError):
                self._untear()
            raise

    def _untear(self) -> None:
        """Cut off what a failed write or seal left behind the last whole frame."""
        if self._torn:
            os.ftruncate(self._fd, self._end)
            os.pwrite(self._fd, bytes(8), 0)
            self._torn = False

    def _seal(self) -> None:
        with self._disk("cannot seal the shard in"):
            self._untear()
            path = self.path
            sealed = self._dir / shard_name(self._number, SEALED_SUFFIX)
            try:
                write_seal(
                    self._fd, self._journal_header, self._totals, self._index, self._end, self._sequence
                )
                publish(path, sealed)
            except BaseException:  # Ctrl-C, too, must leave a journal that can be written on
                self._torn = True
                with contextlib.suppress(OSError):
                    self._untear()
                raise
            os.close(self._fd)
            self._fd = -1
            self._number += 1


def _write_all(fd: int, parts: list[bytes], offset: int) -> None:
    """Write all parts at ``offset``, however few bytes the kernel takes at a time."""
    views = [memoryview(p) for p in parts if len(p)]
    while views:
        done = os.pwritev(fd, views[:512], offset)
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views and done:
            views[0] = views[0][done:]


def write_seal(fd: int, header: ShardHeader, totals: Totals, index: Index, end: int, sequence: int) -> int:
    """Write INDEX behind the last frame and the header in front of the first; fsync. Returns the file's
    size.
    """
    payload = encode_index(index)
    head = pack_frame_head(INDEX, sequence, payload)
    _write_all(fd, [head, payload], end)
    index_bytes = len(head) + len(payload)
    os.ftruncate(fd, end + index_bytes)
    _write_all(fd, [pack_header_area(header, totals, end - HEADER_AREA_BYTES, index_bytes)], 0)
    os.fsync(fd)
    return end + index_bytes


def publish(journal: Path, sealed: Path) -> None:
    """Give a sealed file its final name, durably. Never overwrites."""
    if os.path.lexists(sealed):
        raise ShardError(
            f"{str(sealed)!r} exists already; move it away, then run 'specdec-tap shards repair'", path=sealed
        )
    journal.rename(sealed)
    _fsync_dir(sealed.parent)


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
