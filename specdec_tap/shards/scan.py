"""Walk the frames of a file without trusting it: for live journals, repair and verification."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from ..errors import CorruptShardError, IncompleteShardError, ShardError
from .codec import BLOCK_HEAD, read_block_head
from .frames import (
    BLOCK,
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    INDEX,
    MAGIC,
    META,
    RECORD,
    FrameHead,
    Totals,
    check_payload,
    unpack_frame_head,
)
from .layout import ShardHeader, parse_json
from .records import Index, decode_record
from .source import ByteReader

_MAX_META_BYTES = HEADER_AREA_BYTES


@dataclass(slots=True)
class Scan:
    """What was found so far; pass it back to ``scan_frames`` to go on where it stopped."""

    header: ShardHeader | None = None
    totals: Totals = field(default_factory=Totals)
    index: Index = field(default_factory=Index)
    end: int = HEADER_AREA_BYTES
    """Offset behind the last good frame (before INDEX)."""
    sequence: int = 0
    """Number that the next frame must have."""
    was_sealed: bool = False
    """An INDEX frame was reached."""
    damaged: list[ShardError] = field(default_factory=list)
    """Payloads with a wrong checksum or content, with whole frames behind them. A damaged block keeps its
    ordinal, with 0 rows; a damaged record is left out."""
    problem: ShardError | None = None
    """Why the scan stopped before the end of the file; None at a clean end."""


def scan_frames(source: ByteReader, scan: Scan | None = None, *, check_payloads: bool = False) -> Scan:
    """Walk frames from where ``scan`` ended to the end of the file or the first frame that is not whole.

    Args:
        source: The file.
        scan: An earlier result for the same file, updated and returned.
        check_payloads: Read every BLOCK payload for its checksum. META and RECORD payloads are always
            checked.

    Returns:
        The scan. ``problem`` tells why it stopped, if not at a clean end; a torn last frame of a live
        journal is an ``IncompleteShardError`` there and simply means "not yet".
    """
    scan = Scan() if scan is None else scan
    scan.problem = None
    size = source.size()
    while scan.end < size and not scan.was_sealed:
        try:
            head = unpack_frame_head(source.read(scan.end, FRAME_HEAD_BYTES), scan.end)
            if head.sequence != scan.sequence or (head.kind == META) != (scan.sequence == 0):
                raise CorruptShardError(
                    f"frame at byte {scan.end:,} has kind {head.kind} and number {head.sequence:,}; "
                    f"expected number {scan.sequence:,}, and META only as number 0",
                    offset=scan.end,
                )
            if scan.end + FRAME_HEAD_BYTES + head.payload_bytes > size:
                raise IncompleteShardError(
                    f"file ends inside the frame at byte {scan.end:,}", offset=scan.end
                )
            if head.kind == INDEX:
                scan.was_sealed = True
                break
            try:
                _take_frame(source, scan, head, check_payloads)
            except ShardError as err:
                _step_over(source, scan, head, err)
        except ShardError as err:
            scan.problem = err
            break
    return scan


def _take_frame(source: ByteReader, scan: Scan, head: FrameHead, check_payloads: bool) -> None:
    at = scan.end + FRAME_HEAD_BYTES
    whole = check_payloads or head.kind != BLOCK
    if head.kind == META and head.payload_bytes > _MAX_META_BYTES:
        raise CorruptShardError(f"META frame has {head.payload_bytes:,} bytes", offset=scan.end)
    payload = source.read(at, head.payload_bytes if whole else BLOCK_HEAD.size)
    if whole:
        check_payload(head, payload, scan.end)
    if head.kind == META:
        scan.header = ShardHeader.from_json(parse_json(payload, "META frame"))
    elif head.kind == BLOCK:
        assert scan.header is not None, "META is frame 0"
        block = read_block_head(scan.header, payload)
        scan.index.blocks.append((scan.end, head.payload_bytes, *block))
        scan.totals = scan.totals.plus(
            num_blocks=1,
            num_rows=block.num_rows,
            final_rows=block.final_rows,
            raw_bytes=scan.header.raw_bytes(block.num_rows, block.final_rows),
            stored_bytes=head.payload_bytes,
        )
    elif head.kind == RECORD:
        meta = decode_record(payload)
        scan.index.records.append((scan.end, head.payload_bytes, meta.num_tokens, meta.covered_rows))
        scan.totals = scan.totals.plus(
            num_records=1,
            num_tokens=meta.num_tokens,
            response_tokens=meta.response_tokens,
            record_rows=meta.covered_rows,
        )
    scan.end = at + head.payload_bytes
    scan.sequence += 1


def _step_over(source: ByteReader, scan: Scan, head: FrameHead, err: ShardError) -> None:
    """Go on behind a damaged payload, whose length is known, if the next frame proves that it was once whole.

    A bad payload at the very end is a torn write, or one that a network file system does not show yet.
    """
    behind = scan.end + FRAME_HEAD_BYTES + head.payload_bytes
    if head.kind == META:
        raise err
    following = unpack_frame_head(source.read(behind, FRAME_HEAD_BYTES), behind)
    if following.sequence != scan.sequence + 1:
        raise err
    err.offset = scan.end if err.offset is None else err.offset
    scan.damaged.append(err)
    if head.kind == BLOCK:
        scan.index.blocks.append((scan.end, head.payload_bytes, 0, 0, 0, 0))
        scan.totals = scan.totals.plus(num_blocks=1, stored_bytes=head.payload_bytes)
    scan.end = behind
    scan.sequence += 1


def find_frame(source: ByteReader, start: int, stop: int) -> int | None:
    """Offset of the first valid frame head at or after ``start``, anywhere, or None. Reads 1 MiB at a
    time."""
    window = 1 << 20
    at = start
    while at < stop:
        data = source.read(at, min(window + FRAME_HEAD_BYTES, stop - at))
        hit = data.find(MAGIC)
        while hit >= 0:
            with contextlib.suppress(ShardError):
                unpack_frame_head(data[hit : hit + FRAME_HEAD_BYTES], at + hit)
                return at + hit
            hit = data.find(MAGIC, hit + 1)
        at += window
    return None
