"""Shard files whose checksums are right and whose contents are not: any field of any payload changed."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from hypothesis import strategies as st

from specdec_tap.shards.codec import BLOCK_HEAD
from specdec_tap.shards.frames import (
    BLOCK,
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    INDEX,
    META,
    RECORD,
    Totals,
    pack_frame_head,
    unpack_frame_head,
)
from specdec_tap.shards.records import BLOCK_COLUMNS, RECORD_COLUMNS, decode_index
from specdec_tap.shards.sections import SECTION

Draw = Callable[[st.SearchStrategy[Any]], Any]

INTEGERS = st.one_of(
    st.integers(-3, 80),
    st.sampled_from([2**k + d for k in (8, 14, 16, 20, 24, 31, 32, 53, 62, 63, 64) for d in (-1, 0, 1)]),
    st.sampled_from([-(2**31), -(2**63), 10**30]),
)
JSON_TEXTS = st.one_of(
    st.sampled_from(
        ["null", "true", "false", '""', "[]", "{}", "[[]]", '{"a":{}}', "-1", "0", "1.5", "1e308", "-1e308",
         "1e999", "NaN", "-Infinity", "9" * 400, "9" * 5000, '"\\ud800"', '"\\udfff x"', '"../../x"',
         '"\\u001b[2J"', '"\\u0000"', '"' + "x" * 300 + '"', '"' + "x" * 3000 + '"', "[" * 400 + "]" * 400,
         "[" * 20000, '{"a":' * 400 + "0" + "}" * 400, "[" + "0," * 2000 + "0]", '"prompt"', '"float32"',
         '"fp8"', '"none"', '"all"', '"response"', '"post_norm"', '"pre_norm"']
    ),
    INTEGERS.map(str),
)  # fmt: skip
BYTES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"{", b"\0"])
)


@dataclass
class Frame:
    """One frame to be written; ``facts`` are its columns in the index, behind offset and size."""

    kind: int
    payload: bytes
    facts: tuple[int, ...] = ()


@dataclass
class Forged:
    """A shard in pieces, from which a file with right checksums is made."""

    meta: bytes
    frames: list[Frame]
    totals: dict[str, Any]
    header: bytes
    """What the header area says; the META frame's JSON unless changed."""
    change_tables: Callable[[list[list[list[int]]]], None] | None = None
    change_index: Callable[[bytes], bytes] | None = None

    @classmethod
    def of(cls, path: Path) -> Forged:
        """Take a good sealed shard apart."""
        data = path.read_bytes()
        frames, at = [], HEADER_AREA_BYTES
        while at < len(data):
            head = unpack_frame_head(data[at : at + FRAME_HEAD_BYTES], at)
            frames.append(Frame(head.kind, data[at + FRAME_HEAD_BYTES :][: head.payload_bytes]))
            at += FRAME_HEAD_BYTES + head.payload_bytes
        tables = decode_index(frames.pop().payload, len(frames))
        for kind, table in ((BLOCK, tables[0]), (RECORD, tables[1])):
            rows = zip(*(column.tolist() for column in table.values()), strict=True)
            for frame, row in zip((f for f in frames if f.kind == kind), rows, strict=True):
                frame.facts = tuple(row[2:])
        metadata = json.loads(data[8:HEADER_AREA_BYTES])["__metadata__"]
        meta = frames.pop(0).payload
        return cls(meta, frames, json.loads(metadata["totals"]), meta)

    def copy(self) -> Forged:
        """To be changed."""
        return dataclasses.replace(
            self, frames=[dataclasses.replace(f) for f in self.frames], totals=dict(self.totals)
        )

    def write(self, path: Path, *, header_area: bool = True) -> None:
        """Write the file; as a journal if its name says so, with ``header_area`` False with zeros there."""
        sealed = path.suffix == ".safetensors"
        body, sequence = bytearray(), 0
        tables: list[list[list[int]]] = [[], []]
        for frame in [Frame(META, self.meta), *self.frames]:
            offset = HEADER_AREA_BYTES + len(body)
            body += pack_frame_head(frame.kind, sequence, frame.payload) + frame.payload
            sequence += 1
            if frame.kind in (BLOCK, RECORD):
                row = [offset, len(frame.payload), *frame.facts]
                tables[frame.kind - BLOCK].append(row)
        area = bytes(HEADER_AREA_BYTES)
        if sealed:
            if self.change_tables is not None:
                self.change_tables(tables)
            index = pack_index(tables)
            if self.change_index is not None:
                index = self.change_index(index)
            frame_bytes = pack_frame_head(INDEX, sequence, index) + index
            if header_area:
                area = self._area(len(body), len(frame_bytes))
            body += frame_bytes
        path.write_bytes(area + body)
        path.chmod(0o600)

    def _area(self, frames_bytes: int, index_bytes: int) -> bytes:
        def tensor(low: int, high: int) -> dict[str, Any]:
            return {"dtype": "U8", "shape": [high - low], "data_offsets": [low, high]}

        text = json.dumps(
            {
                "__metadata__": {
                    "format": "specdec-tap",
                    "format_version": "1",
                    "checksum": "0" * 16,
                    "header": self.header.decode("latin-1"),
                    "totals": to_json(self.totals),
                },
                "frames": tensor(0, frames_bytes),
                "index": tensor(frames_bytes, frames_bytes + index_bytes),
            },
            separators=(",", ":"),
        ).encode()
        area = struct.pack("<Q", HEADER_AREA_BYTES - 8) + text.ljust(HEADER_AREA_BYTES - 8)
        area = area[:HEADER_AREA_BYTES]  # what is too long is cut, and the checksum is right even so
        check = b"%016x" % xxhash.xxh3_64_intdigest(area)
        return area.replace(b'"checksum":"' + b"0" * 16, b'"checksum":"' + check, 1)


