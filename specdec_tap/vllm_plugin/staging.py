"""Copies one step's rows from where the forward left them into the ring.

On a CPU the states are copied there and then. On CUDA nothing is waited for: the rows are gathered on the
engine's own stream into a device buffer (the next forward may overwrite where they were), a side stream
copies that buffer to the ring, whose pages are pinned, and an event says when; the step is published then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..capture.protocol import StepLayout
from ..capture.ring import CONTROL_BYTES, Ring
from ..errors import ConfigError
from .channel import Ticket

MAX_STAGING_BYTES = 256 << 20
"""Size of one of the two device buffers; a larger step goes through in slices."""


class StepRows(NamedTuple):
    """What one step brings, and which of it is wanted."""

    layout: StepLayout
    """Shape of the step in the ring."""
    states: Sequence[torch.Tensor]
    """One ``[>= rows, H]`` tensor per layer."""
    positions: torch.Tensor
    """int64 ``[>= rows]``."""
    input_ids: torch.Tensor
    """``[>= rows]``."""
    rows: np.ndarray | None
    """int64: which rows to take; None takes the first ``layout.num_rows``."""
    sampled: torch.Tensor
    """``[>= num_requests, num_columns]``."""
    num_sampled: torch.Tensor | np.ndarray
    """``[>= num_requests]``, on the host (NumPy) or the device."""


class Stager(Protocol):
    """Writes arrays 0 to 4 of :class:`StepLayout` into the ring."""

    def stage(self, step: StepRows, at: list[int], offset: int) -> Ticket | None:
        """Copy, or order to be copied.

        Args:
            step: What to copy.
            at: ``step.layout.offsets()``.
            offset: Where the step begins in the ring's data, in bytes.

        Returns:
            What to wait for before the step may be read; None when it is there already.
        """
        ...


def gather_states(step: StepRows, index: torch.Tensor | None, target: torch.Tensor) -> None:
    """Copy the wanted rows of every layer to ``target [num_layers, num_rows, H]``."""
    if index is None:  # one operation for all layers
        torch.stack([state[: step.layout.num_rows] for state in step.states], out=target)
        return
    for layer, state in enumerate(step.states):
        torch.index_select(state, 0, index, out=target[layer])


class CpuStager:
    """For the CPU backend: plain copies by the calling thread, through typed views of the whole ring."""

    def __init__(self, ring: Ring, dtype: torch.dtype) -> None:
        self._states = torch.frombuffer(ring.buffer, dtype=torch.uint8).view(dtype)
        self._longs, self._ints = ring.data.view(np.int64), ring.data.view(np.int32)
        self._item = dtype.itemsize

    def stage(self, step: StepRows, at: list[int], offset: int) -> None:
        num_rows, hidden = step.layout.num_rows, step.layout.hidden_size
        index = None if step.rows is None else torch.from_numpy(step.rows)
        shape, strides = (step.layout.num_layers, num_rows, hidden), (num_rows * hidden, hidden, 1)
        begin = (CONTROL_BYTES + offset) // self._item  # as_strided counts from the storage's beginning
        gather_states(step, index, self._states.as_strided(shape, strides, begin))
        take = slice(num_rows) if step.rows is None else step.rows
        begin = (offset + at[1]) // 8
        self._longs[begin : begin + num_rows] = step.positions.numpy()[take]
        begin = (offset + at[2]) // 4
        self._ints[begin : begin + num_rows] = step.input_ids.numpy()[take]
        requests, columns = step.layout.num_requests, step.layout.num_columns
        begin = (offset + at[3]) // 4
        target = self._ints[begin : begin + requests * columns].reshape(requests, columns)
        target[:] = step.sampled.numpy()[:requests]
        begin = (offset + at[4]) // 4
        self._ints[begin : begin + requests] = np.asarray(step.num_sampled)[:requests]


class Streams(Protocol):
    """The few things asked of a device's streams; the tests have one made of lists."""

    def gathered(self) -> None:
        """Let the side stream go on when everything ordered on the main stream so far is done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Order a copy on the side stream."""

    def copied(self) -> Ticket:
        """Return an event that is done when everything ordered on the side stream so far is done."""

    def hold(self, ticket: Ticket) -> None:
        """Let the main stream (not the host) wait for an event of the side stream."""


