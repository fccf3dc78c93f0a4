"""Messages between worker and writer survive the way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec_tap.capture import protocol


@given(
    st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**31), st.integers(1, 64),
    st.lists(st.integers(0, 2**64 - 1), max_size=40),
)  # fmt: skip
def test_a_step_message_round_trips(offset, end, num_rows, columns, handles):
    starts = np.arange(len(handles) + 1, dtype=np.int32) * 3
    packed = protocol.pack_step(offset, end, num_rows, columns, np.array(handles, np.uint64), starts)
    step = protocol.unpack_step(packed)
    assert packed[0] == protocol.STEP
    assert (step.offset, step.end, step.num_rows, step.num_columns) == (offset, end, num_rows, columns)
    assert step.handles.tolist() == handles
    assert step.query_start_loc.tolist() == starts.tolist()


def test_the_largest_step_message_fits_one_datagram():
    handles = np.zeros(8192, np.uint64)
    message = protocol.pack_step(0, 0, 8192, 1, handles, np.zeros(8193, np.int32))
    assert len(message) <= protocol.MAX_MESSAGE_BYTES


@given(st.lists(st.integers(0, 2**64 - 1), max_size=100))
def test_handle_lists_round_trip(handles):
    packed = protocol.pack_handles(protocol.FINISH, handles)
    assert packed[0] == protocol.FINISH
    assert protocol.unpack_handles(packed) == handles


def test_json_messages_keep_any_text():
    payload = {"request_id": "chatcmpl-../../\U0001f600\x00\n", "n": 2**53}
    packed = protocol.pack_json(protocol.NEW, payload)
    assert packed[0] == protocol.NEW
    assert protocol.unpack_json(packed) == payload


@given(
    st.integers(1, 6), st.integers(1, 300), st.sampled_from([2, 4]), st.integers(1, 300), st.integers(1, 40),
    st.integers(1, 8),
)  # fmt: skip
def test_the_arrays_of_a_step_are_aligned_and_do_not_overlap(layers, hidden, item, rows, requests, columns):
    layout = protocol.StepLayout(layers, hidden, item, rows, requests, columns)
    offsets = layout.offsets()
    sizes = (layers * rows * hidden * item, rows * 8, rows * 4, requests * columns * 4, requests * 4)
    for start, size, following in zip(offsets, sizes, offsets[1:], strict=False):
        assert start % 64 == 0
        assert start + size <= following
