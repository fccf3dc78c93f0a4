"""Arrays of hidden states to block payloads and back.

A block holds the aux states of consecutive positions and, for one consecutive range of its rows, the
final states. Numbers travel as raw bits (uint16 for bfloat16 and float16, uint32 for float32), so NaN
and infinity survive ``lossless`` bit by bit.

What compresses in a hidden state is its exponent: 2.6 of 8 bits once each channel is centred on its own
level. The mantissa does not, except that its first bit leans to 0, and the sign does where a channel has
a mean. So each number becomes a *symbol* of one byte (sign, centred exponent, first mantissa bit), which
zstd codes with next to no match search (almost only its Huffman coder works), and a *remainder* of six
bits, stored as it is. Symbols are ordered in groups of eight channels, so that channels that hardly
change show up as repeats. ``docs/format.md`` has the layout.

Speed comes from few passes over buffers that stay in cache. All functions are pure and safe to call from
several threads; zstd releases the GIL.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

import numpy as np
import zstandard

from ..errors import ConfigError, CorruptShardError
from .layout import DTYPES, MAX_BLOCK_TOKENS, ShardHeader
from .records import unzstd

BLOCK_HEAD = struct.Struct("<BBHIIIIIII")
"""codec, dtype, aux layers, hidden size, position, rows, first final row, final rows, two zeros."""
CODEC_IDS = {"lossless": 1, "fp8": 2, "int8": 3}
DTYPE_IDS = {name: i + 1 for i, name in enumerate(DTYPES)}

_SECTION = struct.Struct("<BI")
_RAW, _ZSTD, _CONSTANT = 0, 1, 2
_SAMPLE_BYTES = 1024
_MIN_CENTRED_ROWS = 16
"""Below this many rows, per-channel centres cost more than they save."""
_OFFSET = 40
"""Centred exponents 0 to 62 stand for centre - 40 to centre + 22; anything else is an escape."""
_ESCAPE = 63
_TILE_NUMBERS = 64 * 2304
"""Work on so many numbers at a time: all buffers of a tile fit the second-level cache."""

_u1, _u2 = np.uint8, np.uint16


class Block(NamedTuple):
    """One decoded block."""

    position: int
    """Token position of row 0."""
    num_rows: int
    aux: np.ndarray
    """Bits [A, n, H]; a view whose memory is laid out [n, A, H]."""
    final: np.ndarray | None
    """Bits [m, H], or None."""
    final_row: int
    """Row of the block that ``final[0]`` belongs to."""


class BlockHead(NamedTuple):
    """Sizes of a block, read without decoding it."""

    position: int
    num_rows: int
    final_row: int
    final_rows: int


class _Tile:
    """Buffers for one tile of n rows and w channels; contents are undefined between uses."""

    def __init__(self, rows: int, width: int) -> None:
        shape = (rows, width)
        self.a = np.empty(shape, _u2)
        self.b = np.empty(shape, _u2)
        self.symbol = np.empty(shape, _u1)
        self.byte = np.empty(shape, _u1)
        self.flags = np.empty(shape, np.bool_)
        self.top = np.empty((rows // 4, width), _u1)


class _Local(threading.local):
    """What one thread reuses: a zstd context must not be shared, and fresh buffers cost page faults."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                min_match=7,
                hash_log=6,
                window_log=17,
                write_content_size=True,
            )
        )
        self._tiles: dict[tuple[int, int], _Tile] = {}
        self._planes: dict[str, np.ndarray] = {}

    def tile(self, rows: int, width: int) -> _Tile:
        """Buffers of this shape; a few shapes are kept, whole blocks being the common one."""
        tile = self._tiles.get((rows, width))
        if tile is None:
            if len(self._tiles) >= 4:
                self._tiles.pop(next(iter(self._tiles)))
            tile = self._tiles[rows, width] = _Tile(rows, width)
        return tile

    def plane(self, name: str, size: int) -> np.ndarray:
        """uint8 [size], contents undefined, valid until the next call with this name."""
        held = self._planes.get(name)
        if held is None or held.size < size:
            held = self._planes[name] = np.empty(size, _u1)
        return held[:size]


_local = _Local()


