"""What a folder holds, from headers alone: rows for listings and sums for a summary."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

from .frames import Totals
from .reader import ShardInfo, ShardStore
from .repair import is_locked


def shard_state(info: ShardInfo) -> str:
    """``sealed``, ``live`` (its writer is running) or ``abandoned`` (``shards repair`` seals it)."""
    if info.sealed:
        return "sealed"
    return "live" if is_locked(info.path) else "abandoned"


def shard_row(info: ShardInfo) -> dict[str, Any]:
    """One shard as plain values, for ``shards ls``."""
    totals = info.totals
    return {
        "path": str(info.path),
        "stream": info.stream,
        "shard": info.shard,
        "state": shard_state(info),
        "created_unix_s": info.header.created_unix_s,
        "file_bytes": info.file_bytes,
        **{name: getattr(totals, name) for name in Totals.__slots__},
        "compression_ratio": _ratio(totals.raw_bytes, totals.stored_bytes),
    }


def summarise(store: ShardStore) -> dict[str, Any]:
    """Sums over a store, for ``shards stats``. Reads nothing but what opening read.

    ``bytes_per_token`` is what a token costs on disk, everything included; ``raw_bytes_per_token`` is what
    one uncompressed file per request would take: every aux layer and a final state for every position.
    """
    infos = store.shards
    sums: Counter[str] = Counter()
    for info in infos:
        sums.update(dataclasses.asdict(info.totals))
    header = store.header
    rows_wanted = sums["num_tokens"] - sums["num_records"]
    file_bytes = sum(i.file_bytes for i in infos)
    raw_all = header.raw_bytes(rows_wanted, rows_wanted if header.final_hidden != "none" else 0)
    created = [i.header.created_unix_s for i in infos]
    return {
        "root": str(store.root),
        "num_streams": len({i.stream for i in infos}),
        "num_shards": len(infos),
        "num_open_shards": sum(not i.sealed for i in infos),
        **{name: sums[name] for name in Totals.__slots__},
        "file_bytes": file_bytes,
        "gap_rows": max(rows_wanted - sums["record_rows"], 0),
        "compression_ratio": _ratio(sums["raw_bytes"], sums["stored_bytes"]),
        "rows_shared_fraction": 1 - sums["num_rows"] / sums["record_rows"] if sums["record_rows"] else 0.0,
        "bytes_per_token": _ratio(file_bytes, sums["num_tokens"]),
        "bytes_per_response_token": _ratio(file_bytes, sums["response_tokens"]),
        "raw_bytes_per_token": _ratio(raw_all, sums["num_tokens"]),
        "bytes_fraction": _ratio(file_bytes, raw_all),
        "oldest_unix_s": min(created, default=0.0),
        "newest_unix_s": max(created, default=0.0),
        "target": header.target.to_json(),
        "aux_layer_ids": list(header.aux_layer_ids),
        "layer_convention": header.layer_convention,
        "final_hidden": header.final_hidden,
        "final_scope": header.final_scope,
        "dtype": header.dtype,
        "codecs": sorted({i.header.codec for i in infos}),
        "engine": dict(header.engine),
        "skipped": [{"path": str(p.path), "message": p.message} for p in store.skipped],
    }


def age(created_unix_s: float, now_unix_s: float | None = None) -> str:
    """How long ago, in words short enough for a table."""
    seconds = max(0.0, (time.time() if now_unix_s is None else now_unix_s) - created_unix_s)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
