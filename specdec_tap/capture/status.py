"""What a capture is doing, read from the ``.status.json`` that each stream's writer replaces every second.

Reading these files costs the serving engine nothing, so the dashboard, ``/metrics`` and the status route all
read them instead of asking the workers. Pure Python.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError

STATUS_NAME = ".status.json"
STALE_AFTER_S = 10.0
"""A writer that has not written its status for this long is stuck or dead."""
GONE_AFTER_S = 600.0
"""After this long its server is taken to have died, and the stream is no longer shown as running."""
MAX_STATUS_BYTES = 1 << 20
SERVER_ID_VARIABLE = "_SPECDEC_TAP_SERVER_ID"
"""Environment variable that one ``vllm serve`` passes to all its processes; not a setting."""

STATES = ("capturing", "paused", "off", "stale", "closed")


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream (one capturing rank of one server run) as its writer last described it.

    All counts are sums since the server's start, a restarted writer's included.
    """

    stream: str
    state: str
    """``capturing``, ``paused``, ``off`` (the tap gave up), ``stale`` (no news from the writer for 10
    seconds) or ``closed`` (the server ended and the stream is sealed)."""
    reason: str | None
    """Why the state is not ``capturing``; None when it is."""
    dp_rank: int
    server_id: str | None
    """Same for all streams of one ``vllm serve``; None when unknown."""
    worker: Mapping[str, int]
    writer: Mapping[str, int]
    num_live: int
    ring_bytes: int
    ring_used_bytes: int
    disk_free_bytes: int | None
    min_free_bytes: int | None
    """Capture stops at this much free disk; None when the writer does not say."""
    max_bytes: int | None
    """The folder is kept below this size; None: no limit, or the writer does not say."""
    sample_rate: float | None
    last_error: str | None
    aux_layer_ids: tuple[int, ...]
    engine: Mapping[str, str | int] = field(repr=False)
    started_unix_s: float
    updated_unix_s: float

    @property
    def dropped(self) -> dict[str, int]:
        """Requests that were lost, by reason."""
        return self._by_reason("dropped_", skip=("dropped_announced",))

    @property
    def skipped(self) -> dict[str, int]:
        """Requests left out on purpose, by reason."""
        return self._by_reason("skipped_")

    @property
    def num_sealed(self) -> int:
        """Requests whose record is stored."""
        return self.writer.get("requests_sealed", 0)

    @property
    def lag_steps(self) -> int:
        """Engine steps that the worker has published and the writer has not handled."""
        return max(self.worker.get("steps", 0) - self.writer.get("steps_handled", 0), 0)

    def _by_reason(self, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, int]:
        sums: dict[str, int] = {}
        for counters in (self.worker, self.writer):  # a reason can be counted on either side
            for name, count in counters.items():
                if name.startswith(prefix) and name not in skip:
                    reason = name.removeprefix(prefix)
                    sums[reason] = sums.get(reason, 0) + count
        return sums

    def to_json(self, now_unix_s: float | None = None) -> dict[str, Any]:
        """Return what the status route and the dashboard show of a rank; ``docs/server-api.md`` explains."""
        now = time.time() if now_unix_s is None else now_unix_s
        return {
            "stream": self.stream,
            "state": self.state,
            "reason": self.reason,
            "dp_rank": self.dp_rank,
            "runner": self.engine.get("runner"),
            "aux_layer_ids": list(self.aux_layer_ids),
            "started_unix_s": self.started_unix_s,
            "updated_unix_s": self.updated_unix_s,
            "age_s": max(now - self.updated_unix_s, 0.0),
            "sample_rate": self.sample_rate,
            **counts(self),
            "ring_bytes": self.ring_bytes,
            "ring_used_bytes": self.ring_used_bytes,
            "ring_fill_fraction": ratio(self.ring_used_bytes, self.ring_bytes),
            "disk_free_bytes": self.disk_free_bytes,
            "min_free_bytes": self.min_free_bytes,
            "max_bytes": self.max_bytes,
            "last_error": self.last_error,
        }