def read_block_head(header: ShardHeader, payload: bytes) -> BlockHead:
    """Parse and check the fixed part of a block payload.

    Args:
        header: The shard's header; codec, dtype, layers and width must agree with it.
        payload: The payload, or at least its first ``BLOCK_HEAD.size`` bytes.

    Raises:
        CorruptShardError: If anything disagrees or is out of range.
    """
    if len(payload) < BLOCK_HEAD.size:
        raise CorruptShardError("BLOCK payload is shorter than its head")
    fields = BLOCK_HEAD.unpack_from(payload)
    position, rows, final_row, final_rows, zero, zero2 = fields[4:]
    expected = (CODEC_IDS[header.codec], DTYPE_IDS[header.dtype], header.num_aux, header.hidden_size)
    if fields[:4] != expected:
        raise CorruptShardError(
            f"block has (codec, dtype, aux layers, hidden size) = {fields[:4]}; the shard's header "
            f"says {expected}"
        )
    if (
        not 1 <= rows <= min(header.block_tokens, MAX_BLOCK_TOKENS)
        or final_row + final_rows > rows
        or (final_rows and header.final_hidden == "none")
        or (not final_rows and final_row)
        or zero
        or zero2
    ):
        raise CorruptShardError(
            f"block has {rows:,} rows with final states at [{final_row:,}, {final_row + final_rows:,}); "
            f"expected 1 to {header.block_tokens} rows"
        )
    return BlockHead(position, rows, final_row, final_rows)


def encode_block(
    header: ShardHeader,
    *,
    position: int,
    aux: np.ndarray,
    final: np.ndarray | None = None,
    final_row: int = 0,
) -> bytes:
    """Encode the states of consecutive positions into a BLOCK payload.

    Args:
        header: Decides codec, dtype, number of layers and width.
        position: Token position of row 0.
        aux: Bits [A, n, H] with any strides, 1 <= n <= ``header.block_tokens``.
        final: Bits [m, H] of m consecutive rows, or None.
        final_row: Row of the block that ``final[0]`` belongs to.

    Raises:
        ConfigError: If shapes or dtypes do not fit the header.
    """
    bits = header.bits_dtype
    hidden = header.hidden_size
    if aux.ndim != 3 or aux.shape[0] != header.num_aux or aux.shape[2] != hidden or aux.dtype != bits:
        raise ConfigError(
            f"aux is {aux.dtype} {list(aux.shape)}; expected {bits} [{header.num_aux}, rows, {hidden}]"
        )
    rows = aux.shape[1]
    num_final = 0 if final is None else final.shape[0]
    if final is not None and (final.ndim != 2 or final.shape[1] != hidden or final.dtype != bits):
        raise ConfigError(f"final is {final.dtype} {list(final.shape)}; expected {bits} [rows, {hidden}]")
    if num_final and header.final_hidden == "none":
        raise ConfigError("a final state was given but the header says final_hidden = 'none'")
    if (
        not 1 <= rows <= header.block_tokens
        or not 0 <= final_row <= rows - num_final
        or not 0 <= position < 1 << 32
    ):
        raise ConfigError(
            f"block has {rows} rows at position {position:,} and {num_final} final states from row "
            f"{final_row}; expected 1 to {header.block_tokens} rows that hold all final states"
        )
    if not num_final:
        final_row = 0
    parts = [
        BLOCK_HEAD.pack(
            CODEC_IDS[header.codec], DTYPE_IDS[header.dtype], header.num_aux, hidden,
            position, rows, final_row, num_final, 0, 0,
        )
    ]  # fmt: skip
    if header.codec != "lossless":
        raise ConfigError(f"codec {header.codec!r} cannot be written by this version; use 'lossless'")
    for matrix in _matrices(aux, final if num_final else None):
        parts += _encode_lossless(matrix, header.dtype)
    return b"".join(parts)


def decode_block(header: ShardHeader, payload: bytes) -> Block:
    """Inverse of ``encode_block``.

    Sizes are checked against the declared shape before anything is decompressed, so memory is bounded by
    the shape, whatever the bytes say.

    Raises:
        CorruptShardError: If the payload is not a block of this header.
    """
    head = read_block_head(header, payload)
    hidden = header.hidden_size
    sections = _Sections(payload, BLOCK_HEAD.size)
    if header.codec != "lossless":
        raise CorruptShardError(f"codec {header.codec!r} cannot be read by this version")
    rows, num_aux = head.num_rows, header.num_aux
    together = head.final_rows == rows
    layers = num_aux + together
    states = np.empty((rows, 0, hidden), header.bits_dtype)
    if layers:
        states = _decode_lossless(sections, rows, layers * hidden, header.dtype).reshape(rows, layers, hidden)
    final = states[:, num_aux] if together else None
    if head.final_rows and not together:
        final = _decode_lossless(sections, head.final_rows, hidden, header.dtype)
    sections.end()
    return Block(head.position, rows, states[:, :num_aux].transpose(1, 0, 2), final, head.final_row)