class Raw(str):
    """JSON text that stands for a value."""


def to_json(value: Any) -> str:
    """JSON with the texts of ``Raw`` values as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_json, value)) + "]"
    return json.dumps(value)


def pack_index(tables: list[list[list[int]]]) -> bytes:
    """INDEX payload of any tables."""
    body = b""
    for rows, columns in zip(tables, (BLOCK_COLUMNS, RECORD_COLUMNS), strict=True):
        for i, (_, kind) in enumerate(columns):
            mask = (1 << 8 * np.dtype(kind).itemsize) - 1
            body += np.array([row[i] & mask for row in rows], kind).tobytes()
    head = struct.pack("<HHIII", 1, 0, len(tables[0]), len(tables[1]), 0)
    return head + zstandard.ZstdCompressor().compress(body)


# ---- changes; each takes a copy of a good shard and a hypothesis ``draw``


def change_json(text: bytes, draw: Draw) -> bytes:
    """A field of any depth replaced, left out or named twice; or the text itself damaged."""
    data = json.loads(text)
    places = [(data, key) for key in data]
    places += [(value, key) for value in data.values() if isinstance(value, dict) for key in value]
    places += [(value, i) for value in data.values() if isinstance(value, list) for i in range(len(value))]
    holder, key = draw(st.sampled_from(places))
    what = draw(
        st.sampled_from(["replace", "replace", "replace", "remove", "twice", "add", "bytes", "whole"])
    )
    if what == "replace":
        holder[key] = Raw(draw(JSON_TEXTS))
    elif what == "remove":
        del holder[key]
    elif what == "twice":
        return to_json(data)[:-1].encode() + f",{json.dumps(str(key))}:{draw(JSON_TEXTS)}}}".encode()
    elif what == "add":
        data["unknown"] = Raw(draw(JSON_TEXTS))
    elif what == "whole":
        return draw(
            st.sampled_from([b"", b"null", b"[]", b"7", b'"x"', text.decode().encode("utf-16"), text[:-1]])
        )
    else:
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(BYTES) + text[at:]
    return to_json(data).encode()


def compressed(body: bytes, draw: Draw) -> bytes:
    """``body`` as zstd, or as what claims to be."""
    way = draw(
        st.sampled_from(["plain"] * 6 + ["no size", "window", "twice", "raw", "cut", "more", "claim", "skip"])
    )
    good = zstandard.ZstdCompressor().compress(body)
    if way == "no size":
        return zstandard.ZstdCompressor(write_content_size=False).compress(body)
    if way == "window":
        log = draw(st.integers(10, 31))
        parameters = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=True)
        return zstandard.ZstdCompressor(compression_params=parameters).compress(body)
    if way == "claim":  # one segment, size in eight bytes, then the blocks of the good frame
        size = draw(INTEGERS) & (2**64 - 1)
        return good[:4] + bytes([0xE0]) + struct.pack("<Q", size) + good[6:]
    if way == "skip":
        return struct.pack("<II", 0x184D2A50, 4) + b"skip" + good
    return {"plain": good, "twice": good + good, "raw": body, "cut": good[:-3], "more": good + b"x"}[way]


def change_header(shard: Forged, draw: Draw) -> None:
    """META, the header area's copy, or both."""
    changed = change_json(shard.meta, draw)
    where = draw(st.sampled_from(["both", "meta", "area"]))
    if where != "area":
        shard.meta = changed
    if where != "meta":
        shard.header = changed


