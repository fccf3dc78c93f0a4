"""Real shard folders, status files and run folders, made in a temporary directory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from specdec_tap.capture.ring import WORKER_COUNTERS, WRITER_COUNTERS


def status_json(
    stream: str,
    *,
    worker: dict | None = None,
    writer: dict | None = None,
    dp_rank: int = 0,
    age_s: float = 0.0,
    **more: object,
) -> dict:
    """A status as the writer process writes it, with counters that were not given at 0."""
    now = time.time()
    return {
        "stream": stream,
        "pid": 4242,
        "closed": False,
        "started_unix_s": now - 100,
        "updated_unix_s": now - age_s,
        "worker": dict.fromkeys(WORKER_COUNTERS, 0) | (worker or {}),
        "writer": dict.fromkeys(WRITER_COUNTERS, 0) | (writer or {}),
        "live_requests": 0,
        "ring_bytes": 1 << 26,
        "ring_used_bytes": 0,
        "disk_free_bytes": 50 * 10**9,
        "last_error": None,
        "engine": {"vllm": "0.32.0+cpu", "runner": "v1", "dp_rank": dp_rank},
        "aux_layer_ids": [2, 4, 5],
        **more,
    }


@pytest.fixture
def put_status(tmp_path):
    """Write the status file of a stream into a shards folder."""

    def put(stream: str, root: Path | None = None, **values: object) -> dict:
        data = status_json(stream, **values)
        folder = (root or tmp_path / "shards") / stream
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / ".status.tmp"
        temporary.write_text(json.dumps(data))
        temporary.replace(folder / ".status.json")
        return data

    return put
