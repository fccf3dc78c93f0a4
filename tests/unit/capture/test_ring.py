"""The ring between worker and writer: nothing is lost, overwritten or waited for."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_tap.capture import writer_process
from specdec_tap.capture.ring import CONTROL_BYTES, WORKER_COUNTERS, WRITER_COUNTERS, WRITER_OUTCOMES, Ring


@pytest.fixture
def ring():
    ring = Ring.create(1024)
    yield ring
    ring.close()


def test_allocations_are_aligned_contiguous_and_stop_at_the_tail(ring):
    assert ring.allocate(100) == (0, 128)
    assert ring.allocate(1) == (128, 192)
    assert ring.allocate(1024 - 192 + 1) is None
    assert ring.allocate(1024 - 192) == (192, 1024)
    assert ring.allocate(1) is None
    assert ring.used_bytes_now() == 1024


def test_what_does_not_fit_before_the_end_goes_round(ring):
    ring.allocate(704)
    ring.allocate(64)
    ring.release(704)
    offset, end = ring.allocate(320)  # 256 bytes are left before the end
    assert offset == 0
    assert end == 1024 + 320
    assert ring.allocate(64) == (320, 1024 + 384)


def test_a_refused_allocation_changes_nothing(ring):
    ring.allocate(960)
    assert ring.allocate(128) is None
    assert ring.head == 960
    assert ring.allocate(64) == (960, 1024)


def test_more_than_the_whole_ring_never_fits(ring):
    assert ring.allocate(1025) is None
    assert ring.allocate(1024) == (0, 1024)


def test_reset_empties_the_ring_of_a_dead_writer(ring):
    ring.allocate(1024)
    ring.reset()
    assert ring.used_bytes_now() == 0
    assert ring.allocate(1024) == (0, 2048)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 3)), min_size=1, max_size=200))
def test_bytes_survive_until_they_are_released(events):
    """A producer writes, a consumer reads some messages late: every message arrives as it was written."""
    ring = Ring.create(2048)
    waiting = []
    for number, (size, consume) in enumerate(events):
        room = ring.allocate(size)
        if room is not None:
            ring.data[room[0] : room[0] + size] = number % 251
            waiting.append((*room, size, number % 251))
        for _ in range(consume):
            if waiting:
                offset, end, length, value = waiting.pop(0)
                assert (ring.data[offset : offset + length] == value).all()
                ring.release(end)
        assert 0 <= ring.used_bytes_now() <= 2048
        if not waiting:
            ring.reset()
    ring.close()


CHILD = """
import sys, time
from specdec_tap.capture import writer_process
from specdec_tap.capture.ring import Ring
ring = Ring(int(sys.argv[1]), 4096)
for line in sys.stdin:  # offset, size, end
    offset, size, end = map(int, line.split())
    total = int(ring.data[offset:offset + size].sum())
    ring.release(end)
    ring.writer.add("requests_sealed")
    print(total, flush=True)
"""


def test_two_processes_share_one_ring():
    """The worker writes, a child process reads and releases; both see the other's counters."""
    ring = Ring.create(4096)
    command = [sys.executable, "-c", CHILD, str(ring.fd)]
    with subprocess.Popen(
        command, pass_fds=(ring.fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        for number in range(300):
            size = 1 + number * 37 % 1500
            offset, end = ring.allocate(size)
            ring.data[offset : offset + size] = number % 256
            child.stdin.write(f"{offset} {size} {end}\n")
            child.stdin.flush()
            assert int(child.stdout.readline()) == size * (number % 256)
        child.stdin.close()
        assert child.wait(timeout=30) == 0
    assert ring.writer.get("requests_sealed") == 300
    assert ring.used_bytes_now() == 0
    ring.close()


def test_the_ring_needs_no_dev_shm_and_has_no_name(ring):
    assert str(Path(f"/proc/self/fd/{ring.fd}").readlink()).startswith("/memfd:")
    assert os.fstat(ring.fd).st_size == CONTROL_BYTES + 1024
    assert isinstance(ring.buffer, mmap.mmap)


def test_the_control_page_holds_every_counter_and_outcomes_are_counters(ring):
    assert 64 + len(WORKER_COUNTERS) <= 128
    assert 128 + len(WRITER_COUNTERS) <= CONTROL_BYTES // 8
    assert set(WRITER_OUTCOMES) < set(WRITER_COUNTERS)
    ring.worker.add("rows", 2**40)
    ring.worker.add("rows", 3)
    assert ring.worker.snapshot()["rows"] == 2**40 + 3
    assert ring.writer.snapshot() == dict.fromkeys(WRITER_COUNTERS, 0)
    with pytest.raises(KeyError):
        ring.worker.add("unheard_of")


def test_closing_while_an_array_still_looks_at_the_ring_is_safe():
    ring = Ring.create(64)
    view = ring.data[:8]
    ring.close()
    view[:] = 7
    assert np.array_equal(view, np.full(8, 7, np.uint8))


def test_the_writer_naps_between_messages_until_the_ring_fills(monkeypatch):
    ring = Ring.create(1 << 16)
    now, naps = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        naps.append(seconds)
        if filling:
            ring.allocate(ring.size // 16)

    monkeypatch.setattr(writer_process.time, "monotonic", lambda: now)
    monkeypatch.setattr(writer_process.time, "sleep", sleep)
    filling = False
    writer_process.nap(ring)
    assert writer_process.NAP_S <= sum(naps) < writer_process.NAP_S + 2 * writer_process.NAP_SLICE_S
    filling = True
    naps.clear()
    writer_process.nap(ring)
    assert len(naps) == 2
    writer_process.nap(ring)
    assert len(naps) == 2
    ring.close()
