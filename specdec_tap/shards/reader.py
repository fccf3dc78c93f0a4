"""Reading shards: ``open_shards(folder)`` gives records by number, with NumPy arrays of their states.

Opening reads headers only. A record's frame is read when it is asked for, its blocks when their rows are.
Live journals can be followed: ``refresh()`` picks up what was appended since.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import CorruptShardError, IncompatibleShardsError, InputError, ShardError
from .codec import Block, decode_block
from .frames import (
    BLOCK,
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    INDEX,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    SealedHead,
    Totals,
    check_payload,
    unpack_frame_head,
    unpack_header_area,
)
from .layout import FINGERPRINTS, Piece, RecordMeta, ShardHeader, Span
from .lossy import to_float
from .records import BLOCK_COLUMNS, RECORD_COLUMNS, decode_index, decode_record
from .remote import RemoteFolder, is_url
from .scan import Scan, scan_frames
from .source import DescriptorPool, LocalSource, Source
from .writer import SHARD_NAME

if TYPE_CHECKING:
    import torch

DEFAULT_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What the header of one shard file says; nothing else was read."""

    path: Path
    stream: str
    shard: int
    sealed: bool
    file_bytes: int
    header: ShardHeader
    totals: Totals

    @property
    def num_records(self) -> int:
        """Requests recorded in this file."""
        return self.totals.num_records

    @property
    def num_tokens(self) -> int:
        """Tokens of those requests."""
        return self.totals.num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks stored in this file."""
        return self.totals.num_blocks

    @property
    def raw_bytes(self) -> int:
        """The stored states, uncompressed."""
        return self.totals.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """The stored states as they are in the file."""
        return self.totals.stored_bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be read and was left out."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ShardFile:
    """One open shard, sealed or live. Thread-safe: reads are positioned and share no state."""

    def __init__(self, path: Path, stream: str, number: int, source: Source | None = None) -> None:
        """Open and read the header (sealed) or walk the frame heads (live).

        Args:
            path: The file.
            stream: Name of its stream's folder.
            number: By its name.
            source: Where its bytes come from; the local file by default.

        Raises:
            ShardError: With ``path`` set, for anything wrong with the file.
        """
        self.path = path
        self.stream = stream
        self.number = number
        self._lock = threading.Lock()
        self._index: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None = None
        self._scan: Scan | None = None
        self._head: SealedHead | None = None
        self.source: Source = LocalSource(path, DescriptorPool()) if source is None else source
        try:
            with _naming(path):
                self._size = self.source.size()
                self._identity = self.source.identity()
                if path.name.endswith(SEALED_SUFFIX):
                    self._head = unpack_header_area(self.source.read(0, HEADER_AREA_BYTES), self._size)
                else:
                    self._scan = Scan()
                    self.refresh()
                    if self._scan.header is None:
                        raise self._scan.problem or CorruptShardError("journal holds no frame yet")
                if self.header.shard != number:
                    raise CorruptShardError(
                        f"file is number {number} by its name and {self.header.shard} by its header; "
                        "it was renamed or copied, which breaks the addresses of its blocks"
                    )
        except BaseException:  # nobody else can close what was opened here
            self.close()
            raise

    @property
    def sealed(self) -> bool:
        """Whether the file is whole and final."""
        return self._head is not None

    @property
    def header(self) -> ShardHeader:
        """The file's own header."""
        header = self._head.header if self._head is not None else self._scan.header if self._scan else None
        assert header is not None, "checked when the file was opened"
        return header

    @property
    def totals(self) -> Totals:
        """Sums over the file."""
        return self._head.totals if self._head is not None else self._scan.totals if self._scan else Totals()

    @property
    def problem(self) -> ShardError | None:
        """Why a live journal could not be read to its end; None for a clean end."""
        return self._scan.problem if self._scan is not None and self._head is None else None

    def info(self) -> ShardInfo:
        """Summary for listings."""
        return ShardInfo(
            self.path, self.stream, self.number, self.sealed, self._size, self.header, self.totals
        )

    def mode(self) -> int:
        """Permission bits of the file."""
        return self.source.mode()

    def refresh(self) -> None:
        """Pick up frames appended to a live journal since the last call."""
        with self._lock:
            if self._scan is not None and self._head is None:
                self._size = self.source.size()
                scan_frames(self.source, self._scan)
                self._index = None

    def became_sealed(self, path: Path) -> None:
        """The journal was sealed and renamed to ``path``; the open file is the same one."""
        self.source.close()
        if isinstance(self.source, LocalSource):
            self.source.path = path
        with _naming(path):
            self.refresh()
            with self._lock:
                self._head = unpack_header_area(self.source.read(0, HEADER_AREA_BYTES), self._size)
                self._index = None
                self.path = path

    def same_file(self, path: Path) -> bool:
        """Whether ``path`` is the file that is open here."""
        try:
            there = path.lstat()
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self._identity

    def index(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """``(blocks, records)``: columns of the index, read on first use."""
        with self._lock:
            if self._index is None:
                with _naming(self.path):
                    self._index = self._read_index()
            return self._index

    def _read_index(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        if self._scan is not None and self._head is None:
            tables = []
            for rows, columns in (
                (self._scan.index.blocks, BLOCK_COLUMNS),
                (self._scan.index.records, RECORD_COLUMNS),
            ):
                table = np.array(rows, dtype=np.int64).reshape(len(rows), len(columns))
                tables.append({name: table[:, i] for i, (name, _) in enumerate(columns)})
            return tables[0], tables[1]
        assert self._head is not None, "a file is sealed or scanned"
        head = self._head
        at = HEADER_AREA_BYTES + head.frames_bytes
        payload = self._frame(at, INDEX, head.index_bytes - FRAME_HEAD_BYTES)
        blocks, records = decode_index(payload, head.frames_bytes // FRAME_HEAD_BYTES)
        counts = (len(blocks["offset"]), len(records["offset"]))
        if counts != (head.totals.num_blocks, head.totals.num_records):
            raise CorruptShardError(
                f"index lists {counts[0]:,} blocks and {counts[1]:,} records; the header says "
                f"{head.totals.num_blocks:,} and {head.totals.num_records:,}"
            )
        for table in (blocks, records):
            ends = table["offset"] + FRAME_HEAD_BYTES + table["payload_bytes"]
            if len(ends) and (int(table["offset"].min()) < HEADER_AREA_BYTES or int(ends.max()) > at):
                raise CorruptShardError("index points outside the frames")
        return blocks, records

    def _frame(self, offset: int, kind: int, payload_bytes: int) -> bytes:
        """Payload of the frame at ``offset``, checked."""
        data = self.source.read(offset, FRAME_HEAD_BYTES + payload_bytes)
        head = unpack_frame_head(data[:FRAME_HEAD_BYTES], offset)
        if head.kind != kind or head.payload_bytes != payload_bytes:
            raise CorruptShardError(
                f"frame at byte {offset:,} has kind {head.kind} and {head.payload_bytes:,} bytes; "
                f"the index says kind {kind} and {payload_bytes:,}",
                offset=offset,
            )
        payload = data[FRAME_HEAD_BYTES:]
        check_payload(head, payload, offset)
        return payload

    def record(self, ordinal: int) -> RecordMeta:
        """Read one record's facts.

        Raises:
            CorruptShardError: Naming the file.
        """
        _, records = self.index()
        with _naming(self.path, f"record {ordinal}"):
            payload = self._frame(
                int(records["offset"][ordinal]), RECORD, int(records["payload_bytes"][ordinal])
            )
            return decode_record(payload)

    def block(self, ordinal: int) -> Block:
        """Read and decode one block.

        Raises:
            CorruptShardError: Naming the file.
        """
        blocks, _ = self.index()
        with _naming(self.path, f"block {ordinal}"):
            if ordinal >= len(blocks["offset"]):
                raise CorruptShardError(f"the file has {len(blocks['offset']):,} blocks")
            payload = self._frame(
                int(blocks["offset"][ordinal]), BLOCK, int(blocks["payload_bytes"][ordinal])
            )
            block = decode_block(self.header, payload)
            final_rows = 0 if block.final is None else block.final.shape[0]
            facts = (block.position, block.num_rows, block.final_row, final_rows)
            if facts != tuple(int(blocks[name][ordinal]) for name, _ in BLOCK_COLUMNS[2:]):
                raise CorruptShardError(
                    "the index says other rows of it; 'specdec-tap shards repair' rebuilds it"
                )
            return block

    def close(self) -> None:
        """Close the file; safe to call twice, and it opens again when read."""
        self.source.close()


class _naming:
    """Puts the file's name, and the part of it, into any ShardError raised inside."""

    def __init__(self, path: Path, part: str = "") -> None:
        self._path = path
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, err: object, trace: object) -> None:
        if isinstance(err, ShardError) and err.path is None:
            err.path = self._path
            err.args = (
                f"{self._path}{': ' + self._part if self._part else ''}: {err.args[0]}",
                *err.args[1:],
            )
        elif isinstance(err, OSError) and not isinstance(err, ShardError):
            raise ShardError(f"{self._path}: {err.strerror or err}", path=self._path) from err


class Record:
    """One captured request. Token facts are in memory, states are read when asked for."""

    def __init__(self, store: ShardStore, shard: ShardFile, ordinal: int, meta: RecordMeta) -> None:
        self._store = store
        self._shard = shard
        self._ordinal = ordinal
        self.meta = meta
        removed = {p.block.shard for p in meta.pieces if store.was_removed(shard.stream, p.block.shard)}
        self.pieces = tuple(p for p in meta.pieces if p.block.shard not in removed)
        """The pieces that are still there: old shards may have been removed to bound the folder's size."""

    def __repr__(self) -> str:
        return f"Record({self.id!r}, {self.num_tokens:,} tokens)"

    @property
    def id(self) -> str:
        """``stream/shard/ordinal``; stable for the life of the shard."""
        return f"{self._shard.stream}/{self._shard.number:06d}/{self._ordinal}"

    @property
    def stream(self) -> str:
        """Name of the stream's folder."""
        return self._shard.stream

    @property
    def header(self) -> ShardHeader:
        """Header of the shard that holds the record."""
        return self._shard.header

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]: prompt, then response."""
        return self.meta.token_ids

    @property
    def spans(self) -> tuple[Span, ...]:
        """Prompt and response ranges."""
        return self.meta.spans

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.meta.num_tokens

    @property
    def num_rows(self) -> int:
        """T - 1: the last sampled token was never fed to the model."""
        return self.meta.num_tokens - 1

    @property
    def removed_rows(self) -> int:
        """Positions whose states went with an old shard; they count as gaps now."""
        return self.meta.covered_rows - sum(p.row_stop - p.row_start for p in self.pieces)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of positions below T - 1 without states, in order."""
        gaps, at = [], 0
        for piece in self.pieces:
            if piece.position > at:
                gaps.append((at, piece.position))
            at = piece.stop
        if at < self.num_rows:
            gaps.append((at, self.num_rows))
        return gaps

    @property
    def final_span(self) -> list[tuple[int, int]]:
        """Ranges of positions with a final state, merged, in order. Reads indexes, no blocks."""
        spans: list[tuple[int, int]] = []
        for piece in self.pieces:
            blocks, number = self._store._block_row(self._shard.stream, piece)
            first = int(blocks["final_row"][number])
            low = max(piece.row_start, first)
            high = min(piece.row_stop, first + int(blocks["final_rows"][number]))
            if low >= high:
                continue
            start, stop = (piece.position + row - piece.row_start for row in (low, high))
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        return spans

    def aux(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Aux states as raw bits [rows, A, H] of positions ``[start, stop)``.

        Args:
            start: First position.
            stop: Position after the last; T - 1 by default.

        Raises:
            ShardError: If the range touches a gap, or a block cannot be read.
            ValueError: If the range leaves ``[0, T - 1]``.
        """
        start, stop = self._range(start, stop)
        header = self.header
        out = np.empty((stop - start, header.num_aux, header.hidden_size), header.bits_dtype)
        at = start
        for piece, low, high in self._overlaps(start, stop):
            if low > at:
                break
            block = self._store._block(self._shard.stream, piece)
            row = piece.row_start + low - piece.position
            out[low - start : high - start] = block.aux.transpose(1, 0, 2)[row : row + high - low]
            at = high
        if at < stop:
            raise ShardError(
                f"record {self.id} has no aux states at position {at:,}; its gaps are {_some(self.gaps)}",
                path=self._shard.path,
            )
        return out

    def final(self, start: int, stop: int) -> np.ndarray:
        """Final states as raw bits [rows, H] of positions ``[start, stop)``; see ``final_span`` for what
        exists.

        Raises:
            ShardError: If a position has none, or a block cannot be read.
            ValueError: If the range leaves ``[0, T - 1]``.
        """
        start, stop = self._range(start, stop)
        header = self.header
        out = np.empty((stop - start, header.hidden_size), header.bits_dtype)
        at = start
        for piece, low, high in self._overlaps(start, stop):
            if low > at:
                break
            block = self._store._block(self._shard.stream, piece)
            row = piece.row_start + low - piece.position - block.final_row
            stored = 0 if block.final is None else block.final.shape[0]
            if block.final is None or row < 0 or row + high - low > stored:
                break
            out[low - start : high - start] = block.final[row : row + high - low]
            at = high
        if at < stop:
            raise ShardError(
                f"record {self.id} has no final states over all of [{at:,}, {stop:,}); it has "
                f"{_some(self.final_span)}",
                path=self._shard.path,
            )
        return out

    def aux_float(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """``aux`` as float32 [rows, A, H]."""
        return to_float(self.aux(start, stop), self.header.dtype)

    def final_float(self, start: int, stop: int) -> np.ndarray:
        """``final`` as float32 [rows, H]."""
        return to_float(self.final(start, stop), self.header.dtype)

    def aux_torch(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """``aux`` as a torch tensor [rows, A, H] of the shard's dtype."""
        return bits_to_torch(self.aux(start, stop), self.header.dtype)

    def final_torch(self, start: int, stop: int) -> torch.Tensor:
        """``final`` as a torch tensor [rows, H] of the shard's dtype."""
        return bits_to_torch(self.final(start, stop), self.header.dtype)

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.num_rows if stop is None else stop
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(
                f"positions [{start}, {stop}) are not inside the {self.num_rows:,} rows of record {self.id}"
            )
        return start, stop

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        for piece in self.pieces:
            low, high = max(start, piece.position), min(stop, piece.stop)
            if low < high:
                yield piece, low, high


def _some(ranges: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"[{a:,}, {b:,})" for a, b in ranges[:4])
    return (shown or "none") + (f" and {len(ranges) - 4} more" if len(ranges) > 4 else "")


def bits_to_torch(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """Raw bits of ``dtype`` as a torch tensor of that dtype; shares memory."""
    import torch

    signed = bits.view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(signed).view(getattr(torch, dtype))


_COMMON_FIELDS = ("aux_layer_ids", "layer_convention", "final_hidden", "dtype")
_COMMON_TARGET_FIELDS = ("name", "revision", "architecture", "num_hidden_layers", "hidden_size", "vocab_size",
                         "config_sha256", "tokenizer_sha256", "quantization", *FINGERPRINTS)  # fmt: skip

ALL_DIFFERENCES = (*_COMMON_FIELDS, *(f"target.{name}" for name in _COMMON_TARGET_FIELDS))
"""For ``ignore_differences``: list a mixed folder instead of refusing it."""


def header_differences(a: ShardHeader, b: ShardHeader) -> dict[str, tuple[object, object]]:
    """Fields that must agree for two shards to be used together, where they do not."""
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in _COMMON_FIELDS}
    pairs |= {f"target.{n}": (getattr(a.target, n), getattr(b.target, n)) for n in _COMMON_TARGET_FIELDS}
    for name in FINGERPRINTS:  # shards of earlier versions have none
        if None in pairs[f"target.{name}"]:
            del pairs[f"target.{name}"]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class Folder(Protocol):
    """A shards folder: ``LocalFolder`` here, ``RemoteFolder`` in ``remote.py``."""

    root: Path

    def list(
        self, streams: tuple[str, ...] | None
    ) -> tuple[list[tuple[str, int, Path]], list[tuple[Path, str]]]:
        """``(stream, number, path)`` of every shard, sorted; and foreign things with what is wrong."""
        ...

    def source(self, path: Path) -> Source:
        """Bytes of one of the listed files."""
        ...

    def target_dir(self) -> Path | None:
        """Local folder with the target's head, or None."""
        ...


class LocalFolder:
    """A shards folder on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pool = DescriptorPool()

    def list(
        self, streams: tuple[str, ...] | None
    ) -> tuple[list[tuple[str, int, Path]], list[tuple[Path, str]]]:
        """As ``Folder``; for a number that has a journal and a sealed file, the sealed one."""
        found: dict[tuple[str, int], Path] = {}
        foreign: list[tuple[Path, str]] = []
        try:
            entries = [e for e in os.scandir(self.root) if e.name != "target" and not e.name.startswith(".")]
        except OSError as err:
            raise InputError(f"cannot list {str(self.root)!r}: {err.strerror}") from err
        for stream in sorted(entries, key=lambda e: e.name):
            if streams is not None and stream.name not in streams:
                continue
            if not stream.is_dir(follow_symlinks=False):
                if stream.is_symlink() or SHARD_NAME.fullmatch(stream.name):
                    message = "is not a stream folder; shards live in STREAM/ folders, not links"
                    foreign.append((Path(stream.path), message))
                continue
            for entry in os.scandir(stream.path):
                match = SHARD_NAME.fullmatch(entry.name)
                if match:
                    key = (stream.name, int(match[1]))
                    if key not in found or entry.name.endswith(SEALED_SUFFIX):
                        found[key] = Path(entry.path)
                elif not entry.name.startswith("."):
                    message = "is not a shard; expected names like 000001.safetensors"
                    foreign.append((Path(entry.path), message))
        listed = [(stream, number, path) for (stream, number), path in sorted(found.items())]
        return listed, foreign

    def source(self, path: Path) -> Source:
        """Positioned reads; not all files stay open."""
        return LocalSource(path, self._pool)

    def target_dir(self) -> Path | None:
        """``target/`` beside the streams."""
        path = self.root / "target"
        return path if path.is_dir() else None


class ShardStore:
    """All records of a folder, by number. Made by ``open_shards``; thread-safe for reading."""

    def __init__(
        self,
        folder: Folder,
        *,
        streams: tuple[str, ...] | None,
        only: Path | None,
        follow: bool,
        ignore_differences: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        self.root = folder.root
        self._folder = folder
        self.skipped: list[Problem] = []
        self.cut: set[str] = set()
        """Ids of the records that iteration left out because an old shard with a part of them was removed."""
        self.follow = follow
        self._streams = streams
        self._only = only
        self._ignored = ignore_differences
        self._files: dict[tuple[str, int], ShardFile] = {}
        self._refused: set[Path] = set()
        self._segments: list[tuple[ShardFile, int]] = []
        self._starts: list[int] = []
        self._length = 0
        self._known: dict[tuple[str, int], int] = {}
        self._first: dict[str, int] = {}
        self._header: ShardHeader | None = None
        self._lock = threading.RLock()
        self._cache: OrderedDict[tuple[str, int, int], Block] = OrderedDict()
        self._cache_bytes = 0
        self._cache_limit = cache_bytes
        self.refresh()

    # ---- what there is

    @property
    def header(self) -> ShardHeader:
        """Header of the first shard; every shard agrees on target, layers, dtype and final state.

        Raises:
            InputError: If there is no readable shard.
        """
        if self._header is None:
            problems = "".join(f"\n  {p}" for p in self.skipped[:5])
            raise InputError(
                f"no readable shard in {str(self.root)!r}; expected STREAM/000001{SEALED_SUFFIX}{problems}"
            )
        return self._header

    @property
    def shards(self) -> list[ShardInfo]:
        """Every readable shard, sorted by stream and number."""
        with self._lock:
            return [
                self._files[key].info() for key in sorted(self._files) if self._selected(self._files[key])
            ]

    @property
    def target_dir(self) -> Path | None:
        """``target/`` beside the streams: the target's head, config and tokenizer. None if absent."""
        return self._folder.target_dir()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Record:
        """Record by number, from 0; negative counts from the end.

        Raises:
            IndexError: Out of range.
            CorruptShardError: The record's frame is damaged; names the file.
        """
        if number < 0:
            number += self._length
        if not 0 <= number < self._length:
            raise IndexError(f"record {number} of {self._length:,}")
        with self._lock:
            at = bisect.bisect_right(self._starts, number) - 1
            shard, first = self._segments[at]
            ordinal = first + number - self._starts[at]
        return Record(self, shard, ordinal, shard.record(ordinal))

    def __iter__(self) -> Iterator[Record]:
        """Every whole record in order. A damaged one is left out and added to ``skipped``, one that lost a
        part with a removed shard to ``cut``."""
        for number in self.numbers():
            try:
                record = self[number]
            except ShardError as err:
                self.skipped.append(Problem(err.path or self.root, str(err)))
                continue
            if record.removed_rows:
                self.cut.add(record.id)
                continue
            yield record

    def numbers(self) -> Iterator[int]:
        """Numbers of all records but those of a shard whose index cannot be read; that is added to
        ``skipped``, once."""
        with self._lock:
            stops = [*self._starts[1:], self._length]
            segments = list(zip(self._segments, self._starts, stops, strict=False))
        for (shard, _), start, stop in segments:
            try:
                shard.index()
            except ShardError as err:
                self._note(shard.path, str(err))
                continue
            yield from range(start, stop)

    def files(self) -> Iterator[ShardFile]:
        """The open shard files, sorted by stream and number."""
        for key in sorted(self._files):
            if self._selected(self._files[key]):
                yield self._files[key]

    def find(self, record_id: str) -> Record:
        """Record by its id ``stream/shard/ordinal``.

        Raises:
            InputError: No such record here.
        """
        parts = record_id.split("/")
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            shard = self._files.get((parts[0], int(parts[1])))
            ordinal = int(parts[2])
            if shard is not None and ordinal < shard.totals.num_records:
                return Record(self, shard, ordinal, shard.record(ordinal))
        raise InputError(
            f"no record {record_id!r} in {str(self.root)!r}; ids look like STREAM/000001/0, "
            "'specdec-tap shards ls --records' lists them"
        )

    # ---- keeping up

    def refresh(self) -> int:
        """Look for new shards and new frames of live journals.

        Returns:
            How many records were added at the end; the numbers of earlier ones do not change.
        """
        with self._lock:
            listed, foreign = self._folder.list(self._streams)
            for path, message in foreign:
                self._note(path, message)
            first: dict[str, int] = {}
            for stream, number, _ in listed:
                first.setdefault(stream, number)
            self._first = first  # at once: others read it meanwhile
            for key in self._files.keys() - {(stream, number) for stream, number, _ in listed}:
                if self._files[key].sealed:  # a journal may just be about to get its other name
                    self._files[key].close()  # open, a removed shard would keep its disk space
            for stream, number, path in listed:
                key = (stream, number)
                known = self._files.get(key)
                try:
                    if known is None:
                        if path in self._refused:
                            continue
                        self._admit(key, ShardFile(path, stream, number, self._folder.source(path)))
                    elif not known.sealed and path.name.endswith(SEALED_SUFFIX):
                        if known.same_file(path):
                            known.became_sealed(path)
                        else:
                            self._files[key] = ShardFile(path, stream, number, self._folder.source(path))
                    else:
                        known.refresh()
                except (ShardError, IncompatibleShardsError) as err:
                    if isinstance(err, IncompatibleShardsError) and not self._length:
                        raise
                    if not path.name.endswith(OPEN_SUFFIX):
                        self._refused.add(path)
                    self._note(path, str(err))
            return self._extend()

    def _note(self, path: Path, message: str) -> None:
        message = message.removeprefix(f"{path}: ")
        if not any(p.path == path and p.message == message for p in self.skipped):
            self.skipped.append(Problem(path, message))

    def _selected(self, shard: ShardFile) -> bool:
        return self._only is None or self._only.stem == shard.path.stem

    def _admit(self, key: tuple[str, int], shard: ShardFile) -> None:
        if self._header is None:
            self._header = shard.header
        differences = header_differences(self._header, shard.header)
        differences = {k: v for k, v in differences.items() if k not in self._ignored}
        if differences:
            shard.close()
            lines = "; ".join(f"{name} is {a!r} and {b!r}" for name, (a, b) in differences.items())
            raise IncompatibleShardsError(
                f"shards in {str(self.root)!r} do not belong together: {lines} (in {shard.path.parent.name}/"
                f"{shard.path.name}). Keep each target and layer choice in a folder of its own"
            )
        self._files[key] = shard

    def _extend(self) -> int:
        added = 0
        for key in sorted(self._files):
            shard = self._files[key]
            count = shard.totals.num_records
            known = self._known.get(key, 0)
            if count > known and self._selected(shard):
                self._segments.append((shard, known))
                self._starts.append(self._length)
                self._length += count - known
                added += count - known
                self._known[key] = count
        return added

    # ---- blocks

    def was_removed(self, stream: str, shard: int) -> bool:
        """Whether a shard is gone because old shards are removed first: everything before it is gone too."""
        return shard < self._first.get(stream, 0)

    def _block_row(self, stream: str, piece: Piece) -> tuple[dict[str, np.ndarray], int]:
        """Index columns and row of the block that a piece points at, checked against the piece."""
        shard = self._files.get((stream, piece.block.shard))
        if shard is None:
            raise ShardError(
                f"{self.root}: shard {stream}/{piece.block.shard:06d} is missing or unreadable, and a record "
                f"needs its block {piece.block.block:,}; 'specdec-tap shards verify' says what is wrong",
                path=self.root / stream,
            )
        blocks, _ = shard.index()
        number = piece.block.block
        if (
            number >= len(blocks["offset"])
            or piece.row_stop > int(blocks["num_rows"][number])
            or int(blocks["position"][number]) + piece.row_start != piece.position
        ):
            raise CorruptShardError(
                f"{shard.path}: block {number:,} is not the one that a record points at "
                f"(position {piece.position:,}, rows [{piece.row_start}, {piece.row_stop}))",
                path=shard.path,
            )
        return blocks, number

    def _block(self, stream: str, piece: Piece) -> Block:
        key = (stream, piece.block.shard, piece.block.block)
        with self._lock:
            block = self._cache.get(key)
            if block is not None:
                self._cache.move_to_end(key)
        if block is None:
            self._block_row(stream, piece)
            block = self._files[key[:2]].block(key[2])
            self._remember(key, block)
        if piece.row_stop > block.num_rows or block.position + piece.row_start != piece.position:
            raise CorruptShardError(
                f"{self._files[key[:2]].path}: block {key[2]:,} is not the one that a record points "
                "at: it starts "
                f"at position {block.position:,}, expected {piece.position - piece.row_start:,}",
                path=self._files[key[:2]].path,
            )
        return block

    def _remember(self, key: tuple[str, int, int], block: Block) -> None:
        size = block.aux.nbytes + (0 if block.final is None else block.final.nbytes)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = block
                self._cache_bytes += size
            while self._cache_bytes > self._cache_limit and self._cache:
                _, old = self._cache.popitem(last=False)
                self._cache_bytes -= old.aux.nbytes + (0 if old.final is None else old.final.nbytes)

    def close(self) -> None:
        """Close every file."""
        for shard in self._files.values():
            shard.close()

    def __enter__(self) -> ShardStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_shards(
    path: Path | str,
    *,
    streams: Iterable[str] | None = None,
    follow: bool = False,
    ignore_differences: Iterable[str] = (),
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    cache_dir: Path | None = None,
    range_cache_bytes: int = 8 << 30,
) -> ShardStore:
    """Open a folder of shards, one stream's folder, one shard file, or a URL. Reads headers only.

    Args:
        path: The shards folder, ``STREAM/`` inside it, ``STREAM/000001.safetensors``, or the URL of a
            shards folder that fsspec can open, such as ``s3://bucket/shards``.
        streams: Only these streams.
        follow: An empty folder is fine, a writer may still come; call ``refresh()``.
        ignore_differences: Header fields that may differ, such as ``target.name`` when the same model was
            served under two names.
        cache_bytes: Memory for decoded blocks, for prefixes that several records share.
        cache_dir: Where ranges of remote files are kept; below ``~/.cache`` by default.
        range_cache_bytes: At most so many bytes there.

    Raises:
        InputError: No such folder, or no readable shard in it.
        IncompatibleShardsError: Shards of different targets, layers or dtypes; lists what differs.
    """
    if is_url(path):
        folder: Folder = RemoteFolder(str(path), cache_dir, range_cache_bytes)
        store = ShardStore(
            folder,
            streams=None if streams is None else tuple(streams),
            only=None,
            follow=follow,
            ignore_differences=tuple(ignore_differences),
            cache_bytes=cache_bytes,
        )
        if not follow:
            _ = store.header
        return store
    root = Path(path)
    only = None
    if root.is_file():
        root, only = root.parent, root
    if only is not None or (root.is_dir() and any(SHARD_NAME.fullmatch(p.name) for p in root.iterdir())):
        root = root.absolute()
        root, streams = root.parent, (root.name,)
    if not root.is_dir():
        raise InputError(f"{str(path)!r} is not a folder; expected the one that SPECDEC_TAP_DIR named")
    store = ShardStore(
        LocalFolder(root),
        streams=None if streams is None else tuple(streams),
        only=only,
        follow=follow,
        ignore_differences=tuple(ignore_differences),
        cache_bytes=cache_bytes,
    )
    if not follow:
        _ = store.header  # raises with the reasons when nothing is readable
    return store
