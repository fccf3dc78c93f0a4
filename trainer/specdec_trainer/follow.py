"""Training while the server still captures: live journals as a bounded stream of documents.

Every record is used once, in the order of arrival: held-out conversations go into a window of the newest
ones, all others into a backlog. When traffic is faster than training, the oldest waiting records are dropped
and counted; when it is slower, training waits. A cursor for each stream says what was used, so a resumed run
goes on behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_tap.errors import ConfigError, InputError, ShardError

from . import data
from .config import TrainConfig

POLL_S = 0.5
PARTIAL_BATCH_S = 10.0
"""How long a batch that is not full waits for more records."""

Cursors = dict[str, list[int]]
"""``[shard, ordinal]`` of the last record used, by stream."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A document in the backlog, and what is used up with it."""

    stretch: data.Stretch
    stream: str
    place: list[int]


@dataclass(slots=True)
class Feed:
    """The records of a store that grows. ``batches`` runs in one thread, everything else in any."""

    store: Any
    config: TrainConfig
    vocab_size: int
    cursors: Cursors = field(default_factory=dict)
    """Where to go on; nothing up to here is used again."""
    clock: Callable[[], float] = time.monotonic
    seen: data.Survey = field(init=False)
    """Sums over the training records seen so far; its stretches are never filled."""
    held: data.Survey = field(init=False)
    """The same of the held-out ones."""
    dropped: int = 0
    """Documents dropped because the backlog was full."""
    unreadable: int = 0
    """Records that could not be read."""
    backlog_rows: int = 0
    _backlog: deque[Waiting] = field(default_factory=deque)
    _window: deque[data.Stretch] = field(init=False)
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.seen = data.Survey(counts=np.zeros(self.vocab_size, dtype=np.int64))
        self.held = data.Survey(counts=np.zeros(self.vocab_size, dtype=np.int64))
        self._window = deque(maxlen=self.config.eval_records)

    def refresh(self) -> int:
        """Take in what was captured since the last call; returns how many records."""
        self.store.refresh()
        first, self._next = self._next, len(self.store)
        for index in range(first, self._next):
            try:
                self._admit(index)
            except (ShardError, InputError):
                self.unreadable += 1
        return self._next - first

    def _admit(self, index: int) -> None:
        record = self.store[index]
        stream, shard, ordinal = record.id.rsplit("/", 2)
        place = [int(shard), int(ordinal)]
        out = data.conversation_hash(record) < self.config.held_out
        if not out and place <= self.cursors.get(stream, [-1, -1]):
            return
        found = data.survey(
            self.store, [index], vocab_size=self.vocab_size, max_length=self.config.max_length,
            prompt_weight=0.0 if out else self.config.prompt_weight or 0.0,
        )  # fmt: skip
        with self._lock:
            (self.held if out else self.seen).add(found)
            if out:
                self._window.extend(found.stretches)
                return
            for stretch in found.stretches:
                self._backlog.append(Waiting(stretch, stream, place))
                self.backlog_rows += stretch.num_rows
            while self.backlog_rows > self.config.follow_backlog and len(self._backlog) > 1:
                self._take()
                self.dropped += 1

    def _take(self) -> Waiting:
        item = self._backlog.popleft()
        self.backlog_rows -= item.stretch.num_rows
        return item

    def window(self) -> list[data.Stretch]:
        """The newest held-out documents, oldest first."""
        with self._lock:
            return list(self._window)

    def waiting(self) -> list[data.Stretch]:
        """Documents in the backlog, oldest first."""
        with self._lock:
            return [item.stretch for item in self._backlog]

    def batches(self, stop: threading.Event, seconds: float | None) -> Iterator[list[Waiting]]:
        """Documents of one batch after the other, waited for.

        Args:
            stop: Ends the stream.
            seconds: The same after so long; None never. ``follow_idle`` seconds without a new record end it
                too, when the backlog is used up.
        """
        config, started = self.config, self.clock()
        last_record = last_batch = started
        while not (stop.is_set() or self._closed.is_set()):
            if self.refresh():
                last_record = self.clock()
            now = self.clock()
            if seconds is not None and now - started >= seconds:
                return
            quiet = config.follow_idle is not None and now - last_record >= config.follow_idle
            if self.backlog_rows >= config.batch_tokens or (
                self._backlog and (quiet or now - last_batch >= PARTIAL_BATCH_S)
            ):
                yield self._batch()
                last_batch = self.clock()
            elif quiet:
                return
            else:
                stop.wait(POLL_S)

    def _batch(self) -> list[Waiting]:
        with self._lock:
            out = [self._take()]
            room = self.config.batch_tokens - out[0].stretch.num_rows
            while self._backlog and self._backlog[0].stretch.num_rows <= room:
                out.append(self._take())
                room -= out[-1].stretch.num_rows
        return out

    def wait_for_start(self, tokens: int) -> None:
        """Wait until so many supervised tokens were captured, or traffic stops with fewer.

        Raises:
            InputError: Traffic stopped without any.
        """
        last = self.clock()
        while True:
            if self.refresh():
                last = self.clock()
            idle = self.config.follow_idle
            quiet = idle is not None and self.clock() - last >= idle
            if self.seen.supervised >= max(1, tokens) or (quiet and self.seen.supervised):
                return
            if quiet:
                raise InputError(
                    f"no supervised token was captured in {idle:g} seconds; found {self.seen.explain()}"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """End ``batches`` soon."""
        self._closed.set()

    def facts(self) -> dict[str, int]:
        """Counts for the log."""
        return {
            "backlog_rows": self.backlog_rows,
            "dropped_documents": self.dropped,
            "unreadable_records": self.unreadable,
            "followed_records": self.seen.records + self.held.records,
        }


def open_live(path: Path | str, idle: float | None) -> Any:
    """Open shards that may still be empty, and wait for the first record.

    Raises:
        InputError: There is no such folder, or no record came in ``idle`` seconds.
    """
    from specdec_tap.shards import open_shards

    store = open_shards(path, follow=True)
    started = time.monotonic()
    while not len(store):
        if idle is not None and time.monotonic() - started >= idle:
            raise InputError(
                f"no record was captured into {str(path)!r} in {idle:g} seconds; serve with the tap on "
                "and send requests, or raise --follow-idle"
            )
        time.sleep(POLL_S)
        store.refresh()
    return store


def check_processes(size: int) -> None:
    """Refuse what cannot be followed.

    Raises:
        ConfigError: More than one process: each would see other records at other times.
    """
    if size > 1:
        raise ConfigError(f"--follow trains in one process, this run has {size}; leave out --nproc")
