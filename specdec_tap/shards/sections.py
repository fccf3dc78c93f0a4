"""Pieces that every codec is made of: length-prefixed sections, per-thread buffers, the order of symbols."""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from ..errors import CorruptShardError
from . import huffman
from .records import unzstd

SECTION = struct.Struct("<BI")
"""mode, stored bytes."""
RAW, ZSTD, CONSTANT, HUFFMAN, COMPACT = 0, 1, 2, 3, 4

u1, u2 = np.uint8, np.uint16

Buffer = bytes | np.ndarray
"""What ``bytes.join`` takes: arrays are uint8."""

_SAMPLE_BYTES = 1024
_COUNT_LOG2 = np.arange(_SAMPLE_BYTES + 1) * np.log2(np.maximum(np.arange(_SAMPLE_BYTES + 1), 1))
"""n log2 n."""
_SURELY_HUFFMAN = 4096
"""For fewer symbols the table of codes counts, and zstd may be smaller."""
TILE_NUMBERS = 64 * 2304
"""Work on so many numbers at a time: all buffers of a tile fit the second-level cache."""
MIN_CENTRED_ROWS = 16
"""Below this many rows, per-channel centres cost more than they save."""


class Tile:
    """Buffers for one tile of n rows and w channels; contents are undefined between uses."""

    def __init__(self, rows: int, width: int) -> None:
        shape = (rows, width)
        self.a = np.empty(shape, u2)
        self.b = np.empty(shape, u2)
        self.symbol = np.empty(shape, u1)
        self.byte = np.empty(shape, u1)
        self.flags = np.empty(shape, np.bool_)
        self.top = np.empty((rows // 4, width), u1)


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
        self._tiles: dict[tuple[int, int], Tile] = {}
        self._planes: dict[str, np.ndarray] = {}

    def tile(self, rows: int, width: int) -> Tile:
        """Buffers of this shape; a few shapes are kept, whole blocks being the common one."""
        tile = self._tiles.get((rows, width))
        if tile is None:
            if len(self._tiles) >= 4:
                self._tiles.pop(next(iter(self._tiles)))
            tile = self._tiles[rows, width] = Tile(rows, width)
        return tile

    def plane(self, name: str, size: int) -> np.ndarray:
        """uint8 [size], contents undefined, valid until the next call with this name."""
        held = self._planes.get(name)
        if held is None or held.size < size:
            held = self._planes[name] = np.empty(size, u1)
        return held[:size]


local = _Local()


def to_groups(tile: np.ndarray, out: np.ndarray, group: int) -> None:
    """[n, w] in row order to [w / group][n][group], flat. Groups of eight move as single 64-bit words."""
    rows, width = tile.shape
    if group == 8:
        np.copyto(out.view(np.uint64).reshape(width // 8, rows), tile.view(np.uint64).T)
    else:
        np.copyto(out.reshape(width, rows), tile.T)


def from_groups(part: np.ndarray, out: np.ndarray, group: int) -> None:
    """Inverse of ``to_groups``."""
    rows, width = out.shape
    if group == 8:
        np.copyto(out.view(np.uint64), part.view(np.uint64).reshape(width // 8, rows).T)
    else:
        np.copyto(out, part.reshape(width, rows).T)


def nonzero(flags: np.ndarray) -> np.ndarray:
    """Indices of true values, few among many: whole words are skipped."""
    if flags.size % 8:
        return np.flatnonzero(flags)
    words = np.flatnonzero(flags.view(np.uint64) != 0)
    if not len(words):
        return words
    word, lane = np.nonzero(flags.reshape(-1, 8)[words])
    return words[word] * 8 + lane


def looks_compressible(plane: bytes | np.ndarray) -> bool:
    """Whether a sample's order-0 entropy is clearly below 8 bits; mantissas normally are not."""
    middle = max(len(plane) - _SAMPLE_BYTES, 0) // 2
    sample = np.frombuffer(plane, u1)[middle : middle + _SAMPLE_BYTES]
    total = len(sample)
    if total < 64:
        return True
    entropy = _COUNT_LOG2[total] - _COUNT_LOG2[np.bincount(sample)].sum()
    return float(entropy) < total * min(7.0, 0.85 * np.log2(total))


def symbol_section(plane: np.ndarray) -> list[Buffer]:
    """A section of symbols: Huffman-coded where that can be written, or zstd.

    Like those of ``section``, its bytes may lie in a buffer that this thread uses again.
    """
    packed = local.plane("packed", len(plane))
    size = huffman.encode(plane, packed)
    coded = [SECTION.pack(HUFFMAN, size), packed[:size]]
    if size and len(plane) >= _SURELY_HUFFMAN:
        return coded
    other = section(plane, zstd=True)
    return coded if 0 < size < len(other[1]) else other


def section(plane: bytes | np.ndarray, *, zstd: bool) -> list[Buffer]:
    """A section as it is, or as zstd where that is smaller."""
    if zstd:
        packed = local.compressor.compress(plane)
        if len(packed) < len(plane):
            return [SECTION.pack(ZSTD, len(packed)), packed]
    return [SECTION.pack(RAW, len(plane)), plane]


class Sections:
    """Reads the length-prefixed sections of a payload, each with a size known beforehand."""

    def __init__(self, payload: bytes, at: int) -> None:
        self.payload = payload
        self.at = at
        """Where the next section begins; who reads it from ``payload`` moves this to its end."""

    def _next(self, what: str) -> tuple[int, memoryview]:
        if self.at + SECTION.size > len(self.payload):
            raise CorruptShardError(f"block ends before its {what}")
        mode, length = SECTION.unpack_from(self.payload, self.at)
        start = self.at + SECTION.size
        if start + length > len(self.payload):
            raise CorruptShardError(f"block ends inside its {what}")
        self.at = start + length
        return mode, memoryview(self.payload)[start : self.at]

    def starts_compact(self) -> bool:
        """Whether a matrix in the compact form follows."""
        return self.at < len(self.payload) and self.payload[self.at] == COMPACT

    def take(self, expected_bytes: int, what: str) -> np.ndarray:
        """uint8 [expected_bytes]; may be a read-only view of the payload, or a buffer that this thread
        uses again for the next section of this name."""
        mode, data = self._next(what)
        if mode == RAW and len(data) == expected_bytes:
            return np.frombuffer(data, u1)
        if mode == CONSTANT and len(data) == 1:
            return np.full(expected_bytes, data[0], u1)
        if mode == ZSTD:
            return np.frombuffer(unzstd(data, expected_bytes, f"block's {what}"), u1)
        if mode == HUFFMAN:
            plane = local.plane(f"taken {what}", expected_bytes)
            huffman.decode(data, plane, f"block's {what}")
            return plane
        raise CorruptShardError(
            f"block's {what} have mode {mode} and {len(data):,} bytes; expected {expected_bytes:,}"
        )

    def take_mode(self, mode: int, what: str) -> memoryview:
        """Data as it is stored of a section that must have this mode."""
        found, data = self._next(what)
        if found != mode:
            raise CorruptShardError(f"block's {what} have mode {found}; expected {mode}")
        return data

    def take_some(self, most_bytes: int, what: str) -> np.ndarray:
        """uint8 of a raw section whose length only its prefix tells."""
        mode, data = self._next(what)
        if mode != RAW or len(data) > most_bytes:
            raise CorruptShardError(f"block's {what} have mode {mode} and {len(data):,} bytes")
        return np.frombuffer(data, u1)

    def end(self) -> None:
        """Raise unless everything was read."""
        if self.at != len(self.payload):
            raise CorruptShardError(f"block has {len(self.payload) - self.at:,} bytes too many")