class CudaStreams:
    """The real ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()

    def gathered(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._ready)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def copied(self) -> Ticket:
        event = torch.cuda.Event()
        event.record(self._side)
        return event

    def hold(self, ticket: Ticket) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)  # type: ignore[arg-type]  # our own event


class DeviceStager:
    """For CUDA: two device buffers used in turn, so that a gather never overwrites what is still copied.

    Args:
        ring: Its pages must be pinned, or each copy would make the host wait.
        dtype: Of the states.
        step_bytes: Size of the largest step, to size the buffers.
        device: Where the states are.
        streams: :class:`CudaStreams`, or a test's.
    """

    def __init__(
        self, ring: Ring, dtype: torch.dtype, step_bytes: int, device: torch.device, streams: Streams
    ) -> None:
        self._ring = torch.frombuffer(ring.buffer, dtype=torch.uint8)[CONTROL_BYTES:]
        self._ints = ring.data.view(np.int32)
        self._dtype, self._streams = dtype, streams
        size = min(step_bytes, MAX_STAGING_BYTES)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._in_use: list[Ticket | None] = [None, None]
        self._turn = 0
        self._device = device

    def stage(self, step: StepRows, at: list[int], offset: int) -> Ticket:
        index = None
        if step.rows is not None:
            rows = torch.from_numpy(step.rows)
            if self._device.type == "cuda":
                rows = rows.pin_memory()
            index = rows.to(self._device, non_blocking=True)
        counts_on_host = isinstance(step.num_sampled, np.ndarray)
        end = at[4] if counts_on_host else at[5]
        if end <= len(self._buffers[0]):
            turn, buffer = self._begin()
            layout = step.layout
            size = layout.num_layers * layout.num_rows * layout.hidden_size * self._dtype.itemsize
            target = buffer[:size].view(self._dtype)
            gather_states(step, index, target.view(-1, layout.num_rows, layout.hidden_size))
            first = 0
        else:
            self._stage_states_in_slices(step, index, offset)
            turn, buffer = self._begin()
            first = at[1]
        self._gather_small(step, index, at, buffer, first, end)
        self._streams.gathered()
        self._streams.copy(self._ring[offset + first : offset + end], buffer[: end - first])
        if counts_on_host:  # behind what the device copies, so neither overwrites the other
            begin = (offset + at[4]) // 4
            self._ints[begin : begin + step.layout.num_requests] = step.num_sampled[
                : step.layout.num_requests
            ]
        return self._end(turn)

    def _stage_states_in_slices(self, step: StepRows, index: torch.Tensor | None, offset: int) -> None:
        """A step larger than a buffer (a long prefill): layer by layer, as many rows at a time as fit."""
        num_rows, hidden = step.layout.num_rows, step.layout.hidden_size
        row_bytes = hidden * self._dtype.itemsize
        most = len(self._buffers[0]) // row_bytes
        for layer, state in enumerate(step.states):
            for low in range(0, num_rows, most):
                high = min(low + most, num_rows)
                turn, buffer = self._begin()
                size = (high - low) * row_bytes
                target = buffer[:size].view(self._dtype).view(high - low, hidden)
                if index is None:
                    target.copy_(state[low:high])
                else:
                    torch.index_select(state, 0, index[low:high], out=target)
                self._streams.gathered()
                begin = offset + (layer * num_rows + low) * row_bytes
                self._streams.copy(self._ring[begin : begin + size], buffer[:size])
                self._end(turn)

    def _gather_small(
        self,
        step: StepRows,
        index: torch.Tensor | None,
        at: list[int],
        buffer: torch.Tensor,
        first: int,
        end: int,
    ) -> None:
        """Token ids and positions, to where they lie behind the states; ``buffer`` begins at ``first``."""
        layout = step.layout
        rows, requests = layout.num_rows, layout.num_requests
        take = slice(rows) if index is None else index

        def view(i: int, dtype: torch.dtype, size: int) -> torch.Tensor:
            begin = at[i] - first
            return buffer[begin : begin + size * dtype.itemsize].view(dtype)

        view(1, torch.int64, rows).copy_(step.positions[take])
        view(2, torch.int32, rows).copy_(step.input_ids[take])
        sampled = view(3, torch.int32, requests * layout.num_columns)
        sampled.view(requests, layout.num_columns).copy_(step.sampled[:requests])
        if end > at[4]:
            view(4, torch.int32, requests).copy_(step.num_sampled[:requests])

    def _begin(self) -> tuple[int, torch.Tensor]:
        turn, self._turn = self._turn, 1 - self._turn
        ticket = self._in_use[turn]
        if ticket is not None:
            self._streams.hold(ticket)
        return turn, self._buffers[turn]

    def _end(self, turn: int) -> Ticket:
        ticket = self._in_use[turn] = self._streams.copied()
        return ticket


def pin(ring: Ring) -> None:
    """Register the ring's pages with CUDA, so that copies to them run while the host goes on.

    Raises:
        ConfigError: CUDA refused.
    """
    address = torch.frombuffer(ring.buffer, dtype=torch.uint8).data_ptr()
    result = torch.cuda.cudart().cudaHostRegister(address, CONTROL_BYTES + ring.size, 0)
    if int(result) != 0:
        raise ConfigError(
            f"ring_bytes is {ring.size:,}, which CUDA cannot pin (cudaHostRegister: {result}); raise the "
            "limit on locked memory (ulimit -l) or lower ring_bytes"
        )


def make_stager(ring: Ring, dtype: torch.dtype, step_bytes: int, device: torch.device) -> Stager:
    """Return the stager for the device that the model runs on.

    Raises:
        ConfigError: The ring cannot be pinned, or the device is neither a CPU nor CUDA.
    """
    if device.type == "cpu":
        return CpuStager(ring, dtype)
    if device.type == "cuda":
        pin(ring)
        return DeviceStager(ring, dtype, step_bytes, device, CudaStreams(device))
    raise ConfigError(f"the model runs on {device.type!r}; the tap captures from 'cuda' and 'cpu' only")
