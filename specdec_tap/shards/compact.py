"""The compact form of a lossless matrix, made to be coded and decoded fast (docs/format.md).

It differs from the form in lossless.py in this: symbols are sign and exponent alone, in row order and always
Huffman-coded, and the remainder of seven bits is the whole mantissa. A symbol has 3.5 bits instead of 4.5, so
more of them are decoded at once. To make up for the mantissa's first bit, which leans to 0, channels are
centred more finely: what is subtracted from the raw bits of a number, its channel's *floor*, is a multiple of
half an octave. The compiled codec (_native.c) does all the work; without it matrices are only read, here.

=========== =================== =====================================================================
levels      mode 4              floors and signs of the channels: differences of four bits
symbols     n x W bytes         sign and difference to the floor in octaves, [n][W], mode 3
escapes     1 byte each         true exponents where that difference is 63 or no such number
remainders  7 ceil(n W / 8)     mantissas, the last eighth of them spread over the low bits of the others
=========== =================== =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import CorruptShardError
from . import huffman
from .sections import (
    COMPACT,
    HUFFMAN,
    MIN_CENTRED_ROWS,
    RAW,
    SECTION,
    Buffer,
    Sections,
    local,
    looks_compressible,
    u1,
    u2,
)

MIN_NUMBERS = 4096
"""For fewer, the table of codes counts."""
STEP = 64
"""Floors are multiples of half an octave apart."""
BELOW = 40 << 7
"""A channel's floor is 40 octaves below its level."""
ESCAPE = 63


def encode_compact(layers: Sequence[np.ndarray]) -> list[Buffer] | None:
    """Sections for L layers of bits [n, H], uint16; None if another form serves better, or this cannot be
    written here. They lie in this thread's buffers."""
    rows, hidden = layers[0].shape
    width = len(layers) * hidden
    numbers = rows * width
    if not huffman.native or numbers < MIN_NUMBERS:
        return None
    centred = rows >= MIN_CENTRED_ROWS
    floors, signs = np.empty(width, u2), np.zeros(width, u1)
    if not centred:
        # One level for all channels: the mean exponent of the first layer.
        exponents = (layers[0] & u2(0x7FFF)) >> 7
        mean = int(exponents.sum(dtype=np.uint64)) // exponents.size
        floors[:] = ((mean << 7) - BELOW) & 0xFFFF
    symbols, escapes = local.plane("symbols", numbers), local.plane("escapes", numbers)
    eighth = -(-numbers // 8)
    rest = local.plane("rest", 8 * eighth)
    rest[numbers:] = 0
    levels = local.plane("levels", 4 * width + 8)
    for i, layer in enumerate(layers):
        if layer.strides[1] != layer.itemsize:
            layer = np.ascontiguousarray(layer)
        huffman.native.split_layer(
            layer, i * hidden, width, centred, floors, signs, symbols, rest, escapes
        )  # fmt: skip
    num_escapes, num_levels = huffman.native.pack(floors, signs, symbols, rest, escapes, levels)
    packed = rest[: 7 * eighth]
    coded = local.plane("packed", numbers)
    size = 0 if looks_compressible(packed) else huffman.encode(symbols, coded)
    if not size:
        return None
    return [
        SECTION.pack(COMPACT, num_levels), levels[:num_levels],
        SECTION.pack(HUFFMAN, size), coded[:size],
        SECTION.pack(RAW, num_escapes), escapes[:num_escapes],
        SECTION.pack(RAW, len(packed)), packed,
    ]  # fmt: skip


def decode_compact(sections: Sections, rows: int, width: int) -> np.ndarray:
    """Bits [rows, width] of a matrix that begins with a section in mode 4."""
    numbers = rows * width
    eighth = -(-numbers // 8)
    if not huffman.native:
        return _decode_compact(sections, rows, width, eighth)
    result = np.empty((rows, width), u2)
    scratch = local.plane("scratch", 2 * width + eighth + min(numbers, huffman.CHUNK))
    try:
        sections.at = huffman.native.unpack(sections.payload, sections.at, rows, width, scratch, result)
    except ValueError as err:
        raise CorruptShardError(f"block's numbers do not decode ({err})") from err
    return result


def _decode_compact(sections: Sections, rows: int, width: int, eighth: int) -> np.ndarray:
    floors, signs = _levels(sections.take_mode(COMPACT, "levels"), width)
    symbols = np.empty(rows * width, u1)
    huffman.decode(sections.take_mode(HUFFMAN, "symbols"), symbols, "block's symbols")
    escapes = np.frombuffer(sections.take_mode(RAW, "escapes"), u1)
    packed = np.frombuffer(sections.take_mode(RAW, "remainders"), u1)
    if len(packed) != 7 * eighth:
        raise CorruptShardError(f"block's remainders have {len(packed):,} bytes; expected {7 * eighth:,}")
    packed = packed.reshape(7, eighth)
    last = np.packbits(packed & u1(1), axis=0)[0] >> 1
    rest = np.concatenate([packed >> 1, last[None]]).reshape(-1)[: len(symbols)]

    bits = (symbols & u1(63)).astype(u2)
    bits <<= 7
    bits |= rest
    bits = bits.reshape(rows, width)
    bits += floors
    bits += (symbols >> 7).astype(u2).reshape(rows, width) << 15
    at = np.flatnonzero((symbols & u1(63)) == ESCAPE)
    if len(at) != len(escapes):
        raise CorruptShardError(f"block has {len(escapes):,} escapes and {len(at):,} symbols that need one")
    bits.reshape(-1)[at] = (
        (symbols[at] >> 7).astype(u2) << 15 | escapes.astype(u2) << 7 | rest[at]
    )  # fmt: skip
    bits ^= signs << 15
    return bits


def _levels(data: memoryview, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Floors and signs, uint16 [width]."""
    half, sign_bytes = -(-width // 2), -(-width // 8)
    base = np.frombuffer(data[:2], u1)
    if len(base) < 2:
        raise CorruptShardError("block's levels end before their base")
    base = base.view("<u2")
    if len(data) == 2:
        return np.full(width, base[0], u2), np.zeros(width, u2)
    signs = np.frombuffer(data[2 : 2 + sign_bytes], u1)
    nibbles = np.frombuffer(data[2 + sign_bytes : 2 + sign_bytes + half], u1)
    other = data[2 + sign_bytes + half :]
    if len(nibbles) < half:
        raise CorruptShardError(f"block's levels have {len(data):,} bytes for {width:,} channels")
    steps = np.concatenate([nibbles & u1(15), nibbles >> 4])[:width].astype(u2)
    at = np.flatnonzero(steps == 15)
    if len(other) != 2 * len(at):
        raise CorruptShardError(f"block's levels have {len(other):,} bytes of {len(at):,} other floors")
    floors = base + steps * u2(STEP)
    floors[at] = np.frombuffer(bytes(other), "<u2")
    return floors, np.unpackbits(signs, bitorder="little")[:width].astype(u2)
