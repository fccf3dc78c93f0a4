"""Arrays of hidden states to block payloads and back.

A block holds the aux states of consecutive positions and, for one consecutive range of its rows, the
final states. Numbers travel as raw bits (uint16 for bfloat16 and float16, uint32 for float32), so NaN
and infinity survive ``lossless`` bit by bit.

``lossless`` keeps every bit (lossless.py). ``fp8`` and ``int8`` keep about 2.6 % and 1.5 % of error per
number (lossy.py). ``docs/format.md`` has the layouts. All functions are pure and safe to call from
several threads; zstd and the compiled code release the GIL.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, CorruptShardError
from .layout import DTYPES, MAX_BLOCK_TOKENS, ShardHeader
from .lossless import decode_lossless, encode_lossless
from .lossy import AUX_STEPS, FINAL_STEPS, decode_fp8, decode_int8, encode_fp8, encode_int8
from .sections import Sections

BLOCK_HEAD = struct.Struct("<BBHIIIIIII")
"""codec, dtype, aux layers, hidden size, position, rows, first final row, final rows, two zeros."""
CODEC_IDS = {"lossless": 1, "fp8": 2, "int8": 3}
DTYPE_IDS = {name: i + 1 for i, name in enumerate(DTYPES)}


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
        rows > min(header.block_tokens, MAX_BLOCK_TOKENS)
        or final_row + final_rows > rows
        or (final_rows and header.final_hidden == "none")
        or (not final_rows and final_row)
        or zero
        or zero2
    ):
        raise CorruptShardError(
            f"block has {rows:,} rows with final states at [{final_row:,}, {final_row + final_rows:,}); "
            f"expected at most {header.block_tokens} rows"
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
    kept = final if num_final else None
    if header.codec == "lossless":
        for matrix in _matrices(aux, kept):
            # What the matrix before left in this thread's buffers must be taken out of them first.
            parts = [b"".join(parts), *encode_lossless(matrix, header.dtype)]
    else:
        if header.num_aux:
            fp8 = header.codec == "fp8"
            parts += encode_fp8(aux, header.dtype) if fp8 else encode_int8(aux, header.dtype, AUX_STEPS)
        if kept is not None:
            parts += encode_int8(kept[None], header.dtype, FINAL_STEPS)
    return b"".join(parts)


def erased_block(header: ShardHeader) -> bytes:
    """Payload that takes the place of a block whose states were erased: no rows, no sections."""
    codec, dtype = CODEC_IDS[header.codec], DTYPE_IDS[header.dtype]
    return BLOCK_HEAD.pack(codec, dtype, header.num_aux, header.hidden_size, 0, 0, 0, 0, 0, 0)


def decode_block(header: ShardHeader, payload: bytes) -> Block:
    """Inverse of ``encode_block``.

    Sizes are checked against the declared shape before anything is decompressed, so memory is bounded by
    the shape, whatever the bytes say.

    Raises:
        CorruptShardError: If the payload is not a block of this header.
    """
    head = read_block_head(header, payload)
    sections = Sections(payload, BLOCK_HEAD.size)
    if not head.num_rows:
        sections.end()
        empty = np.empty((header.num_aux, 0, header.hidden_size), header.bits_dtype)
        return Block(head.position, 0, empty, None, 0)
    states, final = (_decode_exact if header.codec == "lossless" else _decode_lossy)(header, head, sections)
    sections.end()
    return Block(head.position, head.num_rows, states.transpose(1, 0, 2), final, head.final_row)


def _decode_exact(
    header: ShardHeader, head: BlockHead, sections: Sections
) -> tuple[np.ndarray, np.ndarray | None]:
    """Bits [n, A, H] and [m, H] or None."""
    rows, num_aux, hidden = head.num_rows, header.num_aux, header.hidden_size
    together = head.final_rows == rows
    layers = num_aux + together
    states = np.empty((rows, 0, hidden), header.bits_dtype)
    if layers:
        states = decode_lossless(sections, rows, layers * hidden, header.dtype).reshape(rows, layers, hidden)
    final = states[:, num_aux] if together else None
    if head.final_rows and not together:
        final = decode_lossless(sections, head.final_rows, hidden, header.dtype)
    return states[:, :num_aux], final


def _decode_lossy(
    header: ShardHeader, head: BlockHead, sections: Sections
) -> tuple[np.ndarray, np.ndarray | None]:
    """Bits [n, A, H] and [m, H] or None."""
    rows, num_aux, hidden = head.num_rows, header.num_aux, header.hidden_size
    states = np.empty((rows, 0, hidden), header.bits_dtype)
    if num_aux and header.codec == "fp8":
        states = decode_fp8(sections, rows, num_aux * hidden, header.dtype)
    elif num_aux:
        states = decode_int8(sections, rows, num_aux, hidden, header.dtype)
    final = decode_int8(sections, head.final_rows, 1, hidden, header.dtype) if head.final_rows else None
    return states.reshape(rows, num_aux, hidden), final


def _matrices(aux: np.ndarray, final: np.ndarray | None) -> list[list[np.ndarray]]:
    """What to encode, matrix by matrix, as layers [n, H]: final states of all rows are one more layer."""
    matrices = [list(aux)] if len(aux) else []
    if final is None:
        return matrices
    if len(final) != aux.shape[1]:
        return [*matrices, [final]]
    return [[*aux, final]]
