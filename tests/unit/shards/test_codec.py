"""Block payloads: every bit survives, whatever the shape, the strides and the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardkit import make_header, random_states

from specdec_tap.errors import ConfigError, CorruptShardError, ShardError
from specdec_tap.shards import decode_block, encode_block
from specdec_tap.shards.sections import TILE_NUMBERS

DTYPES = ["bfloat16", "float16", "float32"]


def round_trip(header, aux, final=None, final_row=0, position=0):
    payload = encode_block(header, position=position, aux=aux, final=final, final_row=final_row)
    block = decode_block(header, payload)
    assert block.aux.dtype == header.bits_dtype and np.array_equal(block.aux, aux)
    if final is None or len(final) == 0:
        assert block.final is None
    else:
        assert np.array_equal(block.final, final) and block.final_row == final_row
    assert (block.position, block.num_rows) == (position, aux.shape[1])
    return payload


@st.composite
def blocks(draw):
    """(header, aux, final, final_row) of any shape, with the kinds of numbers that break codecs."""
    dtype = draw(st.sampled_from(DTYPES))
    num_aux = draw(st.integers(0, 4))
    hidden = draw(st.sampled_from([1, 3, 8, 16, 33, 64]))
    rows = draw(st.integers(1, 70))
    header = make_header(
        dtype=dtype, hidden_size=hidden, aux_layer_ids=tuple(range(num_aux)), block_tokens=70
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["states", "any bits", "zeros", "constant channels", "specials"]))
    bits = header.bits_dtype
    shape = (num_aux + 1, rows, hidden)
    if kind == "states":
        aux, final = random_states(header, rows, int(rng.integers(1 << 30)))
        states = np.concatenate([aux, final[None]])
    elif kind == "any bits":
        states = rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
    elif kind == "zeros":
        states = np.zeros(shape, bits)
    elif kind == "constant channels":
        states = np.broadcast_to(
            rng.integers(0, np.iinfo(bits).max, (num_aux + 1, 1, hidden), bits), shape
        ).copy()
    else:
        aux, final = random_states(header, rows, 1)
        states = np.concatenate([aux, final[None]])
        specials = [0, 1, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7C00, 0xFC00, 0x7FFF, 0xFFFF, 0x0080, 0x7F7F]
        specials = np.array(specials, np.uint32).astype(bits)
        if dtype == "float32":
            specials = specials << 16 | 1
        at = rng.random(shape) < 0.2
        states[at] = rng.choice(specials, int(at.sum()))
    final_rows = draw(st.integers(0, rows))
    final_row = draw(st.integers(0, rows - final_rows)) if final_rows else 0
    final = states[-1, final_row : final_row + final_rows] if final_rows else None
    return header, states[:-1], final, final_row


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_any_block_survives(case):
    header, aux, final, final_row = case
    round_trip(header, aux, final, final_row)


@settings(max_examples=60, deadline=None)
@given(blocks(), st.data())
def test_damaged_payloads_never_give_anything_but_an_error_or_a_block(case, data):
    """Checksums stop damage before the decoder; it must still hold by itself."""
    header, aux, final, final_row = case
    payload = bytearray(encode_block(header, position=0, aux=aux, final=final, final_row=final_row))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut]), bytes(payload) + b"x"):
        try:
            block = decode_block(header, damaged)
        except ShardError:
            continue
        assert block.aux.shape[0] == header.num_aux and block.aux.shape[2] == header.hidden_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 64])
def test_tiles_of_a_wide_model_join_without_seams(dtype, rows):
    header = make_header(dtype=dtype, hidden_size=4104, aux_layer_ids=(1, 2, 3))
    aux, final = random_states(header, rows)
    assert rows == 5 or aux.size > 2 * TILE_NUMBERS
    aux = aux.copy()
    aux[:, :, ::97] = 0
    round_trip(header, aux, final[2:], 2)


def test_strides_do_not_matter():
    header = make_header(hidden_size=64)
    aux, final = random_states(header, 64)
    plain = round_trip(header, aux, final[3:9], 3)
    row_major = np.ascontiguousarray(aux.transpose(1, 0, 2)).transpose(1, 0, 2)
    wide = np.zeros((3, 128, 64), np.uint16)
    wide[:, ::2] = aux
    assert round_trip(header, row_major, final[3:9], 3) == plain
    assert round_trip(header, wide[:, ::2], final[3:9], 3) == plain


def test_threads_do_not_share_buffers():
    from concurrent.futures import ThreadPoolExecutor

    header = make_header(hidden_size=256)
    states = [random_states(header, 64, seed) for seed in range(8)]

    def many(seed):
        for _ in range(20):
            round_trip(header, states[seed][0], states[seed][1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))


def test_states_with_real_statistics_shrink_by_a_third():
    """Gaussian channels of different sizes: a floor on the ratio that does not need a model."""
    header = make_header(hidden_size=576)
    aux, final = random_states(header, 64)
    payload = encode_block(header, position=0, aux=aux, final=final)
    assert (aux.nbytes + final.nbytes) / len(payload) > 1.47


@pytest.mark.parametrize(
    ("aux_shape", "final_shape", "final_row", "match"),
    [
        ((2, 4, 16), None, 0, "aux is uint16"),
        ((3, 4, 8), None, 0, "aux is uint16"),
        ((3, 65, 16), None, 0, "65 rows"),
        ((3, 4, 16), (2, 8), 0, "final is uint16"),
        ((3, 4, 16), (2, 16), 3, "final states from row 3"),
    ],
)
def test_wrong_shapes_are_refused(aux_shape, final_shape, final_row, match):
    final = None if final_shape is None else np.zeros(final_shape, np.uint16)
    with pytest.raises(ConfigError, match=match):
        encode_block(
            make_header(), position=0, aux=np.zeros(aux_shape, np.uint16), final=final, final_row=final_row
        )


def test_a_block_of_another_model_is_refused():
    aux, _ = random_states(make_header(), 4)
    payload = encode_block(make_header(), position=0, aux=aux)
    with pytest.raises(CorruptShardError, match="the shard's header says"):
        decode_block(make_header(dtype="float16"), payload)
