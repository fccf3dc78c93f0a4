"""Shards in object stores: any fsspec URL for reading, and uploading of sealed shards in the background.

Reading fetches ranges of a few megabytes, never whole files, and keeps them in a local cache. Uploading is
one way and safe to repeat: a shard counts as uploaded when the store shows a file of its size and header, and
nothing is deleted here unless asked for, and then only after that. Another writer's file is never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, ShardError
from .frames import HEADER_AREA_BYTES, SEALED_SUFFIX, unpack_header_area
from .writer import SHARD_NAME

logger = logging.getLogger("specdec_tap.shards.remote")

CHUNK_BYTES = 4 << 20
DEFAULT_CACHE_BYTES = 8 << 30
_TRIES = 5
_FAILURES_IN_A_ROW = 3
"""After so many a store is taken to be away, and the rest of the files wait for the next round."""
_TARGET = "target"
# Stores in which writing a file is one step; elsewhere a file is written beside and renamed.
_ATOMIC_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "abfs", "az", "memory")


def is_url(path: object) -> bool:
    """Whether ``path`` names a remote folder, such as ``s3://bucket/shards``."""
    return "://" in str(path)


class RemotePath:
    """A URL with the parts of a path that readers of shards use."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.name = self._url.rsplit("/", 1)[-1]
        self.stem = self.name.partition(".")[0]
        self.suffix = self.name[len(self.stem) :]

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, part: str) -> RemotePath:
        return RemotePath(f"{self._url}/{part}")

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it."""
        return RemotePath(self._url.rsplit("/", 1)[0])


def open_filesystem(url: str) -> tuple[Any, str]:
    """``(fsspec file system, path inside it)``.

    Raises:
        InputError: fsspec, or its driver for the protocol, is not installed.
    """
    try:
        import fsspec
    except ImportError as err:
        raise InputError(f"{url!r} needs fsspec; pip install 'specdec-tap[remote]'") from err
    try:
        # Listings must be fresh: other processes write here.
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as err:
        raise InputError(f"{url!r} cannot be opened: {err}") from err


def _again(action: Callable[[], Any], what: str, tries: int = _TRIES) -> Any:
    """Try a remote operation a few times, waiting longer each time."""
    for attempt in range(tries):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as err:
            # Drivers raise their libraries' own types for a store that is away; all mean "try again".
            if attempt == tries - 1:
                raise ShardError(f"{what}: {type(err).__name__}: {err}", path=what) from err
            time.sleep(min(0.25 * 2**attempt, 8.0))
    raise AssertionError("unreachable")


