"""Arrays of hidden states to block payloads and back.

A block holds the aux states of consecutive positions and, for one consecutive range of its rows, the
final states. Numbers travel as raw bits (uint16 for bfloat16 and float16, uint32 for float32), so NaN and
infinity survive ``lossless`` bit by bit.

Lossless: each number is rotated left by one bit, which brings the exponent to the top byte and the sign to
the bottom bit. The top byte, minus a per-channel centre, is all that compresses (about 2.7 of 8 bits); it
goes through zstd with next to no match search, so only its Huffman coder works. The rest is stored as it is.

All functions are pure and safe to call from several threads; zstd releases the GIL.
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
"""codec, dtype, aux layers, hidden size, position, rows, first row with a final state, final rows, two
zeros.
"""
CODEC_IDS = {"lossless": 1, "fp8": 2, "int8": 3}
DTYPE_IDS = {name: i + 1 for i, name in enumerate(DTYPES)}

_SECTION = struct.Struct("<BI")
_RAW, _ZSTD, _CONSTANT = 0, 1, 2
_SAMPLE_BYTES = 4096
_MIN_CENTRED_ROWS = 8


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


_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: a zstd context must not be shared."""
    made = getattr(_local, "compressor", None)
    if made is None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
        )
        made = _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return made


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
    codec, dtype, num_aux, hidden, position, rows, final_row, final_rows, zero, zero2 = (
        BLOCK_HEAD.unpack_from(payload)
    )
    expected = (CODEC_IDS[header.codec], DTYPE_IDS[header.dtype], header.num_aux, header.hidden_size)
    if (codec, dtype, num_aux, hidden) != expected:
        raise CorruptShardError(
            f"block has (codec, dtype, aux layers, hidden size) = {(codec, dtype, num_aux, hidden)}; "
            f"the shard's header says {expected}"
        )
    if (
        not 1 <= rows <= min(header.block_tokens, MAX_BLOCK_TOKENS)
        or final_row + final_rows > rows
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
            f"{final_row}; "
            f"expected 1 to {header.block_tokens} rows that hold all final states"
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
    if header.num_aux:
        parts += _encode_lossless(aux.transpose(1, 0, 2).reshape(rows, -1))
    if final is not None and num_final:
        parts += _encode_lossless(final)
    return b"".join(parts)


def decode_block(header: ShardHeader, payload: bytes) -> Block:
    """Inverse of ``encode_block``.

    Sizes are checked against the declared shape before anything is decompressed, so memory is bounded by the
    shape, whatever the bytes say.

    Raises:
        CorruptShardError: If the payload is not a block of this header.
    """
    head = read_block_head(header, payload)
    hidden, bits = header.hidden_size, header.bits_dtype
    sections = _Sections(payload, BLOCK_HEAD.size)
    if header.codec != "lossless":
        raise CorruptShardError(f"codec {header.codec!r} cannot be read by this version")
    aux = np.empty((head.num_rows, 0, hidden), bits)
    if header.num_aux:
        aux = _decode_lossless(sections, head.num_rows, header.num_aux * hidden, bits)
        aux = aux.reshape(head.num_rows, header.num_aux, hidden)
    final = _decode_lossless(sections, head.final_rows, hidden, bits) if head.final_rows else None
    sections.end()
    return Block(head.position, head.num_rows, aux.transpose(1, 0, 2), final, head.final_row)


def _encode_lossless(bits: np.ndarray) -> list[bytes]:
    """Sections of one matrix [n, W]: centre, top bytes, then each lower byte plane."""
    width = bits.dtype.itemsize * 8
    rotated = np.left_shift(bits, 1)
    rotated |= np.right_shift(bits, width - 1)
    top = np.right_shift(rotated, width - 8).astype(np.uint8)
    parts = []
    if top.shape[0] >= _MIN_CENTRED_ROWS:
        # Any centre is correct; the mean of the top bytes is close to their median and much cheaper.
        centre = (top.sum(axis=0, dtype=np.uint32) // np.uint32(top.shape[0])).astype(np.uint8)
        top -= centre
        parts += _section(centre.tobytes(), zstd=True)
    else:
        parts += [_SECTION.pack(_CONSTANT, 1), b"\0"]
    parts += _section(top.tobytes(), zstd=True)
    for shift in range(0, width - 8, 8):
        low = np.right_shift(rotated, shift).astype(np.uint8).tobytes()
        parts += _section(low, zstd=_looks_compressible(low))
    return parts


def _decode_lossless(sections: _Sections, rows: int, width: int, bits: np.dtype) -> np.ndarray:
    """Bits [rows, width]."""
    num_bits = bits.itemsize * 8
    centre = sections.take(width, "channel centres")
    top = sections.take(rows * width, "top bytes").reshape(rows, width) + centre
    out = top.astype(bits)
    out <<= num_bits - 8
    for shift in range(0, num_bits - 8, 8):
        low = sections.take(rows * width, f"low bytes {shift // 8}").reshape(rows, width).astype(bits)
        low <<= shift
        out |= low
    rotated = np.right_shift(out, 1)
    out <<= num_bits - 1
    rotated |= out
    return rotated


def _looks_compressible(plane: bytes) -> bool:
    """Whether a sample's order-0 entropy is clearly below 8 bits; mantissas normally are not."""
    counts = np.bincount(np.frombuffer(plane[:_SAMPLE_BYTES], np.uint8))
    counts = counts[counts > 0]
    total = counts.sum()
    entropy = float(np.log2(total) - (counts * np.log2(counts)).sum() / total)
    return entropy < min(7.0, 0.9 * np.log2(max(total, 2)))


def _section(plane: bytes, *, zstd: bool) -> list[bytes]:
    if zstd:
        packed = _compressor().compress(plane)
        if len(packed) < len(plane):
            return [_SECTION.pack(_ZSTD, len(packed)), packed]
    return [_SECTION.pack(_RAW, len(plane)), plane]


class _Sections:
    """Reads the length-prefixed sections of a payload, each with a size known beforehand."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = memoryview(payload)
        self._at = at

    def take(self, expected_bytes: int, what: str) -> np.ndarray:
        """uint8 [expected_bytes]; read-only where it is a view of the payload."""
        if self._at + _SECTION.size > len(self._payload):
            raise CorruptShardError(f"block ends before its {what}")
        mode, length = _SECTION.unpack_from(self._payload, self._at)
        start = self._at + _SECTION.size
        if start + length > len(self._payload):
            raise CorruptShardError(f"block ends inside its {what}")
        self._at = start + length
        data = self._payload[start : self._at]
        if mode == _RAW and length == expected_bytes:
            return np.frombuffer(data, np.uint8)
        if mode == _CONSTANT and length == 1:
            return np.full(expected_bytes, data[0], np.uint8)
        if mode == _ZSTD:
            return np.frombuffer(unzstd(data, expected_bytes, f"block's {what}"), np.uint8)
        raise CorruptShardError(
            f"block's {what} have mode {mode} and {length:,} bytes; expected {expected_bytes:,}"
        )

    def end(self) -> None:
        """Raise unless everything was read."""
        if self._at != len(self._payload):
            raise CorruptShardError(f"block has {len(self._payload) - self._at:,} bytes too many")
