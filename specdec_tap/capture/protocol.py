"""Messages from the vLLM worker to the writer process, one datagram each.

Bulk data (states, token ids) lies in the ring; a message only says where. The socket keeps message
boundaries (``SOCK_SEQPACKET``) and is never waited on by the worker.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

HELLO, NEW, STEP, FINISH, DROP, CONTROL = range(1, 7)
MAX_MESSAGE_BYTES = 1 << 17

_STEP = struct.Struct("<B7xQQIIII")
_HANDLES = struct.Struct("<B7x")


@dataclass(slots=True)
class StepLayout:
    """Where the arrays of one engine step lie inside one ring allocation.

    In order, each aligned to 64 bytes: states ``[num_layers, num_rows, hidden_size]`` (aux layers, then the
    final state), positions int64 ``[num_rows]``, input_ids int32 ``[num_rows]``, sampled token ids int32
    ``[num_requests, num_sampled_columns]``, accepted counts int32 ``[num_requests]`` (-1: count the
    non-negative sampled ids instead).
    """

    num_layers: int
    hidden_size: int
    item_bytes: int
    num_rows: int
    num_requests: int
    num_columns: int

    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Return the byte offset of each array and, last, the total size."""
        sizes = (
            self.num_layers * self.num_rows * self.hidden_size * self.item_bytes,
            self.num_rows * 8,
            self.num_rows * 4,
            self.num_requests * self.num_columns * 4,
            self.num_requests * 4,
        )
        out = [0]
        for size in sizes:
            out.append(out[-1] + -(-size // 64) * 64)
        return tuple(out)  # type: ignore[return-value]


@dataclass(slots=True)
class Step:
    """A published step: ring position, shape, and which request each row range belongs to."""

    offset: int
    end: int
    num_rows: int
    num_columns: int
    handles: np.ndarray  # uint64 [num_requests]
    query_start_loc: np.ndarray  # int32 [num_requests + 1]


def pack_json(kind: int, payload: dict[str, Any]) -> bytes:
    return bytes([kind]) + json.dumps(payload, separators=(",", ":")).encode()


def unpack_json(message: bytes) -> dict[str, Any]:
    return json.loads(message[1:])


def pack_step(
    offset: int, end: int, num_rows: int, num_columns: int, handles: np.ndarray, query_start_loc: np.ndarray
) -> bytes:
    header = _STEP.pack(STEP, offset, end, num_rows, num_columns, len(handles), 0)
    return b"".join((header, handles.tobytes(), query_start_loc.astype(np.int32, copy=False).tobytes()))


def unpack_step(message: bytes) -> Step:
    _, offset, end, num_rows, num_columns, num_requests, _ = _STEP.unpack_from(message)
    handles = np.frombuffer(message, np.uint64, num_requests, _STEP.size)
    starts = np.frombuffer(message, np.int32, num_requests + 1, _STEP.size + 8 * num_requests)
    return Step(offset, end, num_rows, num_columns, handles, starts)


def pack_handles(kind: int, handles: list[int]) -> bytes:
    return _HANDLES.pack(kind) + np.asarray(handles, dtype=np.uint64).tobytes()


def unpack_handles(message: bytes) -> list[int]:
    return np.frombuffer(message, np.uint64, offset=_HANDLES.size).tolist()
