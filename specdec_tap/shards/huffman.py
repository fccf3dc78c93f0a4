"""Mode 3 of a section: a Huffman code over bytes, made to be decoded fast (docs/format.md).

The coder is compiled (_native.c). Where it could not be, nothing is written in this mode (sections.py takes
zstd), and what others wrote is decoded here with NumPy, some hundred times slower.
"""

from __future__ import annotations

import logging

import numpy as np

from ..errors import CorruptShardError

try:
    from . import _native as native
except ImportError:  # installed without a C compiler
    native = None

logger = logging.getLogger(__name__)

STREAMS = 8
MIN_BITS, MAX_BITS = 2, 11
CHUNK = 1 << 18
LENGTHS_BYTES = 128
CHUNK_HEAD = LENGTHS_BYTES + 4 * STREAMS

_STRIDE = 64
_warned = False


def encode(plane: np.ndarray, out: np.ndarray) -> int:
    """Code uint8 ``plane`` into ``out``; bytes written, or 0 if this mode does not serve or does not fit."""
    return native.huffman_encode(plane, out) if native else 0


def decode(data: memoryview, out: np.ndarray, what: str) -> None:
    """Fill uint8 ``out`` from all of ``data``.

    Raises:
        CorruptShardError: If ``data`` is not the code of that many bytes. ``what`` names it.
    """
    if native:
        try:
            native.huffman_decode(data, out)
        except ValueError as err:
            raise CorruptShardError(f"{what} do not decode ({err})") from err
        return
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "reading Huffman-coded shards without the compiled codec, some hundred times slower; to get it, "
            "reinstall specdec-tap where a C compiler (gcc or clang) is on PATH"
        )
    at = 0
    for start in range(0, len(out), CHUNK):
        at = _decode_chunk(data, at, out[start : start + CHUNK], what)
    if at != len(data):
        raise CorruptShardError(f"{what} have {len(data) - at:,} bytes too many")


def _decode_chunk(data: memoryview, at: int, out: np.ndarray, what: str) -> int:
    """Decode the chunk at ``at``; returns where it ends."""
    head = np.frombuffer(data[at : at + CHUNK_HEAD], np.uint8)
    if len(head) < CHUNK_HEAD:
        raise CorruptShardError(f"{what} end inside a chunk's head")
    packed = head[:LENGTHS_BYTES]
    lengths = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int64)
    used = lengths[lengths > 0]
    if np.any((used < MIN_BITS) | (used > MAX_BITS)) or (1 << (MAX_BITS - used)).sum() != 1 << MAX_BITS:
        raise CorruptShardError(f"{what} have code lengths that are no complete code of 2 to 11 bits")
    symbols, bits = _lookup_table(lengths)
    at += CHUNK_HEAD
    per_stream = -(-len(out) // STREAMS)
    for stream, size in enumerate(head[LENGTHS_BYTES:].view("<u4").tolist()):
        part = out[stream * per_stream : (stream + 1) * per_stream]
        if size > len(data) - at or size > (MAX_BITS * len(part) + 7) // 8:
            raise CorruptShardError(f"{what} have a stream of {size:,} bytes for {len(part):,} symbols")
        if not _decode_stream(np.frombuffer(data[at : at + size], np.uint8), part, symbols, bits):
            raise CorruptShardError(f"{what} have a stream that does not end with its last symbol")
        at += size
    return at


def _lookup_table(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symbol and code length for each value of the next 11 bits, the first bit being the lowest."""
    by_code = np.argsort(lengths, kind="stable")[np.count_nonzero(lengths == 0) :]
    ordered = lengths[by_code]
    # In the order of codes, each takes the next 2^(11 - length) of all values of 11 bits, highest bit first.
    spread = np.repeat(np.arange(len(by_code)), 1 << (MAX_BITS - ordered))
    index = np.arange(1 << MAX_BITS)
    reversed_bits = sum(((index >> i) & 1) << (MAX_BITS - 1 - i) for i in range(MAX_BITS))
    entry = spread[reversed_bits]
    return by_code[entry].astype(np.uint8), ordered[entry].astype(np.int32)


def _decode_stream(data: np.ndarray, out: np.ndarray, symbols: np.ndarray, bits: np.ndarray) -> bool:
    """Fill ``out``; whether the data then ends, padded with zero bits.

    The code that starts at each bit tells where the next one starts. Following these links doubled six
    times visits every 64th symbol; the ones between are found for all of them at once.
    """
    if not len(out):
        return not len(data)
    if not len(data):
        return False
    end = 8 * len(data)
    padded = np.concatenate([data, np.zeros(2, np.uint8)]).astype(np.int32)
    words = padded[:-2] | padded[1:-1] << 8 | padded[2:] << 16
    window = ((words[:, None] >> np.arange(8, dtype=np.int32)) & ((1 << MAX_BITS) - 1)).reshape(-1)
    after = np.empty(end + 1, np.int32)
    np.minimum(np.arange(end, dtype=np.int32) + bits[window], end, out=after[:-1])
    after[-1] = end
    links = [after]
    while 1 << len(links) < 2 * _STRIDE:
        links.append(links[-1][links[-1]])
    starts = np.empty(-(-len(out) // _STRIDE), np.int32)
    at = 0
    for i in range(len(starts)):
        starts[i] = at
        at = links[-1][at]
    places = starts[:, None]
    for link in links[-2::-1]:
        places = np.stack([places, link[places]], axis=2).reshape(len(starts), -1)
    places = places.reshape(-1)[: len(out)]
    if places[-1] == end:
        return False
    found = window[places]
    out[:] = symbols[found]
    stop = int(places[-1]) + int(bits[found[-1]])
    return stop <= end and stop > end - 8 and (stop == end or not data[-1] >> (stop & 7))