def counts(status: StreamStatus) -> dict[str, Any]:
    """Return a stream's counters under their public names, with the ratios made of them."""
    worker, writer = status.worker, status.writer
    out: dict[str, Any] = {
        "num_started": worker.get("requests_started", 0),
        "num_live": status.num_live,
        "num_sealed": status.num_sealed,
        "num_dropped": sum(status.dropped.values()),
        "dropped": status.dropped,
        "num_skipped": sum(status.skipped.values()),
        "skipped": status.skipped,
        "num_tokens": writer.get("tokens", 0),
        "num_response_tokens": writer.get("response_tokens", 0),
        "num_steps": worker.get("steps", 0),
        "num_lag_steps": status.lag_steps,
        "num_hook_errors": worker.get("hook_errors", 0),
        "num_writer_restarts": worker.get("writer_restarts", 0),
        "num_shards_sealed": writer.get("shards_sealed", 0),
        "rows_copied": worker.get("rows", 0),
        "rows_stored": writer.get("rows_stored", 0),
        "rows_reused": writer.get("rows_reused", 0),
        "rows_gap": writer.get("gap_rows", 0),
        "raw_bytes": writer.get("raw_bytes", 0),
        "stored_bytes": writer.get("stored_bytes", 0),
        "retired_bytes": writer.get("retired_bytes", 0),
        "num_records_cut": writer.get("records_cut", 0),
        "hook_s": worker.get("hook_ns", 0) / 1e9,
    }
    return out | derived(out)


