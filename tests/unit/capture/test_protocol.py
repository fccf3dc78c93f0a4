"""Messages between worker and writer survive the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec_tap.capture import protocol


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_step_message_round_trips(offset, end, rows, requests):
    step = protocol.Step(offset, end, rows, requests, 5)
    packed = protocol.pack_step(step)
    assert packed[0] == protocol.STEP
    assert protocol.unpack_step(packed) == step


@given(st.lists(st.integers(0, 2**64 - 1), max_size=100), st.sampled_from(protocol.DROP_REASONS))
def test_handle_lists_round_trip(handles, reason):
    messages = protocol.pack_handles(protocol.DROP, handles, reason)
    assert [protocol.unpack_handles(m) for m in messages] == ([(handles, reason)] if handles else [])
    assert all(m[0] == protocol.DROP for m in messages)


def test_many_handles_are_split_so_that_no_message_is_too_large():
    messages = protocol.pack_handles(protocol.FINISH, list(range(10_000)))
    assert all(len(message) <= protocol.MAX_MESSAGE_BYTES for message in messages)
    handles = [handle for message in messages for handle in protocol.unpack_handles(message)[0]]
    assert handles == list(range(10_000))


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
    sizes = (
        layers * rows * hidden * item, rows * 8, rows * 4, requests * columns * 4, requests * 4, requests * 8,
        (requests + 1) * 4,
    )  # fmt: skip
    for start, size, following in zip(offsets, sizes, offsets[1:], strict=False):
        assert start % 64 == 0
        assert start + size <= following
