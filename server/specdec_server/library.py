"""Read-only questions about a folder of shards, answered from indexes: records are read only to be shown."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_tap.errors import InputError, ShardError
from specdec_tap.shards import Record, ShardStore, open_shards
from specdec_tap.shards.index import shard_row, summarise
from specdec_tap.shards.layout import BlockRef, RecordMeta
from specdec_tap.shards.reader import ALL_DIFFERENCES, ShardFile, header_differences

from .errors import ApiError, not_found

REFRESH_S = 1.0
SEARCH_BUDGET_S = 0.25
SOURCE_BUDGET_S = 0.4
SOURCE_KEPT_S = 10.0
MAX_SOURCES_KEPT = 256
MAX_PAGE = 200
SORTS = ("newest", "oldest", "longest", "shortest", "gaps")


class _Opened:
    """A store and how many readers are in it; a replaced one is closed when the last one leaves."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.readers = 0
        self.replaced = False


@dataclass(slots=True)
class _Table:
    """One row per record of the whole folder, newest shard last: 40 bytes each."""

    files: list[ShardFile]
    file_of: np.ndarray
    ordinal: np.ndarray
    num_tokens: np.ndarray
    gap_rows: np.ndarray
    orders: dict[str, np.ndarray]


class Library:
    """A folder of shards that may be growing. Thread-safe; every method may read the disk.

    Args:
        root: The shards folder.

    Raises:
        InputError: There is no such folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._opened = _Opened(self._open())
        self._refreshed = time.monotonic()
        self._table: tuple[tuple[Any, ...], _Table] | None = None
        self._sources: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()

    def _open(self) -> ShardStore:
        return open_shards(self.root, follow=True, ignore_differences=ALL_DIFFERENCES)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._opened.store.close()

    @contextlib.contextmanager
    def store(self) -> Iterator[ShardStore]:
        """Lend the store, at most a second old."""
        with self._lock:
            self._keep_up()
            opened = self._opened
            opened.readers += 1
        try:
            yield opened.store
        finally:
            with self._lock:
                opened.readers -= 1
                if opened.replaced and not opened.readers:
                    opened.store.close()

    def _keep_up(self) -> None:
        if time.monotonic() - self._refreshed < REFRESH_S:
            return
        store = self._opened.store
        store.refresh()
        # An open file of a retired shard would keep its disk space, and one of a shard that was written anew
        # would show what was to be forgotten: let go of all of them and look again.
        if any(not file.same_file(file.path) for file in store.files()):
            old, self._opened = self._opened, _Opened(self._open())
            old.replaced = True
            self._table = None
            self._sources.clear()
            if not old.readers:
                old.store.close()
        self._refreshed = time.monotonic()

    # ---- shards

    def summary(self) -> dict[str, Any] | None:
        """Sums over the folder; None when it holds no readable shard yet."""
        with self.store() as store:
            if not any(True for _ in store.files()):
                return None
            out = summarise(store)
            out["differences"] = self._differences(store)
            return out

    def _differences(self, store: ShardStore) -> list[str]:
        """Header fields in which the shards disagree; a folder with any cannot be trained on as a whole."""
        headers = [file.header for file in store.files()]
        names = {name for header in headers[1:] for name in header_differences(headers[0], header)}
        return sorted(names)

    def version(self) -> tuple[Any, ...]:
        """Something that changes when a shard is added, grows, is sealed or goes; cheap."""
        with self.store() as store:
            return tuple(
                (f.stream, f.number, f.sealed, f.totals.num_blocks, f.totals.num_records)
                for f in store.files()
            )

    def shards(self) -> list[dict[str, Any]]:
        """One row per shard file, newest first."""
        with self.store() as store:
            rows = [shard_row(info) for info in store.shards]
        for row in rows:
            row["name"] = f"{row['stream']}/{row['shard']:06d}"
            row["file_name"] = Path(row.pop("path")).name
        return sorted(rows, key=lambda r: (r["created_unix_s"], r["name"]), reverse=True)

    def skipped(self) -> list[dict[str, str]]:
        """Files that could not be read, with the reason."""
        with self.store() as store:
            return [
                {"file": self._inside(p.path), "message": p.message.replace(f"{self.root}/", "")}
                for p in store.skipped[:200]
            ]

    def _inside(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name

    def shard_path(self, stream: str, shard: int) -> Path:
        """Path of a shard that exists; the answer comes from the folder's listing, never from the request."""
        with self.store() as store:
            return self._file(store, stream, shard).path

    def shard(self, stream: str, shard: int) -> dict[str, Any]:
        """One shard with its whole header."""
        with self.store() as store:
            file = self._file(store, stream, shard)
            row = shard_row(file.info())
            row["name"] = f"{row['stream']}/{row['shard']:06d}"
            row["file_name"] = Path(row.pop("path")).name
            row["header"] = file.header.to_json()
            return row

    def _file(self, store: ShardStore, stream: str, shard: int) -> ShardFile:
        for file in store.files():
            if file.stream == stream and file.number == shard:
                return file
        raise not_found(
            f"there is no shard {stream}/{shard:06d}", "it may have been retired; see the shards page"
        )

    # ---- records

    def records(
        self,
        *,
        sort: str = "newest",
        offset: int = 0,
        limit: int = 50,
        query: str = "",
        min_tokens: int = 0,
        gaps_only: bool = False,
        stream: str | None = None,
        shard: int | None = None,
    ) -> dict[str, Any]:
        """One page of records, filtered and sorted by what the indexes hold.

        A ``query`` is looked for in record ids and request ids. Request ids are only in the records, so it
        is a scan in sort order that stops after a quarter of a second.

        Args:
            sort: One of ``SORTS``.
            offset: Where the page (or, with a query, the scan) begins in the sorted list.
            limit: Most rows to return.
            query: Part of a record id or request id.
            min_tokens: Only records at least this long, in tokens.
            gaps_only: Only records with positions that have no states.
            stream: Only this stream.
            shard: With ``stream``: only this shard.

        Returns:
            ``records``, ``num_records`` (in the folder), ``num_matching`` (None while a scan has not seen
            all), ``next_offset`` (None at the end).
        """
        with self.store() as store:
            table = self._records_table(store)
            if sort not in SORTS:
                raise ApiError(422, "invalid_value", f"sort is {sort!r}; expected one of {', '.join(SORTS)}")
            order = table.orders[sort]
            keep = np.ones(len(order), bool)
            if min_tokens:
                keep &= table.num_tokens[order] >= min_tokens
            if gaps_only:
                keep &= table.gap_rows[order] > 0
            if stream is not None:
                wanted = [
                    i for i, f in enumerate(table.files) if f.stream == stream and shard in (None, f.number)
                ]
                keep &= np.isin(table.file_of[order], wanted)
            order = order[keep]
            base = {"num_records": len(table.ordinal), "offset": offset}
            if query:
                return base | self._search(store, table, order, query.strip(), offset, limit)
            rows = order[offset : offset + limit]
            end = offset + len(rows)
            return base | {
                "records": [_record_row(self._record(store, table, int(row))) for row in rows],
                "num_matching": len(order),
                "next_offset": end if end < len(order) else None,
            }

    def _search(
        self, store: ShardStore, table: _Table, order: np.ndarray, query: str, offset: int, limit: int
    ) -> dict[str, Any]:
        exact = None
        with contextlib.suppress(InputError, ShardError):
            exact = store.find(query)
        if exact is not None:
            return {"records": [_record_row(exact)], "num_matching": 1, "next_offset": None}
        found: list[dict[str, Any]] = []
        until = time.monotonic() + SEARCH_BUDGET_S
        at = offset
        needle = query.lower()
        while at < len(order) and len(found) < limit and (at == offset or time.monotonic() < until):
            record = self._record(store, table, int(order[at]))
            at += 1
            if isinstance(record, _Unreadable):
                continue
            if needle in record.meta.request_id.lower() or needle in record.id.lower():
                found.append(_record_row(record))
        done = at >= len(order)
        return {
            "records": found,
            "num_matching": len(found) if done and not offset else None,
            "num_searched": at,
            "next_offset": None if done else at,
        }

    def _record(self, store: ShardStore, table: _Table, row: int) -> Record | _Unreadable:
        file, ordinal = table.files[int(table.file_of[row])], int(table.ordinal[row])
        try:
            return Record(store, file, ordinal, file.record(ordinal))
        except ShardError as err:
            return _Unreadable(f"{file.stream}/{file.number:06d}/{ordinal}", str(err))

    def _records_table(self, store: ShardStore) -> _Table:
        """The table of all records; made again when a file was added, sealed or grew."""
        files = sorted(store.files(), key=lambda f: (f.header.created_unix_s, f.stream, f.number))
        key = tuple((f.stream, f.number, f.sealed, f.totals.num_records) for f in files)
        with self._lock:
            if self._table is not None and self._table[0] == key:
                return self._table[1]
        columns: list[list[np.ndarray]] = [[], [], [], []]
        for number, file in enumerate(files):
            try:
                _, records = file.index()
            except ShardError:
                continue  # it is in the list of damaged shards; its records cannot be found
            count = min(len(records["offset"]), file.totals.num_records)
            tokens = records["num_tokens"][:count]
            gaps = tokens - 1 - records["covered_rows"][:count]
            for column, values in zip(
                columns,
                (np.full(count, number), np.arange(count), tokens, gaps),
                strict=True,
            ):
                column.append(values.astype(np.int64))
        file_of, ordinal, num_tokens, gap_rows = (
            np.concatenate(c) if c else np.zeros(0, np.int64) for c in columns
        )
        oldest = np.arange(len(ordinal))
        longest = np.argsort(-num_tokens, kind="stable")
        table = _Table(
            files, file_of, ordinal, num_tokens, gap_rows,
            orders={
                "oldest": oldest,
                "newest": oldest[::-1],
                "longest": longest,
                "shortest": longest[::-1],
                "gaps": np.argsort(-gap_rows, kind="stable"),
            },
        )  # fmt: skip
        with self._lock:
            self._table = (key, table)
        return table

    def find(self, store: ShardStore, stream: str, shard: int, ordinal: int) -> Record:
        """One record.

        Raises:
            ApiError: 404.
        """
        try:
            return store.find(f"{stream}/{shard}/{ordinal}")
        except InputError as err:
            raise not_found(f"there is no record {stream}/{shard:06d}/{ordinal}") from err

    def neighbours(self, record_id: str) -> tuple[str | None, str | None]:
        """Ids of the records before and after one, in the order in which they were stored."""
        stream, shard, ordinal = record_id.split("/")
        with self.store() as store:
            table = self._records_table(store)
            here = [i for i, f in enumerate(table.files) if f.stream == stream and f.number == int(shard)]
            at = np.flatnonzero((table.file_of == (here or [-1])[0]) & (table.ordinal == int(ordinal)))
            if not len(at):
                return None, None

            def name(row: int) -> str | None:
                if not 0 <= row < len(table.ordinal):
                    return None
                file = table.files[int(table.file_of[row])]
                return f"{file.stream}/{file.number:06d}/{int(table.ordinal[row])}"

            return name(int(at[0]) - 1), name(int(at[0]) + 1)

    def sources(self, store: ShardStore, record: Record) -> dict[str, Any]:
        """Which positions of a record another request computed, and which of its tokens that one answered.

        The first record (by start time) that uses a block computed it. A record is written after the blocks
        it uses, so only later ones are looked at, the nearest first, for at most 0.4 seconds.

        Returns:
            ``cached``: ``[{start, stop, record}]`` positions taken from another record's blocks;
            ``earlier``: ``[[start, stop]]`` of the prompt that are answers of those records;
            ``complete``: whether every record that could be the source was looked at.
        """
        with self._lock:
            known = self._sources.get(record.id)
            if known is not None and (known[1]["complete"] or time.monotonic() < known[0]):
                self._sources.move_to_end(record.id)
                return known[1]
        found = self._find_sources(store, record)
        with self._lock:
            self._sources[record.id] = (time.monotonic() + SOURCE_KEPT_S, found)
            while len(self._sources) > MAX_SOURCES_KEPT:
                self._sources.popitem(last=False)
        return found

    def _find_sources(self, store: ShardStore, record: Record) -> dict[str, Any]:
        pieces = record.meta.pieces
        blocks = {p.block for p in pieces}
        first: dict[BlockRef, tuple[float, str, RecordMeta]] = {
            b: (record.meta.started_unix_s, record.id, record.meta) for b in blocks
        }
        until = time.monotonic() + SOURCE_BUDGET_S
        complete = True
        for file, ordinal in _users(store, record.stream, blocks):
            if time.monotonic() > until:
                complete = False
                break
            try:
                meta = file.record(ordinal)
            except ShardError:
                continue
            for block in blocks.intersection(p.block for p in meta.pieces):
                if meta.started_unix_s < first[block][0]:
                    first[block] = (meta.started_unix_s, f"{file.stream}/{file.number:06d}/{ordinal}", meta)
        cached: list[dict[str, Any]] = []
        earlier = np.zeros(record.num_tokens, bool)
        for piece in pieces:
            _, source, meta = first[piece.block]
            if source == record.id:
                continue
            if cached and cached[-1]["record"] == source and cached[-1]["stop"] == piece.position:
                cached[-1]["stop"] = piece.stop
            else:
                cached.append({"start": piece.position, "stop": piece.stop, "record": source})
            common = _common_prefix(record.token_ids, meta.token_ids)
            for span in meta.spans:
                if span.kind == "response":
                    earlier[span.start : min(span.stop, common)] = True
        for span in record.spans:
            if span.kind == "response":
                earlier[span.start : span.stop] = False
        return {"cached": cached, "earlier": _ranges(earlier), "complete": complete}


