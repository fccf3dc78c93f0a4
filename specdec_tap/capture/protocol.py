"""Messages from the vLLM worker to the writer process, one datagram each.

Bulk data (states, token ids, who is in the batch) lies in the ring; a message only says where, so its size
does not depend on the batch. The socket keeps message boundaries (``SOCK_SEQPACKET``) and is never waited on
by the worker.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

HELLO, NEW, STEP, FINISH, DROP, CONTROL = range(1, 7)
MAX_MESSAGE_BYTES = 1 << 16
MAX_HANDLES = 4096
"""Handles in one FINISH or DROP message."""

DROP_REASONS = ("dropped_ring_full", "dropped_hook_error", "dropped_weights_changed")
"""Why the worker gives up an announced request; the writer counts it under this name."""

_STEP = struct.Struct("<B7xQQIII")
_HANDLES = struct.Struct("<BB6x")


@dataclass(slots=True)
class StepLayout:
    """Where the arrays of one engine step lie inside one ring allocation.

    In order, each aligned to 64 bytes:

    ==  ==================================  ======  ====================================================
    0   ``[num_layers, rows, hidden_size]``  bits    aux layers, then the post-norm final state
    1   ``[rows]``                           int64   positions
    2   ``[rows]``                           int32   input_ids
    3   ``[num_requests, columns]``          int32   sampled token ids
    4   ``[num_requests]``                   int32   how many of them are valid; -1: those that are >= 0
    5   ``[num_requests]``                   uint64  handles
    6   ``[num_requests + 1]``               int32   query_start_loc: rows of request i are [q[i], q[i+1])
    ==  ==================================  ======  ====================================================
    """

    num_layers: int
    hidden_size: int
    item_bytes: int
    num_rows: int
    num_requests: int
    num_columns: int

    def offsets(self) -> list[int]:
        """Return the byte offset of each array and, last, the total size."""
        rows, requests = self.num_rows, self.num_requests
        out = [0]
        at = 0
        for size in (
            self.num_layers * rows * self.hidden_size * self.item_bytes,
            rows * 8,
            rows * 4,
            requests * self.num_columns * 4,
            requests * 4,
            requests * 8,
            requests * 4 + 4,
        ):
            at += (size + 63) & -64
            out.append(at)
        return out


class Step(NamedTuple):
    """A published step: where it lies in the ring, and its shape."""

    offset: int
    end: int
    """Ring position after it, for :meth:`Ring.release`."""
    num_rows: int
    num_requests: int
    num_columns: int


def pack_json(kind: int, payload: dict[str, Any]) -> bytes:
    """Pack a HELLO, NEW or CONTROL message."""
    return bytes([kind]) + json.dumps(payload, separators=(",", ":")).encode()


def unpack_json(message: bytes) -> dict[str, Any]:
    return json.loads(message[1:])


def pack_step(step: Step) -> bytes:
    return _STEP.pack(STEP, *step)


def unpack_step(message: bytes) -> Step:
    return Step(*_STEP.unpack(message)[1:])


def pack_handles(kind: int, handles: list[int], reason: str = DROP_REASONS[0]) -> list[bytes]:
    """Pack FINISH or DROP messages; several when there are more handles than one can carry."""
    head = _HANDLES.pack(kind, DROP_REASONS.index(reason))
    return [
        head + np.asarray(handles[i : i + MAX_HANDLES], dtype=np.uint64).tobytes()
        for i in range(0, len(handles), MAX_HANDLES)
    ]


def unpack_handles(message: bytes) -> tuple[list[int], str]:
    """Return the handles and, for DROP, the reason."""
    reason = DROP_REASONS[message[1]]
    return np.frombuffer(message, np.uint64, offset=_HANDLES.size).tolist(), reason