class RemoteFolder:
    """A shards folder in a store: listing, sources of its files, a local copy of ``target/``."""

    def __init__(
        self, url: str, cache_dir: Path | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        self.root = RemotePath(url)
        self._fs, self._base = open_filesystem(url)
        cache_dir = (
            cache_dir or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specdec-tap"
        )
        self._cache = RangeCache(cache_dir / hashlib.sha256(url.encode()).hexdigest()[:24], cache_bytes)
        self._sizes: dict[str, int] = {}

    def list(
        self, streams: tuple[str, ...] | None
    ) -> tuple[list[tuple[str, int, Any]], list[tuple[Any, str]]]:
        """``(stream, number, path)`` of every sealed shard, sorted, and what is there but is none."""
        found, problems = [], []
        for entry in self._entries(self._base):
            stream = _last(entry["name"])
            if entry["type"] != "directory" or stream == _TARGET or stream.startswith("."):
                continue
            if streams is not None and stream not in streams:
                continue
            for file in self._entries(entry["name"]):
                name = _last(file["name"])
                path = self.root / stream / name
                match = SHARD_NAME.fullmatch(name)
                if match and name.endswith(SEALED_SUFFIX):
                    self._sizes[str(path)] = int(file["size"])
                    found.append((stream, int(match[1]), path))
                elif not name.startswith("."):
                    problems.append((path, "is not a sealed shard"))
        return sorted(found, key=lambda f: f[:2]), problems

    def _entries(self, path: str) -> list[dict[str, Any]]:
        try:
            return _again(lambda: self._fs.ls(path, detail=True), str(self.root))
        except FileNotFoundError:
            return []

    def source(self, path: RemotePath) -> RemoteSource:
        """Ranges of one file."""
        inside = str(path)[len(str(self.root)) :].lstrip("/")
        return RemoteSource(
            self._fs, f"{self._base.rstrip('/')}/{inside}", path, self._sizes[str(path)], self._cache
        )

    def target_dir(self) -> Path | None:
        """A local copy of ``target/``, fetched on first use; None if the store has none."""
        local = self._cache.folder / _TARGET
        files = [e for e in self._entries(f"{self._base.rstrip('/')}/{_TARGET}") if e["type"] == "file"]
        if not files:
            return None
        _private_dir(local)
        for file in files:
            name = _last(file["name"])
            copy = local / name
            if name.startswith(".") or (copy.is_file() and copy.stat().st_size == file["size"]):
                continue
            part = copy.with_name(f".{name}.part")
            _again(
                lambda f=file, p=part: self._fs.get_file(f["name"], str(p)), f"{self.root}/{_TARGET}/{name}"
            )
            part.chmod(0o600)
            part.replace(copy)
        return local


class RemoteSource:
    """Ranges of one remote file, through the cache."""

    def __init__(self, fs: Any, inside: str, path: RemotePath, size: int, cache: RangeCache) -> None:
        self.path = path
        self._fs = fs
        self._inside = inside
        self._size = size
        self._cache = cache
        # A shard that was written anew (repair, forget) has another size; its old ranges are not asked for.
        self._key = hashlib.sha256(f"{path}:{size}".encode()).hexdigest()[:24]

    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes at ``offset``."""
        stop = min(offset + length, self._size)
        parts = []
        for chunk in range(offset // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            data = self._chunk(chunk, header_only=stop <= 1 << 16)
            first = chunk * CHUNK_BYTES
            parts.append(data[max(offset - first, 0) : stop - first])
        return b"".join(parts)

    def _chunk(self, chunk: int, *, header_only: bool) -> bytes:
        # The header is asked for alone, so that opening a folder does not fetch 4 MB a file.
        span = 1 << 16 if header_only and chunk == 0 else CHUNK_BYTES
        first = chunk * CHUNK_BYTES
        stop = min(first + span, self._size)
        name = f"{self._key}-{chunk}-{span}"
        data = self._cache.get(name)
        if data is None or len(data) != stop - first:
            data = _again(lambda: self._fs.cat_file(self._inside, start=first, end=stop), f"{self.path}")
            if len(data) != stop - first:
                raise ShardError(
                    f"{self.path}: the store gave {len(data):,} of {stop - first:,} bytes", path=self.path
                )
            self._cache.put(name, data)
        return data

    def identity(self) -> tuple[int, int]:
        """Remote files have none."""
        return (0, 0)

    def mode(self) -> int:
        """Permissions are the store's matter."""
        return 0o600

    def close(self) -> None:
        """Nothing is open."""


class RangeCache:
    """Ranges of remote files as local files, the least recently written removed beyond a size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._ranges = folder / "ranges"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        _private_dir(self._ranges)
        self._held = sum(entry.stat().st_size for entry in os.scandir(self._ranges))

    def get(self, name: str) -> bytes | None:
        """Bytes of a range, or None."""
        try:
            return (self._ranges / name).read_bytes()
        except OSError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Keep a range. A full disk only means that it is fetched again."""
        with contextlib.suppress(OSError), self._lock:
            part = self._ranges / f".{name}.{os.getpid()}"
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
            part.replace(self._ranges / name)
            self._held += len(data)
            if self._held > self._max_bytes:
                self._trim()

    def _trim(self) -> None:
        entries = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in os.scandir(self._ranges))
        self._held = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if self._held <= self._max_bytes * 0.9:
                return
            Path(path).unlink(missing_ok=True)
            self._held -= size


