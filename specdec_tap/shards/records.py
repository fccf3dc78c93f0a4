"""Payloads of RECORD and INDEX frames: compact, and bounded in memory whatever the bytes say."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field

import numpy as np
import zstandard

from ..errors import ConfigError, CorruptShardError
from .layout import (
    MAX_TOKENS,
    SPAN_KINDS,
    BlockRef,
    Piece,
    RecordMeta,
    Span,
    _Fields,
    dump_json,
    parse_json,
)

_RECORD_HEAD = struct.Struct("<HHIIII")
"""version 1, zero, JSON bytes, tokens, spans, pieces."""
_MAX_JSON_BYTES = 1 << 20
_INDEX_HEAD = struct.Struct("<HHIII")
"""version 1, zero, blocks, records, zero."""
MAX_SPANS = 1 << 16
MAX_PIECES = 1 << 18


class _Local(threading.local):
    """One zstd context per thread; it must not be shared."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def unzstd(data: bytes, expected_bytes: int, what: str) -> bytes:
    """Decompress one zstd frame that must hold exactly ``expected_bytes``.

    The size that the frame declares is compared first, so a bomb is refused before any memory is taken.
    """
    try:
        parameters = zstandard.get_frame_parameters(data)
        if parameters.content_size != expected_bytes:
            raise CorruptShardError(
                f"{what} unpacks to {parameters.content_size:,} bytes by its own account; expected "
                f"{expected_bytes:,}"
            )
        # One-shot decompression of a frame with a known size allocates that size and no window.
        out = _local.decompressor.decompress(data, max_output_size=expected_bytes, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as err:
        raise CorruptShardError(f"{what} does not decompress ({err})") from err
    if len(out) != expected_bytes:
        raise CorruptShardError(f"{what} unpacks to {len(out):,} bytes; expected {expected_bytes:,}")
    return out


def encode_record(meta: RecordMeta) -> bytes:
    """RECORD payload: a fixed head, then one zstd frame of JSON, spans, pieces and token ids."""
    text = dump_json(
        {
            "request_id": meta.request_id,
            "finish_reason": meta.finish_reason,
            "started_unix_s": meta.started_unix_s,
            "finished_unix_s": meta.finished_unix_s,
            "sampling": dict(meta.sampling),
            "lora": meta.lora,
            "flags": list(meta.flags),
        }
    )
    if len(text) > _MAX_JSON_BYTES:
        raise ConfigError(f"record's facts take {len(text):,} bytes as JSON; at most {_MAX_JSON_BYTES:,} fit")
    if len(meta.spans) > MAX_SPANS or len(meta.pieces) > MAX_PIECES:
        raise ConfigError(
            f"record has {len(meta.spans):,} spans and {len(meta.pieces):,} pieces; "
            f"at most {MAX_SPANS:,} and {MAX_PIECES:,} fit"
        )
    spans = np.array([(s.start, s.stop, SPAN_KINDS.index(s.kind)) for s in meta.spans], dtype="<i4")
    pieces = np.array(
        [(p.position, p.block.shard, p.block.block, p.row_start, p.row_stop) for p in meta.pieces],
        dtype="<i4",
    )
    body = text + spans.tobytes() + pieces.tobytes() + meta.token_ids.astype("<i4").tobytes()
    head = _RECORD_HEAD.pack(1, 0, len(text), meta.num_tokens, len(meta.spans), len(meta.pieces))
    return head + zstandard.ZstdCompressor(level=3).compress(body)


def decode_record(payload: bytes) -> RecordMeta:
    """Inverse of ``encode_record``.

    Raises:
        CorruptShardError: For any violation; nothing larger than the record's own declared, capped size is
            allocated.
    """
    if len(payload) < _RECORD_HEAD.size:
        raise CorruptShardError("RECORD payload is shorter than its head")
    version, zero, json_bytes, num_tokens, num_spans, num_pieces = _RECORD_HEAD.unpack_from(payload)
    if version != 1 or zero != 0 or json_bytes > _MAX_JSON_BYTES or not 1 <= num_tokens <= MAX_TOKENS:
        raise CorruptShardError(
            f"RECORD head says version {version}, {json_bytes:,} bytes of JSON, {num_tokens:,} tokens; "
            "expected version 1 within the format's limits"
        )
    if num_spans > min(num_tokens, MAX_SPANS) or num_pieces > min(num_tokens, MAX_PIECES):
        raise CorruptShardError(
            f"RECORD has {num_spans:,} spans and {num_pieces:,} pieces for {num_tokens:,} tokens"
        )
    sizes = [json_bytes, 12 * num_spans, 20 * num_pieces, 4 * num_tokens]
    body = unzstd(payload[_RECORD_HEAD.size :], sum(sizes), "RECORD payload")
    ends = np.cumsum(sizes)
    f = _Fields(parse_json(body[:json_bytes], "record"), "record")
    spans = np.frombuffer(body, "<i4", 3 * num_spans, int(ends[0])).reshape(-1, 3).tolist()
    pieces = np.frombuffer(body, "<i4", 5 * num_pieces, int(ends[1])).reshape(-1, 5).tolist()
    flags = f.array("flags", 64)
    if not all(isinstance(flag, str) and len(flag) <= 256 for flag in flags):
        raise CorruptShardError("record: flags holds something that is not a short string")
    try:
        return RecordMeta(
            request_id=f.text("request_id"),
            token_ids=np.frombuffer(body, "<i4", num_tokens, int(ends[2])).astype(np.int32),
            spans=tuple(Span(a, b, SPAN_KINDS[k]) if 0 <= k < 2 else Span(a, b, "?") for a, b, k in spans),  # type: ignore[arg-type]  # RecordMeta refuses "?"
            pieces=tuple(Piece(p, BlockRef(s, b), r0, r1) for p, s, b, r0, r1 in pieces),
            finish_reason=f.text("finish_reason"),  # type: ignore[arg-type]  # RecordMeta checks the choice
            started_unix_s=f.number("started_unix_s"),
            finished_unix_s=f.number("finished_unix_s"),
            sampling=f.scalars("sampling", allow_none=True),
            lora=f.optional_text("lora"),
            flags=tuple(flags),
        )
    except ConfigError as err:
        raise CorruptShardError(f"record is inconsistent: {err}") from err


BLOCK_COLUMNS = (("offset", "<u8"), ("payload_bytes", "<u4"), ("position", "<u4"), ("num_rows", "<u4"),
                 ("final_row", "<u4"), ("final_rows", "<u4"))  # fmt: skip
RECORD_COLUMNS = (("offset", "<u8"), ("payload_bytes", "<u4"), ("num_tokens", "<u4"), ("covered_rows", "<u4"))


@dataclass(slots=True)
class Index:
    """Where each block and record of one shard is; rows are appended in file order.

    ``offset`` is the file offset of the frame's head.
    """

    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """(offset, payload_bytes, position, num_rows, final_row, final_rows) each."""
    records: list[tuple[int, ...]] = field(default_factory=list)
    """(offset, payload_bytes, num_tokens, covered_rows) each."""


def encode_index(index: Index) -> bytes:
    """INDEX payload: a fixed head, then one zstd frame of columns, blocks first."""
    body = b""
    for rows, columns in ((index.blocks, BLOCK_COLUMNS), (index.records, RECORD_COLUMNS)):
        table = np.array(rows, dtype=np.uint64).reshape(len(rows), len(columns))
        body += b"".join(table[:, i].astype(dtype).tobytes() for i, (_, dtype) in enumerate(columns))
    head = _INDEX_HEAD.pack(1, 0, len(index.blocks), len(index.records), 0)
    return head + zstandard.ZstdCompressor(level=3).compress(body)


MAX_FRAMES = 1 << 23
"""Most blocks and records of one shard: a reader holds them in memory, and a sparse file claims any size."""


def decode_index(payload: bytes, max_entries: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inverse of ``encode_index``.

    Args:
        payload: The INDEX frame's payload.
        max_entries: Most frames that the file has room for; a larger index is refused unread.

    Returns:
        ``(blocks, records)``: int64 arrays by column name.

    Raises:
        CorruptShardError: If the payload is not an index.
    """
    if len(payload) < _INDEX_HEAD.size:
        raise CorruptShardError("INDEX payload is shorter than its head")
    version, zero, num_blocks, num_records, zero2 = _INDEX_HEAD.unpack_from(payload)
    if version != 1 or zero or zero2 or num_blocks + num_records > min(max_entries, MAX_FRAMES):
        raise CorruptShardError(
            f"INDEX head says version {version}, {num_blocks:,} blocks, {num_records:,} records"
        )
    sizes = [num_blocks * np.dtype(d).itemsize for _, d in BLOCK_COLUMNS]
    sizes += [num_records * np.dtype(d).itemsize for _, d in RECORD_COLUMNS]
    body = unzstd(payload[_INDEX_HEAD.size :], sum(sizes), "INDEX payload")
    tables: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
    at = 0
    for table, count, columns in zip(
        tables, (num_blocks, num_records), (BLOCK_COLUMNS, RECORD_COLUMNS), strict=True
    ):
        for name, dtype in columns:
            table[name] = np.frombuffer(body, dtype, count, at).astype(np.int64)
            at += count * np.dtype(dtype).itemsize
    return tables