def change_totals(shard: Forged, draw: Draw) -> None:
    """A count of the header."""
    name = draw(st.sampled_from(Totals.__slots__))
    shard.totals[name] = Raw(draw(JSON_TEXTS))


def _frame(shard: Forged, kind: int, draw: Draw) -> Frame:
    return draw(st.sampled_from([f for f in shard.frames if f.kind == kind]))


def change_record(shard: Forged, draw: Draw) -> None:
    """Sizes, JSON, spans, pieces, tokens or the compression of one record."""
    frame = _frame(shard, RECORD, draw)
    head = list(struct.unpack_from("<HHIIII", frame.payload))
    sizes = np.cumsum([head[2], 12 * head[4], 20 * head[5], 4 * head[3]])
    body = zstandard.ZstdDecompressor().decompress(frame.payload[20:])
    text, spans, pieces, tokens = (body[a:b] for a, b in zip([0, *sizes[:-1]], sizes, strict=True))
    tables = [np.frombuffer(part, "<i4").copy() for part in (spans, pieces, tokens)]
    what = draw(
        st.sampled_from(["json", "head", "spans", "pieces", "pieces", "tokens", "counts", "compression"])
    )
    if what == "json":
        text = change_json(text, draw)
        head[2] = len(text)
    elif what in ("spans", "pieces", "tokens"):
        table = tables[["spans", "pieces", "tokens"].index(what)]
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(table) - 1))
            value = draw(INTEGERS) & 0xFFFFFFFF
            table[at] = value - (value >> 31 << 32)
    elif what == "counts":  # the sum of all sizes stays right
        rows = draw(st.integers(0, 3))
        head[5] -= min(rows, head[5])
        head[3] += 5 * min(rows, head[5])
    payload = compressed(text + b"".join(t.tobytes() for t in tables), draw)
    if what == "head":
        at = draw(st.integers(0, 5))
        head[at] = draw(INTEGERS)
    masked = [value & (0xFFFF if i < 2 else 0xFFFFFFFF) for i, value in enumerate(head)]
    frame.payload = struct.pack("<HHIIII", *masked) + payload


