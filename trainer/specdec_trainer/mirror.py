"""A run folder in an object store: written locally, copied behind training's back.

Training writes to a local folder (below ``~/.cache/specdec-tap``), and a thread copies what changed. A copy
that fails is tried again with the next one; only the last, when the run ends, must succeed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path

from specdec_tap.errors import InputError
from specdec_tap.shards.remote import open_filesystem

logger = logging.getLogger("specdec_trainer.mirror")

_TRIES = 3
_COPIED = ".copied"
"""In the local folder: the URL holds all of it."""
_CHECKPOINT = "checkpoints/step-"


class Mirror:
    """Keeps a URL equal to a local run folder."""

    def __init__(self, url: str, cache: Path | None = None) -> None:
        """Name both sides; nothing is read or written.

        Args:
            url: Anything that fsspec can open, such as ``s3://bucket/runs/first``.
            cache: Folder of local copies; below ``~/.cache`` by default.
        """
        self.url = url.rstrip("/")
        self._fs, self._root = open_filesystem(self.url)
        self._root = self._root.rstrip("/")
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base = cache or home / "specdec-tap" / "runs"
        self.folder = base / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._copied: dict[str, tuple[int, int]] = {}
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def fetch(self, *, resume: bool) -> None:
        """Make the local folder what the URL holds (resuming), or empty.

        A local folder that could not be copied to its end is never thrown away: a resumed run goes on with it
        when it is further than the URL.

        Raises:
            InputError: The URL cannot be read or holds a run that is not resumed, or the local folder does.
        """
        try:
            there = self._there()
        except Exception as err:  # drivers raise their libraries' own types
            raise InputError(f"cannot read {self.url!r}: {err}") from err
        if there and not resume:
            raise InputError(f"{self.url!r} is not empty; choose another --out, or go on with --resume")
        here = [p.relative_to(self.folder).as_posix() for p in self.folder.rglob("step-*.safetensors")]
        if here and not (self.folder / _COPIED).is_file():
            if not resume:
                raise InputError(
                    f"{str(self.folder)!r} holds an earlier run for {self.url!r} that was not copied to its "
                    "end; go on with --resume, or delete that folder"
                )
            if max(here) >= max((n for n in there if _CHECKPOINT in n), default=""):
                return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)
        for name in there:
            path = self.folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._fs.get_file(f"{self._root}/{name}", str(path))
            except Exception as err:  # as above
                raise InputError(f"cannot read {self.url!r}: {err}") from err
            path.chmod(0o600)
            self._copied[name] = _stamp(path)

    def start(self) -> None:
        """Begin to copy in the background."""
        (self.folder / _COPIED).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._work, name="specdec-trainer-mirror", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Copy soon."""
        self._wanted.set()

    def close(self) -> None:
        """Copy the rest.

        Raises:
            InputError: It could not be copied; the local folder is named and stays.
        """
        self._ended.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        for left in reversed(range(_TRIES)):
            try:
                self.sync()
                (self.folder / _COPIED).touch(mode=0o600)
                return
            except Exception as err:  # drivers raise their libraries' own types for a store that is away
                if not left:
                    raise InputError(
                        f"cannot write to {self.url!r}: {err}; the run is whole in {str(self.folder)!r}"
                    ) from err

    def sync(self) -> int:
        """Copy what changed and delete what is gone; returns how many files were copied."""
        count = 0
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if any(part.startswith(".") for part in name.split("/")) or not path.is_file():
                continue
            try:
                stamp = _stamp(path)
                if self._copied.get(name) == stamp:
                    continue
                remote = f"{self._root}/{name}"
                self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(path), remote)
            except FileNotFoundError:
                continue  # pruned meanwhile
            self._copied[name] = stamp
            count += 1
        # Checkpoints go one by one, newer ones first written: never leave the URL without one.
        for name in [n for n in self._copied if not (self.folder / n).exists()]:
            self._fs.rm_file(f"{self._root}/{name}")
            del self._copied[name]
        return count

    def _there(self) -> list[str]:
        prefix = self._root + "/"
        if not self._fs.exists(self._root):
            return []
        return [n.removeprefix(prefix) for n in self._fs.find(self._root)]

    def _work(self) -> None:
        while not self._ended.is_set():
            self._wanted.wait()
            self._wanted.clear()
            if self._ended.is_set():
                return
            try:
                self.sync()
            except Exception as err:  # see close
                logger.warning("copying the run to %s failed, it will be tried again: %s", self.url, err)


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
