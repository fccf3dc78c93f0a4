"""The tap's counters on vLLM's own ``/metrics``.

A collector in the API server's process reads the status files of this server's ranks at every scrape, so the
numbers are the same whichever process is asked, and right with any number of engines: one series per
data-parallel rank, under vLLM's own label ``engine``. Scraping never reaches the workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..capture.status import SERVER_ID_VARIABLE, StatusReader, StreamStatus, of_server
from ..config import TapConfig

Statuses = Callable[[], Sequence[StreamStatus]]

SHOWN_STATES = ("capturing", "paused", "off", "stale")

COUNTERS: tuple[tuple[str, str, Callable[[StreamStatus], float]], ...] = (
    (
        "specdec_tap_requests_started",
        "Generation requests that the engine scheduled.",
        lambda s: s.worker.get("requests_started", 0),
    ),
    (
        "specdec_tap_requests_sealed",
        "Requests whose hidden states are stored.",
        lambda s: s.writer.get("requests_sealed", 0),
    ),
    (
        "specdec_tap_rows_copied",
        "Token positions whose states were copied out of the engine, rejected drafts included.",
        lambda s: s.worker.get("rows", 0),
    ),
    (
        "specdec_tap_raw_bytes",
        "What one raw file per request would have taken, in bytes.",
        lambda s: s.writer.get("raw_bytes", 0),
    ),
    (
        "specdec_tap_stored_bytes",
        "Bytes of states written to shards.",
        lambda s: s.writer.get("stored_bytes", 0),
    ),
    (
        "specdec_tap_retired_bytes",
        "Bytes of old shards that were removed to keep the folder within its limits.",
        lambda s: s.writer.get("retired_bytes", 0),
    ),
    (
        "specdec_tap_records_cut",
        "Records that are left out since an old shard that held a part of them was removed.",
        lambda s: s.writer.get("records_cut", 0),
    ),
    (
        "specdec_tap_shards_sealed",
        "Shard files that were finished.",
        lambda s: s.writer.get("shards_sealed", 0),
    ),
    ("specdec_tap_engine_steps", "Engine steps that were captured.", lambda s: s.worker.get("steps", 0)),
    (
        "specdec_tap_engine_steps_handled",
        "Captured engine steps that the writer has worked through.",
        lambda s: s.writer.get("steps_handled", 0),
    ),
    (
        "specdec_tap_hook_seconds",
        "Time spent in the tap on the engine's thread, in seconds.",
        lambda s: s.worker.get("hook_ns", 0) / 1e9,
    ),
    (
        "specdec_tap_hook_errors",
        "Errors of the tap on the engine's thread; the requests of that step were dropped.",
        lambda s: s.worker.get("hook_errors", 0),
    ),
    (
        "specdec_tap_writer_restarts",
        "Writer processes that were started because one had died.",
        lambda s: s.worker.get("writer_restarts", 0),
    ),
)
"""Name (without ``_total``), help, and where the value comes from; all labelled ``engine``."""

GAUGES: tuple[tuple[str, str, Callable[[StreamStatus], float | None]], ...] = (
    ("specdec_tap_live_requests", "Requests that are being captured.", lambda s: s.num_live),
    (
        "specdec_tap_sample_rate_ratio",
        "Share of requests that is captured, 0 to 1.",
        lambda s: s.sample_rate,
    ),
    (
        "specdec_tap_ring_size_bytes",
        "Size of the shared memory between engine and writer, in bytes.",
        lambda s: s.ring_bytes,
    ),
    (
        "specdec_tap_ring_used_bytes",
        "Bytes in that memory which the writer has not handled; requests are dropped when it is full.",
        lambda s: s.ring_used_bytes,
    ),
    (
        "specdec_tap_disk_free_bytes",
        "Free bytes of the disk that the shards are on.",
        lambda s: s.disk_free_bytes,
    ),
    (
        "specdec_tap_disk_min_free_bytes",
        "Capture drops requests below this much free disk, in bytes.",
        lambda s: s.min_free_bytes,
    ),
    (
        "specdec_tap_status_timestamp_seconds",
        "When the writer last reported, as seconds since 1970.",
        lambda s: s.updated_unix_s,
    ),
)

REASONED = (
    (
        "specdec_tap_requests_dropped",
        "Requests that were lost, by reason.",
        "reason",
        lambda s: s.dropped,
    ),
    (
        "specdec_tap_requests_skipped",
        "Requests left out on purpose, by reason.",
        "reason",
        lambda s: s.skipped,
    ),
    (
        "specdec_tap_tokens",
        "Tokens of sealed requests.",
        "kind",
        lambda s: {
            "prompt": s.writer.get("tokens", 0) - s.writer.get("response_tokens", 0),
            "response": s.writer.get("response_tokens", 0),
        },
    ),
    (
        "specdec_tap_rows",
        "Token positions of sealed requests: stored for them, reused from an earlier one, or without states.",
        "source",
        lambda s: {
            "stored": s.writer.get("rows_stored", 0),
            "reused": s.writer.get("rows_reused", 0),
            "gap": s.writer.get("gap_rows", 0),
        },
    ),
)

STATE = "specdec_tap_state"
INFO = "specdec_tap_info"


class TapCollector(Collector):
    """Turns statuses into metric families at every scrape.

    Args:
        statuses: Gives the newest status of every rank of this server. Called on the scraping thread.
    """

    def __init__(self, statuses: Statuses) -> None:
        self.statuses = statuses

    def describe(self) -> Iterable[Metric]:
        """Name the families without reading anything; called when the collector is registered."""
        return families([])

    def collect(self) -> Iterator[Metric]:
        """Read the statuses once and yield every family that has a value."""
        try:
            statuses = self.statuses()
        except OSError:  # the folder is gone: the server's own metrics must still be scraped
            statuses = []
        return (family for family in families(statuses) if family.samples)


def families(statuses: Sequence[StreamStatus]) -> Iterator[Metric]:
    """Yield every metric family for these ranks."""
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["engine"])
        for s in statuses:
            counter.add_metric([str(s.dp_rank)], value(s))
        yield counter
    for name, text, label, values in REASONED:
        counter = CounterMetricFamily(name, text, labels=["engine", label])
        for s in statuses:
            for key, number in values(s).items():
                counter.add_metric([str(s.dp_rank), key], number)
        yield counter
    for name, text, amount in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["engine"])
        for s in statuses:
            if (number := amount(s)) is not None:
                gauge.add_metric([str(s.dp_rank)], number)
        yield gauge
    state = GaugeMetricFamily(
        STATE, "1 for the state that the tap of a rank is in.", labels=["engine", "state"]
    )
    info = GaugeMetricFamily(
        INFO,
        "1, with what is captured in the labels.",
        labels=["engine", "stream", "runner", "aux_layer_ids"],
    )
    for s in statuses:
        for name in SHOWN_STATES:
            state.add_metric([str(s.dp_rank), name], float(s.state == name))
        layers = ",".join(map(str, s.aux_layer_ids))
        info.add_metric([str(s.dp_rank), s.stream, str(s.engine.get("runner", "")), layers], 1)
    yield state
    yield info


class FileStatuses:
    """Statuses of this server's ranks from the files of a shards folder. Thread-safe."""

    def __init__(self, config: TapConfig) -> None:
        self._reader = StatusReader(config.dir)
        self._lock = threading.Lock()

    def __call__(self) -> list[StreamStatus]:
        with self._lock:
            return of_server(self._reader.read(), os.environ.get(SERVER_ID_VARIABLE))


_registered: TapCollector | None = None


def register(statuses: Statuses) -> None:
    """Add the tap to this process's default registry, or give the collector there a better source."""
    global _registered
    if _registered is None:
        _registered = TapCollector(statuses)
        REGISTRY.register(_registered)
    else:
        _registered.statuses = statuses


def exposition(statuses: Statuses) -> bytes:
    """Return the tap's metrics as text, for a ``/metrics`` that does not show the default registry.

    That is so with several API server processes: vLLM then merges files that each process writes, and a
    collector has no place in them.
    """
    registry = CollectorRegistry()
    registry.register(TapCollector(statuses))
    return generate_latest(registry)
