"""Copies into the ring: the CPU's, and the ones ordered on a device's streams, here made of lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_tap.capture.protocol import StepLayout
from specdec_tap.capture.ring import Ring
from specdec_tap.errors import ConfigError
from specdec_tap.vllm_plugin import staging
from specdec_tap.vllm_plugin.staging import CpuStager, DeviceStager, StepRows, make_stager

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class FakeEvent:
    def __init__(self, after: int) -> None:
        self.after, self.streams = after, None

    def query(self) -> bool:
        return self.streams.num_done >= self.after


class FakeStreams:
    """A device whose side stream does nothing until ``advance``; gathers on the main stream happen at once.

    That is the worst order a real device may choose, as long as nobody waits.
    """

    def __init__(self) -> None:
        self.ordered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0
        self.num_holds = 0

    def gathered(self) -> None:
        pass  # the main stream is always ahead here

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.ordered.append((target, source))

    def copied(self) -> FakeEvent:
        event = FakeEvent(len(self.ordered))
        event.streams = self
        return event

    def hold(self, event: FakeEvent) -> None:
        """The main stream may go on only once the side stream has come so far."""
        self.num_holds += 1
        self.advance(event.after - self.num_done)

    def advance(self, count: int) -> None:
        for target, source in self.ordered[self.num_done : self.num_done + max(count, 0)]:
            target.copy_(source)
            self.num_done += 1


def make_rows(
    rng, *, rows, hidden, requests, columns, dtype, subset, counts_on_host, layers=4, padding=3
) -> StepRows:
    total = rows + padding
    index = None
    if subset:
        index = np.sort(rng.choice(rows, size=max(1, rows // 2), replace=False))
    counts = np.array(rng.integers(0, columns + 1, requests), np.int32)
    return StepRows(
        StepLayout(layers, hidden, dtype.itemsize, rows if index is None else len(index), requests, columns),
        [
            torch.from_numpy(rng.standard_normal((total, hidden)).astype(np.float32)).to(dtype)
            for _ in range(layers)
        ],
        torch.from_numpy(rng.integers(0, 1 << 40, total)),
        torch.from_numpy(rng.integers(0, 1 << 30, total)),
        index,
        torch.from_numpy(rng.integers(-1, 1 << 30, (requests + 2, columns))),
        counts if counts_on_host else torch.from_numpy(np.concatenate([counts, counts])),
    )


def check(ring: Ring, offset: int, step: StepRows, dtype: torch.dtype) -> None:
    """Assert that the ring holds what the step brought."""
    at, layout = step.layout.offsets(), step.layout
    take = slice(layout.num_rows) if step.rows is None else step.rows
    data = torch.from_numpy(ring.data)

    def array(i: int, kind: torch.dtype, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape)) * kind.itemsize
        return data[offset + at[i] : offset + at[i] + size].view(kind).view(shape)

    states = array(0, dtype, layout.num_layers, layout.num_rows, layout.hidden_size)
    for layer, state in enumerate(step.states):
        assert torch.equal(states[layer], state[take])
    assert torch.equal(array(1, torch.int64, layout.num_rows), step.positions[take])
    assert torch.equal(array(2, torch.int32, layout.num_rows), step.input_ids[take].int())
    sampled = array(3, torch.int32, layout.num_requests, layout.num_columns)
    assert torch.equal(sampled, step.sampled[: layout.num_requests].int())
    counts = torch.as_tensor(step.num_sampled)[: layout.num_requests]
    assert torch.equal(array(4, torch.int32, layout.num_requests), counts)


STEPS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 60), "hidden": st.integers(1, 33), "requests": st.integers(1, 9),
        "columns": st.integers(1, 4), "subset": st.booleans(), "counts_on_host": st.booleans(),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(step=STEPS, dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 99))
def test_the_cpu_copies_every_array_to_its_place(step, dtype, seed):
    ring = Ring.create(1 << 16)
    rows = make_rows(np.random.default_rng(seed), dtype=DTYPES[dtype], **step)
    assert CpuStager(ring, DTYPES[dtype]).stage(rows, rows.layout.offsets(), 128) is None
    check(ring, 128, rows, DTYPES[dtype])


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=6), buffer_bytes=st.integers(2000, 20_000),
    advances=st.lists(st.integers(0, 3), min_size=6, max_size=6), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_step_is_whole_when_its_event_is_done_whatever_the_device_delays(
    steps, buffer_bytes, advances, seed
):
    """Every gather happens as early as possible and every copy as late as possible."""
    dtype, rng = torch.bfloat16, np.random.default_rng(seed)
    ring, streams = Ring.create(1 << 18), FakeStreams()
    stager = DeviceStager(ring, dtype, buffer_bytes, torch.device("cpu"), streams)
    waiting = []
    offset = 0
    for step, advance in zip(steps, advances, strict=False):
        rows = make_rows(rng, dtype=dtype, **step)
        at = rows.layout.offsets()
        ticket = stager.stage(rows, at, offset)
        waiting.append((ticket, offset, rows._replace(states=[s.clone() for s in rows.states])))
        offset += at[-1]
        for state in rows.states:  # the next forward overwrites what this one left
            state.fill_(float("nan"))
        streams.advance(advance)
        for event, begin, held in waiting:
            if event.query():
                check(ring, begin, held, dtype)
    streams.advance(len(streams.ordered))
    for event, begin, held in waiting:
        assert event.query()
        check(ring, begin, held, dtype)


def test_a_step_is_not_done_before_its_copy():
    ring, streams = Ring.create(1 << 16), FakeStreams()
    stager = DeviceStager(ring, torch.bfloat16, 1 << 14, torch.device("cpu"), streams)
    step = make_rows(
        np.random.default_rng(0), rows=8, hidden=4, requests=2, columns=1, dtype=torch.bfloat16, subset=False,
        counts_on_host=True,
    )  # fmt: skip
    ticket = stager.stage(step, step.layout.offsets(), 0)
    assert not ticket.query()
    assert len(streams.ordered) == 1  # one copy a step
    streams.advance(1)
    assert ticket.query()


def test_two_steps_may_be_under_way_before_anything_is_held():
    ring, streams = Ring.create(1 << 16), FakeStreams()
    stager = DeviceStager(ring, torch.bfloat16, 1 << 14, torch.device("cpu"), streams)
    step = make_rows(
        np.random.default_rng(0), rows=8, hidden=4, requests=2, columns=1, dtype=torch.bfloat16, subset=True,
        counts_on_host=False,
    )  # fmt: skip
    for number, holds in enumerate([0, 0, 1, 2]):
        stager.stage(step, step.layout.offsets(), 4096 * number)
        assert streams.num_holds == holds


def test_device_memory_is_bounded_however_large_the_step():
    stager = DeviceStager(Ring.create(1 << 16), torch.bfloat16, 1 << 40, torch.device("meta"), FakeStreams())
    assert [len(buffer) for buffer in stager._buffers] == [staging.MAX_STAGING_BYTES] * 2


def test_other_devices_are_refused():
    with pytest.raises(
        ConfigError, match="the model runs on 'xpu'; the tap captures from 'cuda' and 'cpu' only"
    ):
        make_stager(Ring.create(64), torch.bfloat16, 64, torch.device("xpu"))


@pytest.mark.gpu
def test_rows_cross_from_a_real_device(seed=0):
    """The real streams, events and pinned pages."""
    device, dtype, rng = torch.device("cuda"), torch.bfloat16, np.random.default_rng(seed)
    ring = Ring.create(1 << 20)
    stager = make_stager(ring, dtype, 1 << 14, device)
    offset = 0
    for subset in (False, True, False):
        step = make_rows(
            rng, rows=60, hidden=33, requests=9, columns=4, dtype=dtype, subset=subset, counts_on_host=False
        )
        here = StepRows(
            step.layout, [s.to(device) for s in step.states], step.positions.to(device),
            step.input_ids.to(device), step.rows, step.sampled.to(device), step.num_sampled.to(device),
        )  # fmt: skip
        ticket = stager.stage(here, step.layout.offsets(), offset)
        torch.cuda.synchronize()
        assert ticket.query()
        check(ring, offset, step, dtype)
        offset += step.layout.offsets()[-1]
