"""The last minutes of capture, sampled once a second, and what they say about the disk."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_tap.capture.status import StreamStatus, ratio, total

KEPT_SAMPLES = 900
RATE_WINDOW_S = 10.0
FORECAST_WINDOW_S = 600.0
MIN_FORECAST_S = 20.0

_SUMS = ("rows_copied", "num_tokens", "num_sealed", "num_started", "num_dropped", "num_skipped",
         "stored_bytes", "raw_bytes", "rows_stored", "rows_reused", "hook_s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums over the running streams at one moment."""

    unix_s: float
    streams: tuple[str, ...]
    sums: dict[str, float]
    ring_fill_fraction: float
    disk_free_bytes: int | None


class History:
    """Fifteen minutes of samples. Sums restart with a server, so rates only span equal sets of streams."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._lock = threading.Lock()

    def add(self, statuses: Sequence[StreamStatus], now_unix_s: float | None = None) -> None:
        """Take a sample of the running streams."""
        sums = total(statuses)
        free = [s.disk_free_bytes for s in statuses if s.disk_free_bytes is not None]
        sample = Sample(
            unix_s=time.time() if now_unix_s is None else now_unix_s,
            streams=tuple(s.stream for s in statuses),
            sums={name: sums[name] for name in _SUMS},
            ring_fill_fraction=max((ratio(s.ring_used_bytes, s.ring_bytes) for s in statuses), default=0.0),
            disk_free_bytes=min(free, default=None),
        )
        with self._lock:
            self._samples.append(sample)

    def rates(self, window_s: float = RATE_WINDOW_S) -> dict[str, float]:
        """Return counts per second over the last ``window_s`` seconds; zeros when there is no such past."""
        with self._lock:
            samples = list(self._samples)
        then, now = _window(samples, window_s)
        seconds = now.unix_s - then.unix_s if then is not None and now is not None else 0.0

        def per_s(name: str) -> float:
            if then is None or now is None or seconds <= 0:
                return 0.0
            return max(now.sums[name] - then.sums[name], 0.0) / seconds

        return {
            "rows_per_s": per_s("rows_copied"),
            "tokens_per_s": per_s("num_tokens"),
            "requests_per_s": per_s("num_sealed"),
            "dropped_per_s": per_s("num_dropped"),
            "stored_bytes_per_s": per_s("stored_bytes"),
            "hook_fraction": per_s("hook_s"),
            "window_s": seconds,
        }

    def forecast(self, statuses: Sequence[StreamStatus]) -> dict[str, Any]:
        """Say when the disk is full at the rate of the last ten minutes.

        Returns:
            ``full_in_s`` is None when it cannot be said; ``why`` tells why not, or what limits the folder.
        """
        free = [
            s.disk_free_bytes - (s.min_free_bytes or 0) for s in statuses if s.disk_free_bytes is not None
        ]
        limits = [s.max_bytes for s in statuses if s.max_bytes is not None]
        rates = self.rates(FORECAST_WINDOW_S)
        speed = rates["stored_bytes_per_s"]
        out: dict[str, Any] = {
            "full_in_s": None,
            "usable_bytes": max(min(free), 0) if free else None,
            "bytes_per_s": speed,
            "window_s": rates["window_s"],
            "why": None,
        }
        if not free:
            out["why"] = "no running capture says how much disk is free"
        elif limits:
            out["why"] = "the folder is kept under max_bytes: the oldest shards go first"
        elif rates["window_s"] < MIN_FORECAST_S:
            out["why"] = "watching for a little longer"
        elif speed <= 0:
            out["why"] = "nothing is being written"
        else:
            out["full_in_s"] = out["usable_bytes"] / speed
        return out

    def series(self, max_points: int = 300) -> dict[str, list[float | None]]:
        """Return per-second rates between samples for charts, newest last, at most ``max_points`` of them."""
        with self._lock:
            samples = list(self._samples)
        step = max(1, -(-len(samples) // max_points))
        kept = samples[::-step][::-1] if samples else []
        out: dict[str, list[float | None]] = {
            name: []
            for name in (
                "unix_s",
                "rows_per_s",
                "stored_bytes_per_s",
                "dropped_per_s",
                "ring_fill_fraction",
            )
        }
        for before, after in itertools.pairwise(kept):
            seconds = after.unix_s - before.unix_s
            out["unix_s"].append(round(after.unix_s, 3))
            same = before.streams == after.streams and seconds > 0
            for name, of in (
                ("rows_per_s", "rows_copied"),
                ("stored_bytes_per_s", "stored_bytes"),
                ("dropped_per_s", "num_dropped"),
            ):
                rate = max(after.sums[of] - before.sums[of], 0.0) / seconds if same else None
                out[name].append(None if rate is None else round(rate, 3))
            out["ring_fill_fraction"].append(round(after.ring_fill_fraction, 5))
        return out


def _window(samples: Sequence[Sample], window_s: float) -> tuple[Sample | None, Sample | None]:
    """Return the oldest sample of the window with the newest one's streams, and the newest."""
    if not samples:
        return None, None
    now = samples[-1]
    then = None
    for sample in reversed(samples[:-1]):
        if sample.streams != now.streams or now.unix_s - sample.unix_s > window_s + 0.5:
            break
        then = sample
    return then, now
