"""Where a shard's bytes are read from: positioned reads of one file, local or remote."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import ShardError

MAX_OPEN_FILES = 64
"""A folder of thousands of shards must not need thousands of descriptors."""


class Source(Protocol):
    """Positioned reads of one file; safe to call from several threads."""

    def size(self) -> int:
        """Bytes in the file now; grows while a journal is written."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``; fewer only where the file ends."""
        ...

    def identity(self) -> tuple[int, int]:
        """Device and inode, to know a file again after it was renamed."""
        ...

    def mode(self) -> int:
        """Permission bits."""
        ...

    def close(self) -> None:
        """Let go of what is open; a later read opens it again."""
        ...


class ByteReader(Protocol):
    """The part of a source that walking frames needs."""

    def size(self) -> int:
        """Bytes in the file now."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``."""
        ...


class FdSource:
    """A source over an open descriptor that somebody else owns."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``."""
        return read_exactly(self._fd, offset, length)


class LocalSource:
    """A source over a local file that is opened when needed and may be closed in between."""

    def __init__(self, path: Path, pool: DescriptorPool) -> None:
        self.path = path
        self._pool = pool

    def size(self) -> int:
        """Bytes in the file now."""
        with self._pool.open(self) as fd:
            return os.fstat(fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``."""
        with self._pool.open(self) as fd:
            return read_exactly(fd, offset, length)

    def identity(self) -> tuple[int, int]:
        """Device and inode of the file that is read."""
        with self._pool.open(self) as fd:
            info = os.fstat(fd)
            return info.st_dev, info.st_ino

    def mode(self) -> int:
        """Permission bits."""
        with self._pool.open(self) as fd:
            return stat.S_IMODE(os.fstat(fd).st_mode)

    def close(self) -> None:
        """Let go of the descriptor, if there is one."""
        self._pool.forget(self)


class DescriptorPool:
    """Keeps the most recently used files open."""

    def __init__(self, max_open: int = MAX_OPEN_FILES) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[LocalSource, list[int]] = OrderedDict()
        """source -> [descriptor, readers inside]."""

    @contextlib.contextmanager
    def open(self, source: LocalSource) -> Iterator[int]:
        """The source's descriptor, which stays open while the caller is inside."""
        with self._lock:
            entry = self._open.get(source)
            if entry is None:
                entry = self._open[source] = [open_regular(source.path), 0]
            self._open.move_to_end(source)
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                if self._open.get(source) is not entry and entry[1] == 0:
                    os.close(entry[0])  # forgotten while in use
                elif len(self._open) > self._max_open:
                    idle = next((s for s, e in self._open.items() if e[1] == 0), None)
                    if idle is not None:
                        os.close(self._open.pop(idle)[0])

    def forget(self, source: LocalSource) -> None:
        """Close the source's descriptor now, or when its last reader leaves."""
        with self._lock:
            entry = self._open.pop(source, None)
            if entry is not None and entry[1] == 0:
                os.close(entry[0])


def read_exactly(fd: int, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes at ``offset``; fewer only where the file ends."""
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def open_regular(path: Path) -> int:
    """Open a regular file for reading; refuse symlinks, FIFOs and devices, which could lead anywhere.

    Raises:
        ShardError: Naming the file.
    """
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise ShardError(f"{path}: is {kind}; shards are read from regular files only", path=path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as err:
        raise ShardError(f"{path}: {err.strerror or err}", path=path) from err