def change_block(shard: Forged, draw: Draw) -> None:
    """The head or a section of one block."""
    frame = _frame(shard, BLOCK, draw)
    head, rest = frame.payload[: BLOCK_HEAD.size], frame.payload[BLOCK_HEAD.size :]
    if draw(st.booleans()):
        fields = list(BLOCK_HEAD.unpack(head))
        at = draw(st.integers(0, len(fields) - 1))
        fields[at] = draw(INTEGERS)
        widths = [8, 8, 16] + [32] * 7
        head = BLOCK_HEAD.pack(*(value & (1 << bits) - 1 for value, bits in zip(fields, widths, strict=True)))
    else:
        sections, at = [], 0
        while at < len(rest):
            mode, size = SECTION.unpack_from(rest, at)
            sections.append([mode, size, rest[at + SECTION.size :][:size]])
            at += SECTION.size + size
        section = draw(st.sampled_from(sections))
        what = draw(st.sampled_from(["mode", "size", "data", "byte", "constant", "zstd", "drop"]))
        if what == "mode":
            section[0] = draw(st.integers(0, 6))
        elif what == "size":
            section[1] = draw(INTEGERS) & 0xFFFFFFFF
        elif what == "drop":
            sections.remove(section)
        elif what == "byte" and section[2]:
            data = bytearray(section[2])
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
            section[2] = bytes(data)
        else:
            data = draw(st.binary(min_size=1, max_size=1)) if what == "constant" else section[2] + draw(BYTES)
            mode = {"constant": 2, "zstd": 1}.get(what, section[0])
            data = compressed(data, draw) if what == "zstd" else data
            section[:] = [mode, len(data), data]
        rest = b"".join(SECTION.pack(mode, size) + data for mode, size, data in sections)
    frame.payload = head + rest


def change_index(shard: Forged, draw: Draw) -> None:
    """The head, a cell or the compression of the index."""
    what = draw(st.sampled_from(["cell", "cell", "cell", "row", "head", "compression", "bytes"]))
    table, row, column = draw(st.integers(0, 1)), draw(st.integers(0, 20)), draw(st.integers(0, 20))
    value, more = draw(INTEGERS), draw(BYTES)

    def cell(tables: list[list[list[int]]]) -> None:
        if what == "row":
            tables[table].insert(row % len(tables[table]), list(tables[table][0]))
        else:
            line = tables[table][row % len(tables[table])]
            line[column % len(line)] = value

    if what in ("cell", "row"):
        shard.change_tables = cell
        return
    how = draw(st.integers(0, 4))

    def payload(index: bytes) -> bytes:
        head = list(struct.unpack_from("<HHIII", index))
        if what == "bytes":
            return index[:how] + more + index[how:]
        if what == "head":
            head[how] = value & (0xFFFF if how < 2 else 0xFFFFFFFF)
            return struct.pack("<HHIII", *head) + index[16:]
        return index[:16] + compressed(zstandard.ZstdDecompressor().decompress(index[16:]), draw)

    shard.change_index = payload


def change_order(shard: Forged, draw: Draw) -> None:
    """Whole frames in other places, of other kinds, twice or not at all."""
    frames = shard.frames
    at = draw(st.integers(0, len(frames) - 1))
    what = draw(st.sampled_from(["drop", "twice", "swap", "kind", "index", "meta", "empty"]))
    if what == "drop":
        del frames[at]
    elif what == "twice":
        frames.insert(at, dataclasses.replace(frames[at]))
    elif what == "swap":
        frames[at], frames[0] = frames[0], frames[at]
    elif what == "kind":
        frames[at] = Frame(draw(st.sampled_from([META, BLOCK, RECORD, INDEX])), frames[at].payload, (0,) * 4)
    elif what == "index":
        frames.insert(at, Frame(INDEX, pack_index([[], []])))
    elif what == "meta":
        frames.insert(at, Frame(META, shard.meta))
    else:
        frames[at].payload = b""
    for frame in frames:  # as many columns as their kind has
        width = {BLOCK: 4, RECORD: 2}.get(frame.kind, 0)
        frame.facts = (frame.facts + (0,) * width)[:width]


CHANGES = [
    change_header, change_totals, change_record, change_record, change_block, change_index, change_order,
]  # fmt: skip
