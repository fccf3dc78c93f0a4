"""fp8 and int8: known error bounds, and nothing strange at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from shardkit import make_header, random_states
from test_codec import DTYPES, blocks

from specdec_tap.errors import ShardError
from specdec_tap.shards import decode_block, encode_block
from specdec_tap.shards.lossy import from_float, to_float
from specdec_tap.shards.verify import nonfinite_rows

CODECS = ["fp8", "int8"]


def through(codec, header, aux, final=None, final_row=0):
    header = header.replace(codec=codec)
    payload = encode_block(header, position=0, aux=aux, final=final, final_row=final_row)
    return decode_block(header, payload), payload


def relative_error(bits, truth, dtype):
    a, b = to_float(np.ascontiguousarray(bits), dtype), to_float(np.ascontiguousarray(truth), dtype)
    return np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("codec", "aux_bound", "final_bound"), [("fp8", 0.032, 0.011), ("int8", 0.018, 0.011)]
)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_error_per_row_is_within_the_documented_bound(codec, aux_bound, final_bound, dtype, rows):
    header = make_header(dtype=dtype, hidden_size=576)
    aux, final = random_states(header, rows)
    block, _ = through(codec, header, aux, final)
    assert np.median(relative_error(block.aux, aux, dtype)) < aux_bound
    assert np.median(relative_error(block.final, final, dtype)) < final_bound


@pytest.mark.parametrize("codec", CODECS)
def test_lossy_codecs_shrink_by_2_3(codec):
    header = make_header(hidden_size=576)
    aux, final = random_states(header, 64)
    _, payload = through(codec, header, aux, final)
    assert (aux.nbytes + final.nbytes) / len(payload) > 2.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_one_outlier_does_not_spoil_its_row(codec, dtype):
    header = make_header(dtype=dtype, hidden_size=576)
    aux, _ = random_states(header, 64)
    values = to_float(aux.copy(), dtype)
    values[1, 5, 7] = 1e4
    spoilt = from_float(values, dtype)
    block, _ = through(codec, header, spoilt)
    others = np.arange(576) != 7
    error = relative_error(block.aux[1, 5:6, others].T, spoilt[1, 5:6, others].T, dtype)
    assert error[0] < 0.04
    assert abs(to_float(block.aux.copy(), dtype)[1, 5, 7] / 1e4 - 1) < 0.07


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_zero_stays_zero_and_not_finite_stays_not_finite(codec, dtype):
    header = make_header(dtype=dtype, hidden_size=64)
    aux, final = random_states(header, 64)
    aux, final = aux.copy(), final.copy()
    aux[0, 3] = 0
    values = to_float(aux, dtype).copy()
    values[1, 4, 5], values[1, 6, 7], values[2, 8, 9] = np.inf, -np.inf, np.nan
    if dtype == "bfloat16":
        aux = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        aux = values.astype(np.float16).view(np.uint16) if dtype == "float16" else values.view(np.uint32)
    block, _ = through(codec, header, aux, final)
    out = to_float(np.ascontiguousarray(block.aux), dtype)
    assert not out[0, 3].any()
    assert out[1, 4, 5] == np.inf and out[1, 6, 7] == -np.inf and np.isnan(out[2, 8, 9])
    assert (~np.isfinite(out)).sum() == 3
    assert nonfinite_rows(np.ascontiguousarray(block.aux[1]), dtype).tolist() == [4, 6]


@settings(max_examples=150, deadline=None)
@given(blocks())
def test_any_numbers_come_out_near_and_fp8_within_a_sixteenth(case):
    header, aux, final, final_row = case
    fp8, _ = through("fp8", header, aux, final, final_row)
    int8, _ = through("int8", header, aux, final, final_row)
    assert fp8.aux.shape == int8.aux.shape == aux.shape
    truth = to_float(np.ascontiguousarray(aux), header.dtype)
    finite = np.isfinite(truth)
    for block in (fp8, int8):
        out = to_float(np.ascontiguousarray(block.aux), header.dtype)
        assert np.array_equal(np.isfinite(out), finite)
        assert not out[finite & (truth == 0)].any()
    out = np.where(finite, to_float(np.ascontiguousarray(fp8.aux), header.dtype), 0)
    truth = np.where(finite, truth, 0)
    normal = finite & (np.abs(truth) >= (6.2e-5 if header.dtype == "float16" else 1.2e-38))
    assert (np.abs(out - truth)[normal] <= np.abs(truth)[normal] * (1 / 16)).all()


@settings(max_examples=60, deadline=None)
@given(blocks())
def test_damaged_lossy_payloads_give_an_error_or_a_block(case):
    header, aux, final, final_row = case
    rng = np.random.default_rng(aux.size)
    for codec in CODECS:
        lossy = header.replace(codec=codec)
        payload = bytearray(encode_block(lossy, position=0, aux=aux, final=final, final_row=final_row))
        for at in rng.integers(0, len(payload), 3):
            payload[at] = rng.integers(0, 256)
        for damaged in (bytes(payload), bytes(payload[: rng.integers(0, len(payload))])):
            try:
                block = decode_block(lossy, damaged)
            except ShardError:
                continue
            assert block.aux.shape[2] == header.hidden_size


def test_decoding_is_exact_arithmetic():
    """Encoding what was decoded changes nothing more for fp8: the format has no drift."""
    header = make_header(hidden_size=64)
    aux, _ = random_states(header, 64)
    once, _ = through("fp8", header, aux)
    twice, _ = through("fp8", header, np.ascontiguousarray(once.aux))
    assert np.array_equal(once.aux, twice.aux)