def derived(sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios that are made of summed counts, each divided once."""
    return {
        "dedupe_fraction": ratio(sums["rows_reused"], sums["rows_stored"] + sums["rows_reused"]),
        "stored_fraction": ratio(sums["stored_bytes"], sums["raw_bytes"]),
        "bytes_per_token": ratio(sums["stored_bytes"], sums["num_tokens"]),
    }


def total(statuses: Iterable[StreamStatus]) -> dict[str, Any]:
    """Return the sums over streams, under the names of :func:`counts`; empty gives zeros."""
    sums = counts(_NOTHING)
    for status in statuses:
        for name, value in counts(status).items():
            if isinstance(value, dict):
                sums[name] = {k: sums[name].get(k, 0) + v for k, v in value.items()} | {
                    k: v for k, v in sums[name].items() if k not in value
                }
            else:
                sums[name] += value
    return sums | derived(sums)


def ratio(a: float, b: float) -> float:
    """Return a / b; 0 where b is 0."""
    return a / b if b else 0.0


def parse_status(data: Any, *, stream: str, now_unix_s: float | None = None) -> StreamStatus:
    """Turn a status file's JSON into a :class:`StreamStatus`.

    Args:
        data: The parsed JSON; fields that an older writer lacks are taken as unknown.
        stream: Name of the folder that the file is in.
        now_unix_s: The time to judge its age by; now by default.

    Raises:
        InputError: A field has the wrong type.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    try:
        updated = float(data["updated_unix_s"])
        worker, writer = _counters(data["worker"]), _counters(data["writer"])
        engine = dict(data["engine"])
        error = data["last_error"]
        state, reason = "capturing", None
        if data["closed"]:
            state, reason = "closed", "the server ended and the stream is sealed"
        elif now - updated > STALE_AFTER_S:
            state = "stale"
            reason = f"no news from the writer process {int(data['pid'])} for {now - updated:,.0f} s"
        elif data.get("active") is False:
            state, reason = "off", f"the tap failed {worker.get('hook_errors', 0):,} times and gave up"
        elif data.get("paused"):
            state, reason = "paused", "paused over /specdec_tap/pause"
        return StreamStatus(
            stream=stream,
            state=state,
            reason=reason,
            dp_rank=int(engine.get("dp_rank", 0)),
            server_id=_optional(str, data.get("server_id")),
            worker=worker,
            writer=writer,
            num_live=int(data["live_requests"]),
            ring_bytes=int(data["ring_bytes"]),
            ring_used_bytes=int(data["ring_used_bytes"]),
            disk_free_bytes=_optional(int, data["disk_free_bytes"]),
            min_free_bytes=_optional(int, data.get("min_free_bytes")),
            max_bytes=_optional(int, data.get("max_bytes")),
            sample_rate=_optional(float, data.get("sample_rate")),
            last_error=None if error is None else str(error)[:2000],
            aux_layer_ids=tuple(int(i) for i in data["aux_layer_ids"]),
            engine=engine,
            started_unix_s=float(data["started_unix_s"]),
            updated_unix_s=updated,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise InputError(f"status of stream {stream} lacks or mangles {err}") from err


def _counters(data: Any) -> dict[str, int]:
    return {str(name): int(value) for name, value in data.items()}


def _optional(kind: Any, value: Any) -> Any:
    return None if value is None else kind(value)


_NOTHING = StreamStatus(
    stream="", state="closed", reason=None, dp_rank=0, server_id=None, worker={}, writer={}, num_live=0,
    ring_bytes=0, ring_used_bytes=0, disk_free_bytes=None, min_free_bytes=None, max_bytes=None,
    sample_rate=None, last_error=None, aux_layer_ids=(), engine={}, started_unix_s=0.0, updated_unix_s=0.0,
)  # fmt: skip


@dataclass(slots=True)
class _Cached:
    stamp: tuple[int, int, int]
    data: Any


class StatusReader:
    """Reads the status of every stream in a folder; an unchanged file is not parsed again.

    Not thread-safe; one reader per thread or behind a lock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cache: dict[str, _Cached] = {}
        self.problems: dict[str, str] = {}
        """Stream to why its status could not be read."""

    def read(self, now_unix_s: float | None = None) -> list[StreamStatus]:
        """Return all streams, sorted by name; a folder that does not exist has none."""
        found: dict[str, _Cached] = {}
        statuses = []
        self.problems = {}
        try:
            entries = sorted(e.name for e in os.scandir(self.root) if e.is_dir(follow_symlinks=False))
        except OSError:
            entries = []
        for name in entries:
            try:
                cached = self._load(name)
                if cached is None:
                    continue
                found[name] = cached
                statuses.append(parse_status(cached.data, stream=name, now_unix_s=now_unix_s))
            except (InputError, OSError, ValueError, RecursionError) as err:
                self.problems[name] = str(err)
        self._cache = found
        return statuses

    def _load(self, stream: str) -> _Cached | None:
        path = self.root / stream / STATUS_NAME
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            stat = os.fstat(fd)
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = self._cache.get(stream)
            if known is not None and known.stamp == stamp:
                return known
            if stat.st_size > MAX_STATUS_BYTES:
                raise InputError(f"{path} has {stat.st_size:,} bytes; expected a few thousand")
            return _Cached(stamp, json.loads(os.read(fd, MAX_STATUS_BYTES)))
        finally:
            os.close(fd)


def of_server(statuses: Iterable[StreamStatus], server_id: str | None) -> list[StreamStatus]:
    """Return the newest stream of each rank of one server.

    A restarted writer opens a new stream, whose counters go on from the old one's; so only the newest counts.

    Args:
        statuses: Every stream of the folder.
        server_id: The server; None takes streams that no server is known for and that are not closed.
    """
    newest: dict[int, StreamStatus] = {}
    for status in statuses:
        if status.server_id != server_id or (server_id is None and status.state == "closed"):
            continue
        known = newest.get(status.dp_rank)
        if known is None or status.started_unix_s > known.started_unix_s:
            newest[status.dp_rank] = status
    return [newest[rank] for rank in sorted(newest)]


def current(statuses: Iterable[StreamStatus], now_unix_s: float | None = None) -> list[StreamStatus]:
    """Return the streams that a dashboard shows as running: newest per server and rank, none that ended."""
    now = time.time() if now_unix_s is None else now_unix_s
    groups: dict[str | None, list[StreamStatus]] = {}
    for status in statuses:
        if now - status.updated_unix_s > GONE_AFTER_S:
            continue
        groups.setdefault(status.server_id, []).append(status)
    running = []
    for server_id, group in groups.items():
        if server_id is None:  # an older tap: nothing tells a restarted writer from a second server
            running += [s for s in group if s.state not in ("closed", "stale")]
        else:
            running += [s for s in of_server(group, server_id) if s.state != "closed"]
    return sorted(running, key=lambda s: s.stream)
