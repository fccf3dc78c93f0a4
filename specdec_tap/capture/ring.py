"""Shared memory between the vLLM worker (producer) and the writer process (consumer).

One anonymous file (``memfd``, so a container's small /dev/shm does not matter) holds a control page
and a byte ring. The producer never waits: :meth:`Ring.allocate` answers None when there is no room.
``head`` and ``tail`` count bytes since the start and only grow, so full and empty cannot be confused.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

CONTROL_BYTES = 4096
_MADV_POPULATE_WRITE = 23
ALIGN = 64

# Slots of the control page, one uint64 each. Head, tail and the two counter blocks have one writer each.
_HEAD, _TAIL = 0, 8
_WORKER, _WRITER = 64, 128

WORKER_COUNTERS = (
    "requests_started",  # every generation request that the engine scheduled
    "requests_announced",  # of those, the ones handed to the writer
    "skipped_sample_rate",
    "skipped_consent",
    "skipped_unsupported",  # multimodal or embedding prompts: positions are not tokens
    "skipped_paused",
    "dropped_ring_full",  # before it was announced: the writer is behind or stopped
    "dropped_hook_error",  # before it was announced
    "dropped_writer_lost",  # the writer died while it held the request, or there was none
    "announced_lost",  # those of the line above that had been announced
    "given_up",  # announced requests that the worker gave up; the writer counts them, with the reason
    "hook_errors",
    "writer_restarts",
    "steps",
    "rows",
    "hook_ns",  # time spent in the tap on the worker's thread, nanoseconds
)
WRITER_COUNTERS = (
    "requests_sealed",
    "dropped_ring_full",  # after it was announced: rows were missing
    "dropped_hook_error",
    "dropped_weights_changed",  # the engine's weights were replaced while it ran
    "dropped_misaligned",
    "dropped_non_finite",
    "dropped_io_error",
    "dropped_internal",
    "skipped_length",
    "skipped_empty",
    "tokens",  # of sealed requests: prompt + response
    "response_tokens",
    "rows_stored",
    "rows_reused",  # rows of sealed requests that point at another request's blocks
    "gap_rows",
    "raw_bytes",  # what one raw file per request would take: all rows, aux and final
    "stored_bytes",
    "steps_handled",
    "announced_seen",
    "controls_done",
    "shards_sealed",
    "retired_bytes",
    "records_cut",  # sealed, but an old shard that held a part of them was removed since
)
WRITER_OUTCOMES = tuple(
    name for name in WRITER_COUNTERS if name == "requests_sealed" or name.startswith(("dropped_", "skipped_"))
)
"""Every announced request ends in exactly one of these, unless its writer dies (``dropped_writer_lost``)."""


class Ring:
    """The control page and the ring, mapped into this process.

    Args:
        fd: The memfd. :meth:`create` makes one; the writer process gets it from the worker.
        size: Ring size in bytes, a multiple of 64.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, CONTROL_BYTES + size)
        # Not NumPy: one number at a time costs it several times as much, and this is the serving path.
        self._control = memoryview(self._map)[:CONTROL_BYTES].cast("Q")
        self._head = self._control[_HEAD]
        self.worker = Counters(self._control[_WORKER : _WORKER + len(WORKER_COUNTERS)], WORKER_COUNTERS)
        self.writer = Counters(self._control[_WRITER : _WRITER + len(WRITER_COUNTERS)], WRITER_COUNTERS)
        self.data = np.frombuffer(self._map, dtype=np.uint8, offset=CONTROL_BYTES, count=size)

    @classmethod
    def create(cls, size: int) -> Ring:
        size = -(-size // ALIGN) * ALIGN
        fd = os.memfd_create("specdec-tap-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, CONTROL_BYTES + size)
        ring = cls(fd, size)
        with contextlib.suppress(OSError):  # no page faults on the serving path; Linux 5.14 and newer
            ring._map.madvise(_MADV_POPULATE_WRITE)
        return ring

    @property
    def buffer(self) -> mmap.mmap:
        """The whole mapping, for ``torch.frombuffer(..., offset=CONTROL_BYTES)``."""
        return self._map

    def used_bytes_now(self) -> int:
        """Bytes between tail and head, as either side sees them."""
        return self._control[_HEAD] - self._control[_TAIL]

    def allocate(self, num_bytes: int) -> tuple[int, int] | None:
        """Reserve contiguous bytes at the head.

        Returns:
            ``(offset, end)``: where to write in :attr:`data`, and the head after it, which the consumer
            passes to :meth:`release`. None when there is no room; nothing changes then.
        """
        num_bytes = -(-num_bytes // ALIGN) * ALIGN
        start = self._head
        position = start % self.size
        if position + num_bytes > self.size:  # does not fit before the end: go round
            start += self.size - position
            position = 0
        if start + num_bytes - self._control[_TAIL] > self.size:
            return None
        self._head = start + num_bytes
        self._control[_HEAD] = self._head
        return position, self._head

    @property
    def head(self) -> int:
        return self._head

    def release(self, end: int) -> None:
        """Consumer: everything before ``end`` may be overwritten."""
        self._control[_TAIL] = end

    def reset(self) -> None:
        """Producer, with no consumer alive: empty the ring."""
        self._control[_TAIL] = self._head

    def close(self) -> None:
        del self._control, self.data, self.worker, self.writer
        with contextlib.suppress(BufferError):  # a tensor still maps it; the mapping goes with the last one
            self._map.close()
        os.close(self.fd)


class Counters:
    """Named uint64 counters in shared memory; one process adds, any process reads."""

    def __init__(self, cells: memoryview, names: tuple[str, ...]) -> None:
        self._cells = cells
        self._slots = {name: i for i, name in enumerate(names)}

    def add(self, name: str, amount: int = 1) -> None:
        self._cells[self._slots[name]] += amount

    def get(self, name: str) -> int:
        return self._cells[self._slots[name]]

    def snapshot(self) -> dict[str, int]:
        return {name: self._cells[i] for name, i in self._slots.items()}
