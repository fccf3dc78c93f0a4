"""The lossless codec.

What compresses in a hidden state is its exponent: 2.6 of 8 bits once each channel is centred on its own
level. The mantissa does not, except that its first bit leans to 0, and the sign does where a channel has
a mean. So each number becomes a *symbol* of one byte (sign, centred exponent, first mantissa bit), which is
entropy-coded, and a *remainder* of six bits, stored as it is. Symbols are ordered in groups of eight
channels: eight move at once, and channels that hardly change show up as repeats.

Speed comes from few passes over buffers that stay in cache. Where the compiled codec is, bfloat16 and float32
take the form of compact.py, which it was made for; here is the form for float16, for small matrices and for
where nothing could be compiled, in NumPy. There zstd codes the symbols, with next to no match search.

A matrix [n, W] of n rows and W = layers x hidden channels becomes these sections:

============ ============= ==========================================================================
centres      W bytes       exponent level of each channel
signs        W bits        whether the channel is mostly negative (then its sign bits are inverted)
symbols      n x W bytes   in groups of 8 channels: [W / 8][n][8], or [W][n] if 8 does not divide W
escapes      1 byte each   true exponents where the centred one is 63, in the symbols' order
remainders   n x W numbers 6 bits (bfloat16, float32) or 8 bits (float16) each, in row order
low halves   2 n x W bytes float32 only: low 16 bits of each number, in row order
============ ============= ==========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import CorruptShardError
from .compact import decode_compact, encode_compact
from .sections import (
    CONSTANT,
    MIN_CENTRED_ROWS,
    SECTION,
    TILE_NUMBERS,
    Buffer,
    Sections,
    Tile,
    from_groups,
    local,
    looks_compressible,
    nonzero,
    section,
    symbol_section,
    to_groups,
    u1,
    u2,
)

OFFSET = 40
"""Centred exponents 0 to 62 stand for centre - 40 to centre + 22; anything else is an escape."""
ESCAPE = 63


def encode_lossless(layers: Sequence[np.ndarray], dtype: str) -> list[Buffer]:
    """Sections for L layers of bits [n, H] with any strides; they may lie in this thread's buffers."""
    rows, hidden = layers[0].shape
    width = len(layers) * hidden
    low_halves: list[Buffer] = []
    if dtype == "float32":
        low = np.stack(layers, axis=1).astype(u2).tobytes()
        low_halves = section(low, zstd=looks_compressible(low))
        layers = [np.right_shift(layer, 16).astype(u2) for layer in layers]
    if dtype != "float16":
        compact = encode_compact(layers)
        if compact:
            return compact + low_halves
    plane = _Planes(rows, width, half=dtype == "float16")
    if not plane.centred:
        plane.share_centre(layers[0])
    if rows * width <= TILE_NUMBERS:
        plane.encode(np.stack(layers, axis=1).reshape(rows, width), 0)
    else:
        step = max(TILE_NUMBERS // rows // 8 * 8, 8)
        for i, layer in enumerate(layers):
            for start in range(0, hidden, step):
                plane.encode(layer[:, start : start + step], i * hidden + start)
    return plane.sections() + low_halves


class _Planes:
    """Symbols and remainders of one matrix, filled a tile of channels at a time."""

    def __init__(self, rows: int, width: int, *, half: bool) -> None:
        self.rows = rows
        self.width = width
        self.half = half
        self.group = 8 if width % 8 == 0 else 1
        self.centred = rows >= MIN_CENTRED_ROWS
        self.centres = np.zeros(width, u1)
        self.signs = np.zeros(width, np.bool_)
        self.symbols = local.plane("symbols", rows * width)
        # Whole quarters, so that the last one may run over the end.
        self.quarter = -(-rows * width // 4)
        self.rest = local.plane("rest", 4 * self.quarter)
        self.rest[rows * width :] = 0
        self.escapes = local.plane("escapes", rows * width)
        self.num_escapes = 0

    def share_centre(self, layer: np.ndarray) -> None:
        """One level for all channels: the mean exponent of bits [n, H]."""
        exponents = (layer & u2(0x7FFF)) >> (10 if self.half else 7)
        self.centres[:] = exponents.sum(dtype=np.uint64) // exponents.size

    def encode(self, tile: np.ndarray, first: int) -> None:
        """Take bits [n, w] of channels ``first ..``; w is a multiple of 8 unless the group is 1."""
        rows, width = tile.shape
        half = self.half
        mantissa = 10 if half else 7
        buffers = local.tile(rows, width)
        a, b, symbol, byte = buffers.a, buffers.b, buffers.symbol, buffers.byte
        channels = slice(first, first + width)

        np.right_shift(tile, 8, out=b)
        np.copyto(symbol, b, casting="unsafe")
        np.bitwise_and(tile, u2(0x7FFF), out=a)
        if self.centred:
            np.right_shift(symbol, 7, out=byte)
            counts = np.add.reduce(byte, axis=0, dtype=u1 if rows < 256 else u2)
            negative = self.signs[channels] = counts > rows // 2
            np.right_shift(a, mantissa, out=b)
            np.copyto(byte, b, casting="unsafe")
            # The mean over the largest of four rows: the level that gave the smallest symbols on real states.
            quarter = rows // 4
            top = buffers.top
            np.maximum(byte[:quarter], byte[quarter : 2 * quarter], out=top)
            np.maximum(top, byte[2 * quarter : 3 * quarter], out=top)
            np.maximum(top, byte[3 * quarter : 4 * quarter], out=top)
            level = np.add.reduce(top, axis=0, dtype=u2 if quarter < 257 else np.uint32) // quarter
            np.bitwise_xor(symbol, negative.view(u1) << 7, out=symbol)
            self.centres[channels] = level
        level = self.centres[channels].astype(u2)
        np.bitwise_and(symbol, u1(0x80), out=symbol)

        if half:
            # Five exponent bits: the difference is kept modulo 32, so nothing can escape.
            np.subtract(a, level << 10, out=a)
            np.bitwise_and(a, u2(0x7FFF), out=a)
            np.right_shift(a, 8, out=b)
        else:
            np.subtract(a, (level - u2(OFFSET)) << 7, out=a)
            self._escape(tile, a, buffers.flags)
            np.right_shift(a, 6, out=b)
        np.copyto(byte, b, casting="unsafe")
        np.bitwise_or(symbol, byte, out=symbol)
        to_groups(symbol, self.symbols[rows * first : rows * (first + width)], self.group)
        if half:
            np.copyto(byte, a, casting="unsafe")
        else:
            np.left_shift(a, 2, out=b)
            np.copyto(byte, b, casting="unsafe")
        self.rest[: rows * self.width].reshape(rows, self.width)[:, channels] = byte

    def _escape(self, tile: np.ndarray, a: np.ndarray, flags: np.ndarray) -> None:
        """Replace centred exponents outside 0 .. 62 by 63 and remember the true ones."""
        rows, width = tile.shape
        np.greater_equal(a, u2(ESCAPE << 7), out=flags)
        at = nonzero(flags.reshape(-1))
        if not len(at):
            return
        row, channel = np.divmod(at, width)
        group = self.group
        order = np.argsort((channel // group * rows + row) * group + channel % group)
        row, channel = row[order], channel[order]
        true = tile[row, channel]
        count = len(true)
        self.escapes[self.num_escapes : self.num_escapes + count] = (true >> 7) & u2(0xFF)
        self.num_escapes += count
        a[row, channel] = (true & u2(0x7F)) | u2(ESCAPE << 7)

    def sections(self) -> list[Buffer]:
        """All sections but the low halves."""
        numbers = self.rows * self.width
        if self.centred:
            parts = section(self.centres, zstd=True)
            parts += section(np.packbits(self.signs, bitorder="little"), zstd=False)
        else:
            parts = [
                SECTION.pack(CONSTANT, 1),
                self.centres[:1].tobytes(),
                SECTION.pack(CONSTANT, 1),
                b"\0",
            ]
        parts += symbol_section(self.symbols)
        if self.half:
            rest = self.rest[:numbers]
            return parts + section(rest, zstd=looks_compressible(rest))
        parts += section(self.escapes[: self.num_escapes], zstd=False)
        packed = _pack_six(self.rest.reshape(4, self.quarter)).reshape(-1)
        return parts + section(packed, zstd=looks_compressible(packed))


def decode_lossless(sections: Sections, rows: int, width: int, dtype: str) -> np.ndarray:
    """Bits [rows, width]."""
    if dtype != "float16" and sections.starts_compact():
        bits = decode_compact(sections, rows, width)
    else:
        bits = _decode_planes(sections, rows, width, half=dtype == "float16")
    return _with_low_halves(bits, sections) if dtype == "float32" else bits


def _decode_planes(sections: Sections, rows: int, width: int, *, half: bool) -> np.ndarray:
    numbers = rows * width
    group = 8 if width % 8 == 0 else 1
    centres = sections.take(width, "centres")
    signs = sections.take(-(-width // 8), "signs")
    quarter = -(-numbers // 4)
    result = np.empty((rows, width), u2)
    symbols = sections.take(numbers, "symbols")
    centres = centres.astype(u2)
    signs = np.unpackbits(signs, bitorder="little")[:width].astype(u2)
    if half:
        escapes = symbols[:0]
        rest = sections.take(numbers, "remainders")
        shift = (centres << 10) & u2(0x7FFF)
    else:
        escapes = sections.take_some(numbers, "escapes")
        rest = local.plane("rest", 4 * quarter)
        _unpack_six(sections.take(3 * quarter, "remainders").reshape(3, quarter), rest.reshape(4, quarter))
        rest = rest[:numbers]
        # Adding 0x8000 inverts the sign bit and nothing else.
        base = (centres - u2(OFFSET)) << 7
        shift = base + (signs << 15)
    rest = rest.reshape(rows, width)
    taken = 0
    step = width if numbers <= TILE_NUMBERS else max(TILE_NUMBERS // rows // 8 * 8, 8)
    for start in range(0, width, step):
        tile = min(step, width - start)
        part = symbols[rows * start : rows * (start + tile)]
        channels = slice(start, start + tile)
        buffers = local.tile(rows, tile)
        a, b, symbol = buffers.a, buffers.b, buffers.symbol
        from_groups(part, symbol, group)
        np.copyto(a, symbol)
        np.left_shift(a, 8, out=a)
        np.copyto(b, rest[:, channels])
        np.bitwise_or(a, b, out=a)
        if half:
            # sign, exponent minus centre modulo 32, mantissa
            np.bitwise_and(a, u2(0x7FFF), out=b)
            np.add(b, shift[channels], out=b)
            np.bitwise_and(b, u2(0x7FFF), out=b)
            np.bitwise_and(a, u2(0x8000), out=a)
            np.bitwise_or(a, b, out=a)
            np.bitwise_xor(a, signs[channels] << 15, out=result[:, channels])
            continue
        # sign, six exponent bits, mantissa, two zeros: spread the sign over the two missing exponent bits,
        # clear those, and the sign bit is in its place.
        signed = a.view(np.int16)
        np.right_shift(signed, 2, out=signed)
        np.bitwise_and(a, u2(0x9FFF), out=a)
        taken += _unescape(part, buffers, escapes[taken:], base[channels], group)
        np.add(a, shift[channels], out=result[:, channels])
    if taken != len(escapes):
        raise CorruptShardError(f"block has {len(escapes):,} escapes and {taken:,} symbols that need one")
    return result


def _with_low_halves(high: np.ndarray, sections: Sections) -> np.ndarray:
    """uint32 bits from their high 16 and the section that follows."""
    low = sections.take(2 * high.size, "low halves").view("<u2").reshape(high.shape)
    wide = high.astype(np.uint32)
    wide <<= 16
    wide |= low
    return wide


def _unescape(part: np.ndarray, buffers: Tile, escapes: np.ndarray, base: np.ndarray, group: int) -> int:
    """Put true exponents back into ``buffers.a``; returns how many escapes this tile used."""
    a = buffers.a
    rows = len(a)
    mark, found = buffers.byte.reshape(-1), buffers.flags.reshape(-1)
    np.bitwise_or(part, u1(0x81), out=mark)
    np.equal(mark, u1(0xFF), out=found)
    at = nonzero(found)
    if len(at) > len(escapes):
        raise CorruptShardError(f"block has {len(escapes):,} escapes but more symbols that need one")
    if len(at):
        outer, inner = np.divmod(at, rows * group)
        row, lane = np.divmod(inner, group)
        channel = outer * group + lane
        exponent = escapes[: len(at)].astype(u2) << 7
        a[row, channel] = (a[row, channel] & u2(0x807F)) + exponent - base[channel]
    return len(at)


def _pack_six(rest: np.ndarray) -> np.ndarray:
    """Four quarters of six-bit numbers (in the top bits of a byte) to three: [4, q] to [3, q].

    Bytes 0, 1, 2 keep the first three quarters; the fourth goes, two bits each, into their low bits.
    """
    packed = np.empty((3, rest.shape[1]), u1)
    np.right_shift(rest[3], 6, out=packed[0])
    np.right_shift(rest[3], 4, out=packed[1])
    np.right_shift(rest[3], 2, out=packed[2])
    np.bitwise_and(packed, u1(3), out=packed)
    np.bitwise_or(packed, rest[:3], out=packed)
    return packed


def _unpack_six(packed: np.ndarray, out: np.ndarray) -> None:
    """Inverse of ``_pack_six``. Doubling by addition: NumPy has no fast left shift of bytes."""
    np.bitwise_and(packed, u1(0xFC), out=out[:3])
    low = local.plane("low", packed.size).reshape(packed.shape)
    np.bitwise_and(packed, u1(3), out=low)
    last = low[0]
    for more in (low[1], low[2], None):
        np.add(last, last, out=last)
        np.add(last, last, out=last)
        if more is not None:
            np.bitwise_or(last, more, out=last)
    out[3] = last