def _matrices(aux: np.ndarray, final: np.ndarray | None) -> list[np.ndarray]:
    """Bits [L, n, H] to encode one after the other: final states of all rows are one more layer."""
    if final is None:
        return [aux] if len(aux) else []
    if len(final) != aux.shape[1]:
        return [aux, final[None]] if len(aux) else [final[None]]
    rows, hidden = final.shape
    joined = np.empty((rows, len(aux) + 1, hidden), final.dtype)
    joined[:, :-1] = aux.transpose(1, 0, 2)
    joined[:, -1] = final
    return [joined.transpose(1, 0, 2)]


# ---- lossless
#
# A matrix [n, W] of n rows and W = layers x hidden channels becomes these sections:
#   centres      W bytes      exponent level of each channel
#   signs        W bits       whether the channel is mostly negative (then its sign bits are inverted)
#   symbols      n x W bytes  in groups of 8 channels: [W / 8][n][8], or [W][n] if 8 does not divide W
#   escapes      1 byte per symbol with centred exponent 63, in the symbols' order: the true exponent
#   remainders   6 bits (bfloat16, float32) or 8 bits (float16) per number, in row order
#   low halves   float32 only: the low 16 bits of each number, in row order; its high half is a bfloat16


def _encode_lossless(layers: np.ndarray, dtype: str) -> list[bytes]:
    """Sections for bits [L, n, H] with any strides."""
    num_layers, rows, hidden = layers.shape
    width = num_layers * hidden
    low_halves: list[bytes] = []
    if dtype == "float32":
        low = layers.transpose(1, 0, 2).astype(_u2).tobytes()
        low_halves = _section(low, zstd=_looks_compressible(low))
        layers = np.right_shift(layers, 16).astype(_u2)
    plane = _Planes(rows, width, half=dtype == "float16")
    if rows * width <= _TILE_NUMBERS:
        matrix = layers.transpose(1, 0, 2)
        plane.encode(np.ascontiguousarray(matrix).reshape(rows, width), 0)
    else:
        step = max(_TILE_NUMBERS // rows // 8 * 8, 8)
        for layer in range(num_layers):
            for start in range(0, hidden, step):
                plane.encode(layers[layer, :, start : start + step], layer * hidden + start)
    return plane.sections() + low_halves


class _Planes:
    """Symbols and remainders of one matrix, filled a tile of channels at a time."""

    def __init__(self, rows: int, width: int, *, half: bool) -> None:
        self.rows = rows
        self.width = width
        self.half = half
        self.group = 8 if width % 8 == 0 else 1
        self.centred = rows >= _MIN_CENTRED_ROWS
        self.centres = np.zeros(width, _u1)
        self.signs = np.zeros(width, bool)
        self.symbols = _local.plane("symbols", rows * width)
        # Whole quarters, so that the last one may run over the end.
        self.quarter = -(-rows * width // 4)
        self.rest = _local.plane("rest", 4 * self.quarter)
        self.rest[rows * width :] = 0
        self.escapes: list[np.ndarray] = []

    def encode(self, tile: np.ndarray, first: int) -> None:
        """Take bits [n, w] of channels ``first ..``; w is a multiple of 8 unless the group is 1."""
        rows, width = tile.shape
        half = self.half
        mantissa = 10 if half else 7
        buffers = _local.tile(rows, width)
        a, b, symbol, byte = buffers.a, buffers.b, buffers.symbol, buffers.byte
        channels = slice(first, first + width)

        np.right_shift(tile, 8, out=b)
        np.copyto(symbol, b, casting="unsafe")
        np.bitwise_and(tile, _u2(0x7FFF), out=a)
        if self.centred:
            np.right_shift(symbol, 7, out=byte)
            counts = np.add.reduce(byte, axis=0, dtype=_u1 if rows < 256 else _u2)
            negative = self.signs[channels] = counts > rows // 2
            np.right_shift(a, mantissa, out=b)
            np.copyto(byte, b, casting="unsafe")
            # The mean over the largest of four rows: the level that gave the smallest symbols on real states.
            quarter = rows // 4
            top = buffers.top
            np.maximum(byte[:quarter], byte[quarter : 2 * quarter], out=top)
            np.maximum(top, byte[2 * quarter : 3 * quarter], out=top)
            np.maximum(top, byte[3 * quarter : 4 * quarter], out=top)
            level = np.add.reduce(top, axis=0, dtype=_u2 if quarter < 257 else np.uint32) // quarter
            np.bitwise_xor(symbol, negative.view(_u1) << 7, out=symbol)
        else:
            np.right_shift(a, mantissa, out=b)
            # One level for all channels, fixed by the first tile.
            level = self.centres[0] if first else np.uint32(b.sum(dtype=np.uint64) // b.size)
        self.centres[channels] = level
        level = self.centres[channels].astype(_u2)
        np.bitwise_and(symbol, _u1(0x80), out=symbol)

        if half:
            # Five exponent bits: the difference is kept modulo 32, so nothing can escape.
            np.subtract(a, level << 10, out=a)
            np.bitwise_and(a, _u2(0x7FFF), out=a)
            np.right_shift(a, 8, out=b)
        else:
            np.subtract(a, (level - _u2(_OFFSET)) << 7, out=a)
            self._escape(tile, a, buffers.flags)
            np.right_shift(a, 6, out=b)
        np.copyto(byte, b, casting="unsafe")
        np.bitwise_or(symbol, byte, out=symbol)
        _to_groups(symbol, self.symbols[rows * first : rows * (first + width)], self.group)
        if half:
            np.copyto(byte, a, casting="unsafe")
        else:
            np.left_shift(a, 2, out=b)
            np.copyto(byte, b, casting="unsafe")
        self.rest[: rows * self.width].reshape(rows, self.width)[:, channels] = byte

    def _escape(self, tile: np.ndarray, a: np.ndarray, flags: np.ndarray) -> None:
        """Replace centred exponents outside 0 .. 62 by 63 and remember the true ones."""
        rows, width = tile.shape
        np.greater_equal(a, _u2(_ESCAPE << 7), out=flags)
        at = _nonzero(flags.reshape(-1))
        if not len(at):
            return
        row, channel = np.divmod(at, width)
        group = self.group
        order = np.argsort((channel // group * rows + row) * group + channel % group)
        row, channel = row[order], channel[order]
        true = tile[row, channel]
        self.escapes.append(((true >> 7) & _u2(0xFF)).astype(_u1))
        a[row, channel] = (true & _u2(0x7F)) | _u2(_ESCAPE << 7)

    def sections(self) -> list[bytes]:
        """All sections but the low halves."""
        numbers = self.rows * self.width
        if self.centred:
            parts = _section(self.centres.tobytes(), zstd=True)
            parts += _section(np.packbits(self.signs, bitorder="little").tobytes(), zstd=False)
        else:
            parts = [
                _SECTION.pack(_CONSTANT, 1),
                self.centres[:1].tobytes(),
                _SECTION.pack(_CONSTANT, 1),
                b"\0",
            ]
        parts += _section(self.symbols, zstd=True)
        if self.half:
            rest = self.rest[:numbers].tobytes()
            return parts + _section(rest, zstd=_looks_compressible(rest))
        parts += _section(b"".join(e.tobytes() for e in self.escapes), zstd=False)
        packed = _pack_six(self.rest.reshape(4, self.quarter)).tobytes()
        return parts + _section(packed, zstd=_looks_compressible(packed))


def _decode_lossless(sections: _Sections, rows: int, width: int, dtype: str) -> np.ndarray:
    """Bits [rows, width]."""
    half = dtype == "float16"
    numbers = rows * width
    group = 8 if width % 8 == 0 else 1
    centres = sections.take(width, "centres").astype(_u2)
    signs = np.unpackbits(sections.take(-(-width // 8), "signs"), bitorder="little")[:width].astype(_u2)
    symbols = sections.take(numbers, "symbols")
    quarter = -(-numbers // 4)
    if half:
        escapes = symbols[:0]
        rest = sections.take(numbers, "remainders")
        shift = (centres << 10) & _u2(0x7FFF)
    else:
        escapes = sections.take_some(numbers, "escapes")
        rest = _local.plane("rest", 4 * quarter)
        _unpack_six(sections.take(3 * quarter, "remainders").reshape(3, quarter), rest.reshape(4, quarter))
        rest = rest[:numbers]
        # Adding 0x8000 inverts the sign bit and nothing else.
        shift = ((centres - _u2(_OFFSET)) << 7) + (signs << 15)
    rest = rest.reshape(rows, width)
    result = np.empty((rows, width), _u2)
    taken = 0
    step = width if numbers <= _TILE_NUMBERS else max(_TILE_NUMBERS // rows // 8 * 8, 8)
    for start in range(0, width, step):
        tile = min(step, width - start)
        part = symbols[rows * start : rows * (start + tile)]
        channels = slice(start, start + tile)
        buffers = _local.tile(rows, tile)
        a, b, symbol = buffers.a, buffers.b, buffers.symbol
        _from_groups(part, symbol, group)
        np.copyto(a, symbol)
        np.left_shift(a, 8, out=a)
        np.copyto(b, rest[:, channels])
        np.bitwise_or(a, b, out=a)
        if half:
            # sign, exponent minus centre modulo 32, mantissa
            np.bitwise_and(a, _u2(0x7FFF), out=b)
            np.add(b, shift[channels], out=b)
            np.bitwise_and(b, _u2(0x7FFF), out=b)
            np.bitwise_and(a, _u2(0x8000), out=a)
            np.bitwise_or(a, b, out=a)
            np.bitwise_xor(a, signs[channels] << 15, out=result[:, channels])
            continue
        # sign, six exponent bits, mantissa, two zeros: spread the sign over the two missing exponent bits,
        # clear those, and the sign bit is in its place.
        signed = a.view(np.int16)
        np.right_shift(signed, 2, out=signed)
        np.bitwise_and(a, _u2(0x9FFF), out=a)
        taken += _unescape(part, buffers, escapes[taken:], shift[channels], group)
        np.add(a, shift[channels], out=result[:, channels])
    if taken != len(escapes):
        raise CorruptShardError(f"block has {len(escapes):,} escapes and {taken:,} symbols that need one")
    if dtype != "float32":
        return result
    low = sections.take(2 * numbers, "low halves").view("<u2").reshape(rows, width)
    wide = result.astype(np.uint32)
    wide <<= 16
    wide |= low
    return wide


def _unescape(part: np.ndarray, buffers: _Tile, escapes: np.ndarray, shift: np.ndarray, group: int) -> int:
    """Put true exponents back into ``buffers.a``; returns how many escapes this tile used."""
    a = buffers.a
    rows = len(a)
    mark, found = buffers.byte.reshape(-1), buffers.flags.reshape(-1)
    np.bitwise_or(part, _u1(0x81), out=mark)
    np.equal(mark, _u1(0xFF), out=found)
    at = _nonzero(found)
    if len(at) > len(escapes):
        raise CorruptShardError(f"block has {len(escapes):,} escapes but more symbols that need one")
    if len(at):
        outer, inner = np.divmod(at, rows * group)
        row, lane = np.divmod(inner, group)
        channel = outer * group + lane
        exponent = escapes[: len(at)].astype(_u2) << 7
        a[row, channel] = (a[row, channel] & _u2(0x807F)) + exponent - (shift[channel] & _u2(0x7FFF))
    return len(at)


def _to_groups(tile: np.ndarray, out: np.ndarray, group: int) -> None:
    """[n, w] in row order to [w / group][n][group], flat. Groups of eight move as single 64-bit words."""
    rows, width = tile.shape
    if group == 8:
        np.copyto(out.view(np.uint64).reshape(width // 8, rows), tile.view(np.uint64).T)
    else:
        np.copyto(out.reshape(width, rows), tile.T)


def _from_groups(part: np.ndarray, out: np.ndarray, group: int) -> None:
    """Inverse of ``_to_groups``."""
    rows, width = out.shape
    if group == 8:
        np.copyto(out.view(np.uint64), part.view(np.uint64).reshape(width // 8, rows).T)
    else:
        np.copyto(out, part.reshape(width, rows).T)


def _pack_six(rest: np.ndarray) -> np.ndarray:
    """Four quarters of six-bit numbers (in the top bits of a byte) to three: [4, q] to [3, q].

    Bytes 0, 1, 2 keep the first three quarters; the fourth goes, two bits each, into their low bits.
    """
    packed = np.empty((3, rest.shape[1]), _u1)
    np.right_shift(rest[3], 6, out=packed[0])
    np.right_shift(rest[3], 4, out=packed[1])
    np.right_shift(rest[3], 2, out=packed[2])
    np.bitwise_and(packed, _u1(3), out=packed)
    np.bitwise_or(packed, rest[:3], out=packed)
    return packed


def _unpack_six(packed: np.ndarray, out: np.ndarray) -> None:
    """Inverse of ``_pack_six``. Doubling by addition: NumPy has no fast left shift of bytes."""
    np.bitwise_and(packed, _u1(0xFC), out=out[:3])
    low = _local.plane("low", packed.size).reshape(packed.shape)
    np.bitwise_and(packed, _u1(3), out=low)
    last = low[0]
    for more in (low[1], low[2], None):
        np.add(last, last, out=last)
        np.add(last, last, out=last)
        if more is not None:
            np.bitwise_or(last, more, out=last)
    out[3] = last


def _nonzero(flags: np.ndarray) -> np.ndarray:
    """Indices of true values, few among many: whole words are skipped."""
    if flags.size % 8:
        return np.flatnonzero(flags)
    words = np.flatnonzero(flags.view(np.uint64) != 0)
    if not len(words):
        return words
    word, lane = np.nonzero(flags.reshape(-1, 8)[words])
    return words[word] * 8 + lane


# ---- sections


def _looks_compressible(plane: bytes) -> bool:
    """Whether a sample's order-0 entropy is clearly below 8 bits; mantissas normally are not."""
    middle = max(len(plane) - _SAMPLE_BYTES, 0) // 2
    sample = np.frombuffer(plane[middle : middle + _SAMPLE_BYTES], _u1)
    counts = np.bincount(sample)
    counts = counts[counts > 0]
    total = len(sample)
    if total < 64:
        return True
    entropy = float(np.log2(total) - (counts * np.log2(counts)).sum() / total)
    return entropy < min(7.0, 0.85 * np.log2(total))


def _section(plane: bytes | np.ndarray, *, zstd: bool) -> list[bytes]:
    if zstd:
        packed = _local.compressor.compress(plane)
        if len(packed) < len(plane):
            return [_SECTION.pack(_ZSTD, len(packed)), packed]
    raw = plane if isinstance(plane, bytes) else plane.tobytes()
    return [_SECTION.pack(_RAW, len(raw)), raw]


class _Sections:
    """Reads the length-prefixed sections of a payload, each with a size known beforehand."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = memoryview(payload)
        self._at = at

    def _next(self, what: str) -> tuple[int, memoryview]:
        if self._at + _SECTION.size > len(self._payload):
            raise CorruptShardError(f"block ends before its {what}")
        mode, length = _SECTION.unpack_from(self._payload, self._at)
        start = self._at + _SECTION.size
        if start + length > len(self._payload):
            raise CorruptShardError(f"block ends inside its {what}")
        self._at = start + length
        return mode, self._payload[start : self._at]

    def take(self, expected_bytes: int, what: str) -> np.ndarray:
        """uint8 [expected_bytes]; may be a read-only view of the payload."""
        mode, data = self._next(what)
        if mode == _RAW and len(data) == expected_bytes:
            return np.frombuffer(data, _u1)
        if mode == _CONSTANT and len(data) == 1:
            return np.full(expected_bytes, data[0], _u1)
        if mode == _ZSTD:
            return np.frombuffer(unzstd(data, expected_bytes, f"block's {what}"), _u1)
        raise CorruptShardError(
            f"block's {what} have mode {mode} and {len(data):,} bytes; expected {expected_bytes:,}"
        )

    def take_some(self, most_bytes: int, what: str) -> np.ndarray:
        """uint8 of a raw section whose length only its prefix tells."""
        mode, data = self._next(what)
        if mode != _RAW or len(data) > most_bytes:
            raise CorruptShardError(f"block's {what} have mode {mode} and {len(data):,} bytes")
        return np.frombuffer(data, _u1)

    def end(self) -> None:
        """Raise unless everything was read."""
        if self._at != len(self._payload):
            raise CorruptShardError(f"block has {len(self._payload) - self._at:,} bytes too many")