def _private_dir(path: Path) -> None:
    """Make a folder and its missing parents, all with mode 0700."""
    if not path.is_dir():
        _private_dir(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


# ---- upload


@dataclass(slots=True)
class UploadReport:
    """What one round did."""

    uploaded: list[str] = field(default_factory=list)
    already_there: int = 0
    removed_locally: int = 0
    failed: list[str] = field(default_factory=list)
    """Message of each file that could not be uploaded now; it stays where it is."""
    not_tried: int = 0
    """Files that were left for the next round because the store seems to be away."""


class NameTakenError(ShardError):
    """The store has another writer's shard under a shard's name."""


class Uploader:
    """Copies sealed shards and ``target/`` of a local folder to a store, again and again if wanted."""

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        remove_local: bool = False,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        """Prepare; nothing is read or sent yet.

        Args:
            root: The local shards folder, which a server may be writing to.
            url: Where to, such as ``s3://bucket/shards``.
            remove_local: Remove a sealed shard here once the store has it, except the newest of each stream.
                Records whose blocks went this way are read from the store.
            wanted: Which streams (and ``target``) to send, by name; all if None.

        Raises:
            InputError: No such folder, or fsspec or the store's driver is not installed.
        """
        if not root.is_dir():
            raise InputError(f"{str(root)!r} is not a folder")
        self._root = root
        self._fs, self._base = open_filesystem(url)
        self._url = url.rstrip("/")
        self._remove_local = remove_local
        self._wanted = wanted
        self._known: dict[str, int] = {}
        """Size of each file that the store has, by its path inside the folder."""
        self._taken: set[str] = set()
        protocols = self._fs.protocol if isinstance(self._fs.protocol, list | tuple) else (self._fs.protocol,)
        self._atomic = any(p in _ATOMIC_PROTOCOLS for p in protocols)

    def run_once(self) -> UploadReport:
        """Upload everything that is sealed and not there yet. A failure leaves the file for the next
        round."""
        report = UploadReport()
        in_a_row = 0
        waiting = set()
        for path, inside in self._files():
            if in_a_row >= _FAILURES_IN_A_ROW:
                report.not_tried += inside not in self._known
                continue
            try:
                size = path.stat().st_size
                if self._known.get(inside) != size:
                    if self._is_there(path, inside, size):
                        report.already_there += 1
                    else:
                        self._upload(path, inside, size)
                        report.uploaded.append(inside)
                    self._known[inside] = size
            except NameTakenError as err:
                report.failed.append(str(err))
                waiting.add(path.parent)
                if inside not in self._taken:
                    self._taken.add(inside)
                    logger.warning("%s", err)
                continue
            except Exception as err:
                if not path.exists():
                    continue  # retention removed it meanwhile
                # Whatever the driver raised (FileNotFoundError, too, for a missing bucket): the shard is safe
                # here, and the next round tries again.
                report.failed.append(f"{inside}: {type(err).__name__}: {err}")
                in_a_row += 1
                waiting.add(path.parent)
                if len(report.failed) == 1:  # one line a round, however many files there are
                    logger.warning("could not upload %s to %s: %s", inside, self._url, err)
                continue
            in_a_row = 0
            # Readers take what is missing at the front for removed, and in the middle for damage.
            if self._remove_local and path.parent not in waiting and self._may_go(path):
                path.unlink(missing_ok=True)
                report.removed_locally += 1
        return report

    @property
    def num_shards(self) -> int:
        """Shards that the store has, as far as this uploader has seen."""
        return sum(not inside.startswith(f"{_TARGET}/") for inside in list(self._known))

    def has(self, path: Path) -> bool:
        """Whether the store has this local file, as it is now."""
        try:
            size = path.stat().st_size
        except OSError:
            return False
        return self._known.get(f"{path.parent.name}/{path.name}") == size

    def follow(self, stop: threading.Event, interval_s: float = 10.0) -> None:
        """Run rounds until ``stop`` is set, then a last one. For a thread of its own."""
        wait = interval_s
        while not stop.is_set():
            failed = bool(self.run_once().failed)
            # A store that is away is asked less and less often, at least every five minutes.
            wait = min(wait * 2, 300.0) if failed else interval_s
            stop.wait(wait)
        self.run_once()

    def _files(self) -> list[tuple[Path, str]]:
        files = []
        for folder in sorted(p for p in self._root.iterdir() if p.is_dir() and not p.is_symlink()):
            if folder.name.startswith(".") or not (self._wanted is None or self._wanted(folder.name)):
                continue
            for path in sorted(folder.iterdir()):
                sealed = SHARD_NAME.fullmatch(path.name) and path.name.endswith(SEALED_SUFFIX)
                wanted = sealed or (folder.name == _TARGET and not path.name.startswith("."))
                if wanted and path.is_file() and not path.is_symlink():
                    files.append((path, f"{folder.name}/{path.name}"))
        return files

    def _may_go(self, path: Path) -> bool:
        """Never the newest shard of a stream: the numbers of later ones follow from it."""
        if path.parent.name == _TARGET:
            return False
        names = [p.name for p in path.parent.iterdir() if SHARD_NAME.fullmatch(p.name)]
        return path.name != max(names)

    def _remote_size(self, inside: str) -> int | None:
        try:
            return int(self._fs.info(f"{self._base.rstrip('/')}/{inside}")["size"])
        except FileNotFoundError:
            return None

    def _is_there(self, path: Path, inside: str, size: int) -> bool:
        """Whether the store has this file as it is here.

        Raises:
            NameTakenError: It has another writer's shard under this name.
        """
        there = self._remote_size(inside)
        if there is None or inside.startswith(f"{_TARGET}/"):
            return there == size
        with path.open("rb") as file:
            ours = file.read(HEADER_AREA_BYTES)
        theirs = self._fs.cat_file(f"{self._base.rstrip('/')}/{inside}", start=0, end=HEADER_AREA_BYTES)
        if theirs == ours:
            return there == size
        try:
            heads = [unpack_header_area(ours, size).header, unpack_header_area(theirs, there).header]
        except ShardError:
            return False  # cut short there, or damaged: it is written again
        if heads[0].created_unix_s != heads[1].created_unix_s:  # repair and forget keep it
            raise NameTakenError(
                f"{inside}: {self._url} has a shard of this name that another writer made; upload to a "
                "folder of its own, or name the stream otherwise",
                path=path,
            )
        return False

    def _upload(self, path: Path, inside: str, size: int) -> None:
        final = f"{self._base.rstrip('/')}/{inside}"
        if self._atomic:
            self._fs.put_file(str(path), final)
        else:
            parent, _, name = final.rpartition("/")
            self._fs.makedirs(parent, exist_ok=True)
            # Several servers with one folder may send the same file at once.
            part = f"{parent}/.{name}.{os.getpid()}.part"
            self._fs.put_file(str(path), part)
            self._fs.mv(part, final)
        there = self._remote_size(inside)
        if there != size:
            raise OSError(f"the store shows {there} bytes of {size:,}")
