"""Bytes of a shard file: the reserved header area, frames and their checksums.

A shard is a safetensors file whose data area is one run of frames ("frames", a U8 tensor) and
one INDEX frame ("index", a U8 tensor). While it is written the first eight bytes are zero, so no
safetensors reader takes it for whole, and frames are appended behind the reserved area.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from ..errors import CorruptShardError, IncompleteShardError, UnsupportedFormatError
from .layout import FORMAT_VERSION, ShardHeader, dump_json, parse_json

HEADER_AREA_BYTES = 16384
"""Offset of the first frame. A power of two pages, so that frames never share a page with the header."""
SEALED_SUFFIX = ".safetensors"
OPEN_SUFFIX = ".open"

MAGIC = b"SDTF"
META, BLOCK, RECORD, INDEX = 1, 2, 3, 4
KIND_NAMES = {META: "META", BLOCK: "BLOCK", RECORD: "RECORD", INDEX: "INDEX"}
FRAME_HEAD = struct.Struct("<4sBBHIIQQ")
"""magic, kind, version 1, zero, payload bytes, check of this head, sequence number, check of the payload."""
FRAME_HEAD_BYTES = FRAME_HEAD.size
MAX_PAYLOAD_BYTES = 1 << 30

_CHECK_AT = 12
_ZERO_CHECK = b"0" * 16
_CHECK_FIELD = re.compile(rb'"checksum":"([0-9a-f]{16})"')


class FrameHead(NamedTuple):
    """A frame's head after its own checksum was found right."""

    kind: int
    payload_bytes: int
    sequence: int
    payload_check: int


def _head_check(head: bytes) -> int:
    return xxhash.xxh3_64_intdigest(head[:_CHECK_AT] + head[_CHECK_AT + 4 :]) & 0xFFFFFFFF


def pack_frame_head(kind: int, sequence: int, payload: bytes) -> bytes:
    """32 bytes that go before ``payload``."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(payload):,} bytes is over the format's {MAX_PAYLOAD_BYTES:,}")
    check = xxhash.xxh3_64_intdigest(payload)
    head = FRAME_HEAD.pack(MAGIC, kind, 1, 0, len(payload), 0, sequence, check)
    return head[:_CHECK_AT] + struct.pack("<I", _head_check(head)) + head[_CHECK_AT + 4 :]


def unpack_frame_head(head: bytes, offset: int) -> FrameHead:
    """Parse and check 32 bytes.

    Args:
        head: Exactly ``FRAME_HEAD_BYTES`` bytes, or fewer at a torn end.
        offset: Where they were found in the file; for the message.

    Raises:
        IncompleteShardError: Fewer bytes than a head.
        CorruptShardError: Wrong magic, checksum, or a field out of range.
    """
    if len(head) < FRAME_HEAD_BYTES:
        raise IncompleteShardError(f"file ends inside a frame head at byte {offset:,}", offset=offset)
    magic, kind, version, zero, payload_bytes, check, sequence, payload_check = FRAME_HEAD.unpack(head)
    if magic != MAGIC or check != _head_check(head):
        raise CorruptShardError(f"no valid frame at byte {offset:,}", offset=offset)
    if version != 1 or zero != 0 or kind not in KIND_NAMES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise CorruptShardError(
            f"frame at byte {offset:,} has kind {kind}, version {version}, {payload_bytes:,} bytes; "
            "expected kind 1 to 4, version 1, at most 1 GiB",
            offset=offset,
        )
    return FrameHead(kind, payload_bytes, sequence, payload_check)


def check_payload(head: FrameHead, payload: bytes, offset: int) -> None:
    """Raise unless ``payload`` is the one the head was written for."""
    if len(payload) != head.payload_bytes:
        raise IncompleteShardError(
            f"file ends inside the {KIND_NAMES[head.kind]} frame at byte {offset:,}", offset=offset
        )
    if xxhash.xxh3_64_intdigest(payload) != head.payload_check:
        raise CorruptShardError(
            f"checksum of the {KIND_NAMES[head.kind]} frame at byte {offset:,} is wrong", offset=offset
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over one shard, kept in the header so that listing reads nothing else."""

    num_records: int = 0
    num_tokens: int = 0
    """Tokens of all records, prompt and response."""
    response_tokens: int = 0
    num_blocks: int = 0
    num_rows: int = 0
    """Positions stored in this shard's blocks."""
    final_rows: int = 0
    """Of those, positions that also have a final state."""
    record_rows: int = 0
    """Positions that this shard's records cover, through blocks of any shard."""
    raw_bytes: int = 0
    """The stored rows, uncompressed."""
    stored_bytes: int = 0
    """The block payloads as stored."""

    def plus(self, **more: int) -> Totals:
        """Copy with each named count increased."""
        values = {name: getattr(self, name) + more.get(name, 0) for name in self.__slots__}
        return Totals(**values)