def _users(store: ShardStore, stream: str, blocks: set[BlockRef]) -> Iterator[tuple[ShardFile, int]]:
    """Records of a stream that may use one of ``blocks``: those right behind each block first."""
    files = {f.number: f for f in store.files() if f.stream == stream}
    lowest: dict[int, int] = {}
    near: dict[tuple[int, int], None] = {}
    for block in sorted(blocks):
        file = files.get(block.shard)
        if file is None:
            continue
        at, records = file.index()
        if block.block >= len(at["offset"]):
            continue
        behind = int(np.searchsorted(records["offset"], at["offset"][block.block]))
        lowest[block.shard] = min(behind, lowest.get(block.shard, behind))
        near |= dict.fromkeys(
            (block.shard, i) for i in range(behind, min(behind + 32, len(records["offset"])))
        )
    for number, ordinal in near:
        yield files[number], ordinal
    for number in sorted(n for n in files if n >= min(lowest, default=0)):
        for ordinal in range(lowest.get(number, 0), files[number].totals.num_records):
            if (number, ordinal) not in near:
                yield files[number], ordinal


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A record whose frame is damaged, in listings."""

    id: str
    problem: str


def _record_row(record: Record | _Unreadable) -> dict[str, Any]:
    if isinstance(record, _Unreadable):
        return {"id": record.id, "problem": record.problem}
    meta = record.meta
    return {
        "id": record.id,
        "problem": None,
        "request_id": meta.request_id,
        "num_tokens": meta.num_tokens,
        "num_response_tokens": meta.response_tokens,
        "gap_rows": record.num_rows - meta.covered_rows + record.removed_rows,
        "finish_reason": meta.finish_reason,
        "started_unix_s": meta.started_unix_s,
        "duration_s": meta.finished_unix_s - meta.started_unix_s,
        "lora": meta.lora,
        "flags": list(meta.flags),
    }


def record_facts(record: Record) -> dict[str, Any]:
    """Everything about a record but its tokens."""
    final, problem = [], None
    try:
        final = [list(f) for f in record.final_span]
    except ShardError as err:  # a shard that the record needs is gone or damaged; the rest is still true
        problem = str(err)
    if problem is None and record.removed_rows:
        gone = sorted({p.block.shard for p in record.meta.pieces} - {p.block.shard for p in record.pieces})
        names = ", ".join(f"{record.stream}/{shard:06d}" for shard in gone)
        problem = f"{names} has been removed: {record.removed_rows:,} positions that it held are gaps now"
    return _record_row(record) | {
        "sampling": dict(record.meta.sampling),
        "spans": [{"start": s.start, "stop": s.stop, "kind": s.kind} for s in record.spans],
        "gaps": [list(g) for g in record.gaps],
        "final": final,
        "problem": problem,
        "num_pieces": len(record.meta.pieces),
        "target": record.header.target.name,
        "aux_layer_ids": list(record.header.aux_layer_ids),
        "codec": record.header.codec,
        "dtype": record.header.dtype,
    }


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _ranges(mask: np.ndarray) -> list[list[int]]:
    edges: Sequence[int] = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0])))).tolist()
    return [[a, b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
