"""The compiled codec: what it writes, it and NumPy read alike; what is damaged, neither."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardkit import make_header, random_states

from specdec_tap.errors import CorruptShardError
from specdec_tap.shards import ShardHeader, decode_block, encode_block, huffman
from specdec_tap.shards.codec import BLOCK_HEAD
from specdec_tap.shards.sections import COMPACT, HUFFMAN, SECTION

COMPILED = huffman.native
needs_compiled = pytest.mark.skipif(COMPILED is None, reason="installed without a C compiler")


@pytest.fixture(params=["compiled", "numpy"])
def form(request, monkeypatch):
    """Run a test once with the compiled codec and once without."""
    if request.param == "compiled" and COMPILED is None:
        pytest.skip("installed without a C compiler")
    monkeypatch.setattr(huffman, "native", COMPILED if request.param == "compiled" else None)
    return request.param


def hand_made() -> bytes:
    """Symbols 10, 11, 12, 13 of two bits each, one to a stream: 13 10 12 11, and 11 12 13 10."""
    lengths = np.zeros(256, np.uint8)
    lengths[10:14] = 2
    head = (lengths[::2] | lengths[1::2] << 4).tobytes() + np.full(8, 1, "<u4").tobytes()
    # Codes 00 01 10 11, first bit lowest: 10 -> 0, 11 -> 2, 12 -> 1, 13 -> 3.
    return head + bytes([3, 0, 1, 2, 2, 1, 3, 0])


def decoded(data: bytes, size: int) -> bytes | None:
    """What the current form makes of it; None if it refuses."""
    out = np.empty(size, np.uint8)
    try:
        huffman.decode(memoryview(data), out, "test")
    except CorruptShardError:
        return None
    return out.tobytes()


def symbols(size: int, seed: int, spread: float = 6.0) -> np.ndarray:
    """uint8 [size] like those of states: centred, with a few rare ones."""
    rng = np.random.default_rng(seed)
    out = np.clip(np.rint(rng.normal(80, spread, size)), 0, 255).astype(np.uint8)
    out[rng.random(size) < 0.001] = 255
    return out


def encoded(plane: np.ndarray) -> bytes:
    out = np.empty(len(plane) + 256, np.uint8)
    size = COMPILED.huffman_encode(plane, out)
    assert 0 < size <= len(out)
    return out[:size].tobytes()


def test_a_chunk_made_by_hand(form):
    data = hand_made()
    assert decoded(data, 8) == bytes([13, 10, 12, 11, 11, 12, 13, 10])
    assert decoded(data, 7) is None and decoded(data, 9) is None
    assert decoded(data[:-1], 8) is None and decoded(data + b"\0", 8) is None
    padding = bytearray(data)
    padding[-1] |= 4
    assert decoded(bytes(padding), 8) is None
    for at, value in ((5, 0x21), (5, 0xC2), (5, 0x32), (6, 0x20)):
        lengths = bytearray(data)
        lengths[at] = value
        assert decoded(bytes(lengths), 8) is None, (at, value)
    moved = bytearray(data)
    moved[128], moved[132] = 0, 2
    assert decoded(bytes(moved), 8) is None
    moved[128:132] = b"\xff\xff\xff\xff"
    assert decoded(bytes(moved), 8) is None


@needs_compiled
@pytest.mark.parametrize("size", [300, 1000, 4097, 70_001, huffman.CHUNK, huffman.CHUNK + 1000, 600_000])
@pytest.mark.parametrize("spread", [2.0, 6.0, 40.0])
def test_both_forms_read_what_the_compiled_one_writes(size, spread, monkeypatch):
    plane = symbols(size, size, spread)
    # Streams of different statistics end at different times.
    plane[: size // 5] = symbols(size // 5, 7, spread / 2)
    data = encoded(plane)
    assert decoded(data, size) == plane.tobytes()
    monkeypatch.setattr(huffman, "native", None)
    assert decoded(data, size) == plane.tobytes()


@needs_compiled
@settings(max_examples=150, deadline=None)
@given(st.integers(256, 3000), st.floats(1.5, 60), st.integers(0, 1 << 30), st.data())
def test_both_forms_agree_on_damaged_data(size, spread, seed, data):
    good = encoded(symbols(size, seed, spread))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(good)))
    for case, expected in ((bytes(bad), size), (good[:cut], size), (good + b"\0", size), (good, size + 1)):
        with_compiled = decoded(case, expected)
        huffman.native = None
        try:
            with_numpy = decoded(case, expected)
        finally:
            huffman.native = COMPILED
        assert with_compiled == with_numpy
        if len(case) != len(good):
            assert with_compiled is None


def test_any_bytes_are_refused_or_read(form):
    rng = np.random.default_rng(0)
    head = np.frombuffer(hand_made()[:128], np.uint8)
    for size in (0, 1, 7, 100, 5000):
        for _ in range(20):
            data = rng.integers(0, 256, int(rng.integers(0, 400)), np.uint8)
            if len(data) > 128 and rng.random() < 0.7:
                data[:128] = head
                sizes = np.zeros(8, "<u4")
                sizes[: len(data) // 8 % 9] = rng.integers(0, 40)
                data[128:160] = sizes.view(np.uint8)[: len(data[128:160])]
            result = decoded(data.tobytes(), size)
            assert result is None or len(result) == size


def modes(payload: bytes) -> list[int]:
    at, found = BLOCK_HEAD.size, []
    while at < len(payload):
        mode, size = SECTION.unpack_from(payload, at)
        found.append(mode)
        at += SECTION.size + size
    return found


@needs_compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "hidden"), [(64, 72), (64, 33), (9, 264), (61, 1032), (130, 16), (300, 24)])
def test_blocks_of_either_form_are_read_by_the_other(dtype, rows, hidden, monkeypatch):
    header = make_header(dtype=dtype, hidden_size=hidden, aux_layer_ids=(1, 2, 3), block_tokens=512)
    aux, final = random_states(header, rows)
    aux, final = aux.copy(), final.copy()
    aux[:, ::7, ::5] = 0
    aux[1, 3] = np.iinfo(header.bits_dtype).max  # NaN
    final[:, 1] = 1  # a channel whose level is 0
    final[0, 1] = header.bits_dtype.type(0xC0 << (24 if dtype == "float32" else 8))
    payloads = []
    for form in (COMPILED, None):
        monkeypatch.setattr(huffman, "native", form)
        payloads.append(encode_block(header, position=3, aux=aux, final=final))
        payloads.append(encode_block(header, position=3, aux=aux, final=final[5:], final_row=5))
    assert HUFFMAN in modes(payloads[0]) and HUFFMAN not in modes(payloads[2])
    for form in (COMPILED, None):
        monkeypatch.setattr(huffman, "native", form)
        for payload, first in zip(payloads, (0, 5, 0, 5), strict=True):
            block = decode_block(header, payload)
            assert np.array_equal(block.aux, aux) and np.array_equal(block.final, final[first:])


@needs_compiled
def test_floors_far_from_most_are_stored_one_by_one():
    """Channels 15 and more steps above the window that most fit in, or below it; levels of 0 and of 255."""
    header = make_header(hidden_size=1025)
    aux, _ = random_states(header, 64)
    aux = (aux & 0x807F) | 0x3F00
    for channel, exponent in ((3, 0), (77, 254), (500, 20), (1024, 200), (901, 126 + 9)):
        aux[0, :, channel] = (aux[0, :, channel] & 0x807F) | exponent << 7
    aux[1, ::9, 100:140] = 0
    payload = encode_block(header, position=0, aux=aux)
    assert payload[BLOCK_HEAD.size] == COMPACT
    for form in (COMPILED, None):
        huffman.native = form
        try:
            assert np.array_equal(decode_block(header, payload).aux, aux)
        finally:
            huffman.native = COMPILED


@needs_compiled
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.data())
def test_damaged_blocks_are_refused_alike(seed, data):
    header = make_header(hidden_size=64)
    aux, final = random_states(header, 64, seed)
    payload = bytearray(encode_block(header, position=0, aux=aux, final=final))
    assert HUFFMAN in modes(bytes(payload))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(BLOCK_HEAD.size, len(payload) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    results = []
    for form in (COMPILED, None):
        huffman.native = form
        try:
            block = decode_block(header, bytes(payload))
            results.append((block.aux.tobytes(), block.final.tobytes()))
        except CorruptShardError:
            results.append(None)
        finally:
            huffman.native = COMPILED
    assert results[0] == results[1]


@needs_compiled
def test_what_zstd_codes_better_is_left_to_it():
    header = make_header(hidden_size=256)
    aux = np.zeros((3, 64, 256), np.uint16)
    assert HUFFMAN not in modes(encode_block(header, position=0, aux=aux))
    few = encode_block(header, position=0, aux=aux[:, :2])
    assert COMPACT not in modes(few) and HUFFMAN not in modes(few)


@needs_compiled
def test_sizes_that_do_not_fit_are_refused_by_the_compiled_functions():
    def planes(*sizes):
        return [np.zeros(size, np.uint8) for size in sizes]

    layer = np.zeros((4, 8), np.uint16)
    # floors, signs, symbols, rest, escapes of 4 rows and 8 channels
    good = (16, 8, 32, 32, 32)
    COMPILED.split_layer(layer, 0, 8, 1, *planes(*good))
    for i in range(5):
        short = [size - (i == j) for j, size in enumerate(good)]
        with pytest.raises(ValueError, match="sizes"):
            COMPILED.split_layer(layer, 0, 8, 1, *planes(*short))
    for bad, first, width in (
        (layer, 8, 8), (layer, -1, 8), (layer, 0, 7), (layer[:, ::2], 0, 8), (layer[:3], 0, 8),
        (layer.astype(np.uint32), 0, 8), (layer.reshape(-1), 0, 8), (layer, 0, 1 << 62),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sizes"):
            COMPILED.split_layer(bad, first, width, 1, *planes(*good))

    # floors, signs, symbols, rest, escapes, levels
    good = (16, 8, 33, 40, 33, 2 + 1 + 4 + 16)
    COMPILED.pack(*planes(*good))
    for i in range(6):
        if i != 2:
            with pytest.raises(ValueError, match="sizes"):
                COMPILED.pack(*planes(*(size - (i == j) for j, size in enumerate(good))))

    payload = compact_block()[1][BLOCK_HEAD.size :]
    scratch, out = 2 * 16 + 512 + 4096, 2 * 4096
    assert COMPILED.unpack(payload, 0, 256, 16, *planes(scratch, out)) == len(payload)
    for start, rows, width, some, result in (
        (-1, 256, 16, scratch, out), (len(payload) + 1, 256, 16, scratch, out), (0, 0, 16, scratch, out),
        (0, 256, -16, scratch, out), (0, 1 << 62, 1 << 62, scratch, out), (0, 256, 16, scratch - 1, out),
        (0, 256, 16, scratch, out - 2), (0, 255, 16, scratch, out),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="sizes"):
            COMPILED.unpack(payload, start, rows, width, *planes(some, result))


def compact_block() -> tuple[ShardHeader, bytes]:
    """A block of one compact matrix, 256 rows and 16 channels."""
    header = make_header(hidden_size=16, aux_layer_ids=(1,), block_tokens=256)
    payload = encode_block(header, position=0, aux=random_states(header, 256)[0])
    assert payload[BLOCK_HEAD.size] == COMPACT
    return header, payload


@needs_compiled
def test_every_cut_of_a_compact_matrix_is_refused(monkeypatch):
    header, payload = compact_block()
    for form, step in ((COMPILED, 1), (None, 97)):
        monkeypatch.setattr(huffman, "native", form)
        for cut in range(BLOCK_HEAD.size, len(payload), step):
            with pytest.raises(CorruptShardError):
                decode_block(header, payload[:cut])
        with pytest.raises(CorruptShardError):
            decode_block(header, payload + b"\0")


@needs_compiled
def test_threads_decode_at_once():
    planes = [symbols(100_000, seed) for seed in range(6)]
    coded = [encoded(plane) for plane in planes]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda i: decoded(coded[i % 6], 100_000), range(60)))
    assert all(result == planes[i % 6].tobytes() for i, result in enumerate(results))


def test_reading_without_the_compiled_codec_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(huffman, "native", None)
    monkeypatch.setattr(huffman, "_warned", False)
    with caplog.at_level(logging.WARNING):
        assert decoded(hand_made(), 8) and decoded(hand_made(), 8)
    assert [r.message for r in caplog.records if "C compiler" in r.message] == [caplog.messages[0]]
