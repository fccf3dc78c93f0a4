"""A stream that is whole or not there: written beside the others under a hidden name, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError

PREFIX = ".import-"
"""Readers pass over names with a dot."""
_LOCK_NAME = ".lock"


class Staging:
    """Where one stream is written until it is complete."""

    def __init__(self, root: Path, stream: str, folder: Path) -> None:
        self._root = root
        self.stream = stream
        """Its name: the wanted one, or that with a number where it is taken."""
        self.folder = folder
        """A shards folder of its own."""

    def publish(self) -> None:
        """Make the stream one of the root's, in one step.

        Raises:
            InputError: Something of that name appeared meanwhile, or the disk refuses.
        """
        there = self._root / self.stream
        try:
            (self.folder / self.stream).rename(there)
            _sync(self._root)
        except OSError as err:
            raise InputError(f"cannot make {str(there)!r}: {err.strerror}") from err


@contextlib.contextmanager
def staged(root: Path, stream: str) -> Iterator[Staging]:
    """Give a place for a new stream of ``root``; what was not published is removed at the end.

    What a killed import left is removed first.

    Raises:
        InputError: The folder cannot be used.
    """
    new = not root.exists()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(root)
        folder = root / f"{PREFIX}{uuid.uuid4().hex}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise InputError(f"cannot import into {str(root)!r}: {err.strerror}") from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Staging(root, _free_name(root, stream), folder)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # it is in use now
                root.rmdir()


def _free_name(root: Path, stream: str) -> str:
    name, number = stream, 1
    while (root / name).exists():
        number += 1
        name = f"{stream}-{number}"
    return name


def _remove_abandoned(root: Path) -> None:
    """Remove what imports left whose process is gone: it no longer holds the lock."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # just being made, or nothing of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _sync(folder: Path) -> None:
    """Make a rename last through a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