def pack_header_area(header: ShardHeader, totals: Totals, frames_bytes: int, index_bytes: int) -> bytes:
    """The first ``HEADER_AREA_BYTES`` of a sealed shard: a safetensors header padded with spaces."""
    metadata = {
        "format": "specdec-tap",
        "format_version": str(FORMAT_VERSION),
        "checksum": _ZERO_CHECK.decode(),
        "header": dump_json(header.to_json()).decode("ascii"),
        "totals": dump_json({name: getattr(totals, name) for name in totals.__slots__}).decode("ascii"),
    }
    text = dump_json(
        {
            "__metadata__": metadata,
            "frames": {"dtype": "U8", "shape": [frames_bytes], "data_offsets": [0, frames_bytes]},
            "index": {
                "dtype": "U8",
                "shape": [index_bytes],
                "data_offsets": [frames_bytes, frames_bytes + index_bytes],
            },
        }
    )
    room = HEADER_AREA_BYTES - 8
    if len(text) > room:
        raise ValueError(f"shard header has {len(text):,} bytes; the reserved area holds {room:,}")
    area = struct.pack("<Q", room) + text.ljust(room, b" ")
    digest = b"%016x" % xxhash.xxh3_64_intdigest(area)
    return area.replace(b'"checksum":"' + _ZERO_CHECK + b'"', b'"checksum":"' + digest + b'"', 1)


class SealedHead(NamedTuple):
    """What the header area of a sealed shard says."""

    header: ShardHeader
    totals: Totals
    frames_bytes: int
    index_bytes: int


def unpack_header_area(area: bytes, file_bytes: int) -> SealedHead:
    """Parse and check the first ``HEADER_AREA_BYTES`` of a sealed shard.

    Args:
        area: The first bytes of the file.
        file_bytes: The whole file's size, which must match the header exactly.

    Raises:
        UnsupportedFormatError: Not a specdec-tap shard, or a newer one.
        IncompleteShardError: The file is shorter than its header says.
        CorruptShardError: Anything else that is wrong.
    """
    if len(area) < 8:
        raise IncompleteShardError(f"file has {len(area)} bytes; expected at least {HEADER_AREA_BYTES:,}")
    length = struct.unpack_from("<Q", area)[0]
    if length != HEADER_AREA_BYTES - 8:
        raise UnsupportedFormatError(
            f"header length is {length:,}; a specdec-tap shard has {HEADER_AREA_BYTES - 8:,}. "
            "This is not a shard, or it is damaged"
        )
    if len(area) < HEADER_AREA_BYTES:
        raise IncompleteShardError(f"file ends after {len(area):,} bytes, inside its header")
    found = _CHECK_FIELD.findall(area)
    if len(found) != 1:
        raise UnsupportedFormatError(
            "no specdec-tap metadata in the header; this is some other safetensors file"
        )
    zeroed = _CHECK_FIELD.sub(b'"checksum":"' + _ZERO_CHECK + b'"', area)
    if xxhash.xxh3_64_intdigest(zeroed) != int(found[0], 16):
        raise CorruptShardError("checksum of the header is wrong", offset=0)
    data = parse_json(area[8:].rstrip(b" "), "header")
    try:
        metadata = data["__metadata__"]
        if metadata["format"] != "specdec-tap":
            raise UnsupportedFormatError("this is some other program's safetensors file")
        if metadata["format_version"] != str(FORMAT_VERSION):
            raise UnsupportedFormatError(
                f"format_version is {metadata['format_version']!r}; this specdec-tap reads {FORMAT_VERSION}. "
                "Update specdec-tap"
            )
        frames, index = data["frames"], data["index"]
        frames_bytes, index_bytes = frames["shape"][0], index["shape"][0]
        header = ShardHeader.from_json(parse_json(metadata["header"], "header"))
        totals = _totals_from_json(parse_json(metadata["totals"], "totals"))
    except (KeyError, TypeError, IndexError, AttributeError) as err:
        raise CorruptShardError(f"header lacks or mangles {err}", offset=0) from err
    for value in (frames_bytes, index_bytes):
        if type(value) is not int or not 0 <= value <= 1 << 62:
            raise CorruptShardError(f"header declares a tensor of {value!r} bytes", offset=0)
    expected = {
        "frames": {"dtype": "U8", "shape": [frames_bytes], "data_offsets": [0, frames_bytes]},
        "index": {
            "dtype": "U8",
            "shape": [index_bytes],
            "data_offsets": [frames_bytes, frames_bytes + index_bytes],
        },
    }
    if (
        set(data) != {"__metadata__", "frames", "index"}
        or frames != expected["frames"]
        or index != expected["index"]
    ):
        raise CorruptShardError("header's tensors do not tile the data area as 'frames', 'index'", offset=0)
    if totals.num_blocks + totals.num_records > frames_bytes // FRAME_HEAD_BYTES:
        raise CorruptShardError(
            f"totals: {totals.num_blocks:,} blocks and {totals.num_records:,} records do not fit into "
            f"{frames_bytes:,} bytes",
            offset=0,
        )
    whole = HEADER_AREA_BYTES + frames_bytes + index_bytes
    if file_bytes < whole:
        raise IncompleteShardError(
            f"file has {file_bytes:,} bytes; its header says {whole:,}. The end was cut off",
            offset=file_bytes,
        )
    if file_bytes > whole:
        raise CorruptShardError(f"file has {file_bytes:,} bytes; its header says {whole:,}", offset=whole)
    return SealedHead(header, totals, frames_bytes, index_bytes)


def _totals_from_json(data: Any) -> Totals:
    values = {}
    for name in Totals.__slots__:
        value = data.get(name) if isinstance(data, dict) else None
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise CorruptShardError(f"totals: {name} is {value!r}; expected a count", offset=0)
        values[name] = value
    return Totals(**values)
