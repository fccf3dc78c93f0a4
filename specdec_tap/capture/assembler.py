"""From engine steps to sequences: which row belongs where, what to keep, what an earlier request has.

Pure bookkeeping on NumPy arrays, no vLLM and no files, so that every order of events can be tested.
A step holds one consecutive run of rows per request. For one request (``K`` = tokens known before it)::

    position      p0 .. K-1 | K .. last          K-1 = newest token that is certain
    row is        certain   | draft tokens       rows of rejected drafts are never kept
    sampled                 | s tokens           s-1 accepted drafts and one new token

so rows up to position ``K - 1 + (s - 1)`` are kept and the sequence grows by ``s`` tokens. A step that ends
before ``K - 1`` is a prefill chunk: what it sampled means nothing. Rows that a prefix-cache hit skipped
were computed for an earlier request with the same leading tokens; a hash chain over the token ids finds
that request's blocks.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from ..shards.layout import BlockRef, Piece, RecordMeta, Span

logger = logging.getLogger("specdec_tap.capture")

GRANULE = 16
"""Tokens per link of the hash chain; vLLM's cache blocks are multiples of it."""


class Sink(Protocol):
    """Where finished blocks and records go."""

    def put_block(
        self, position: int, aux: np.ndarray, final: np.ndarray | None, final_row: int
    ) -> BlockRef: ...

    def put_record(self, record: RecordMeta) -> None: ...


class SinkError(Exception):
    """The sink could not take a block or record; its request is dropped."""


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """What the worker says of a request when the engine first schedules it.

    Args:
        handle: Number of the request in the step messages; never reused.
        request_id: The engine's id: data only, a client may choose part of it.
        prompt_token_ids: int32 ``[P]``.
        stop_token_ids: Token ids that end the response when sampled, the end-of-sequence token included
            unless the request ignores it.
        max_response_tokens: The engine stops after this many.
        sampling: Facts worth keeping: temperature, top_p, seed and so on.
        lora: Adapter name, or None.
        salt: Everything but token ids that vLLM's prefix cache keys on.
    """

    handle: int
    request_id: str
    prompt_token_ids: np.ndarray
    stop_token_ids: frozenset[int] = frozenset()
    max_response_tokens: int = 1 << 31
    sampling: dict[str, Any] = field(default_factory=dict)
    lora: str | None = None
    salt: bytes = b""


class _Block:
    """Rows of consecutive positions: open (has a buffer), stored (has a ref), or dead (neither)."""

    __slots__ = ("buffer", "filled", "final_row", "ref", "shared", "start")

    def __init__(self, start: int, buffer: np.ndarray, final_row: int) -> None:
        self.start = start
        self.buffer: np.ndarray | None = buffer  # [A + 1, capacity, H]
        self.filled = 0
        self.final_row = final_row  # first row whose final state is kept; >= filled: none yet
        self.ref: BlockRef | None = None
        self.shared = False  # another request's record needs it


_Part = tuple[_Block, int, int, int]  # block, position, row_start, row_stop


class _Sequence:
    __slots__ = (
        "chain", "done", "final_start", "hashed", "holes", "length", "new", "next_position", "own",
        "parts", "row_limit", "started", "tokens",
    )  # fmt: skip

    def __init__(self, new: NewRequest, final_start: int, row_limit: int) -> None:
        prompt = new.prompt_token_ids
        self.new = new
        self.tokens = np.empty(max(64, 2 * len(prompt)), dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.length = len(prompt)
        self.started = time.time()
        self.next_position = 0
        self.done: str | None = None
        self.own: list[list[Any]] = []  # [_Block, usable rows]
        self.parts: list[_Part] = []  # rows found in other requests' blocks
        self.holes: list[tuple[int, int]] = []
        self.hashed = 0
        self.chain = xxhash.xxh3_128_digest(new.salt)
        self.final_start, self.row_limit = final_start, row_limit

    def append(self, token: int) -> None:
        if self.length == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
        self.tokens[self.length] = token
        self.length += 1


class Assembler:
    """Collects the rows of every live request and hands whole blocks and records to a sink.

    Args:
        sink: Receives blocks as they fill and one record per finished request.
        num_layers: Aux layers, plus one for the final state.
        hidden_size: Width of one state.
        dtype: uint16 or uint32: states are kept as raw bits.
        block_tokens: Rows per block; blocks end at multiples of it.
        final_scope: Which positions keep their final state: ``response``, ``all`` or ``none``.
        response_window: Keep response positions ``[a, b)`` only.
        min_tokens, max_tokens: Sequences outside this length are skipped.
        max_index_tokens: How many tokens' blocks the prefix index remembers; 0 turns it off.
        count: Called with a counter's name and an amount.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        num_layers: int,
        hidden_size: int,
        dtype: np.dtype,
        count: Callable[[str, int], None],
        block_tokens: int = 64,
        final_scope: str = "response",
        response_window: tuple[int, int] | None = None,
        min_tokens: int = 2,
        max_tokens: int | None = None,
        max_index_tokens: int = 1 << 22,
    ) -> None:
        self._sink = sink
        self._layers, self._hidden, self._dtype = num_layers, hidden_size, np.dtype(dtype)
        self._exponent = {2: 0x7F80, 4: 0x7F800000}[self._dtype.itemsize]
        self._block_tokens = block_tokens
        self._final_scope = final_scope
        self._window = response_window
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens if max_tokens is not None else 1 << 62
        self._max_granules = max_index_tokens // GRANULE
        self._count = count
        self._live: dict[int, _Sequence] = {}
        self._index: OrderedDict[bytes, tuple[_Part, ...]] = OrderedDict()
        self._spare: list[np.ndarray] = []

    def use_float16(self) -> None:
        """States are IEEE half precision: infinities and NaN have another exponent pattern."""
        self._exponent = 0x7C00

    @property
    def num_live(self) -> int:
        return len(self._live)

    # -- events, in engine order ------------------------------------------------------------------

    def on_new(self, new: NewRequest) -> None:
        """A request was scheduled for the first time."""
        prompt = len(new.prompt_token_ids)
        a, b = self._window or (0, 1 << 40)
        start = 0 if self._final_scope == "all" else max(prompt - 1, 0) + a
        stop = max(prompt - 1, 0) + b
        if self._final_scope == "none":
            start = stop
        self._live[new.handle] = _Sequence(new, start, stop)

    def on_step(
        self,
        handles: np.ndarray,
        query_start_loc: np.ndarray,
        positions: np.ndarray,
        input_ids: np.ndarray,
        states: np.ndarray,
        sampled: np.ndarray,
        num_sampled: np.ndarray,
    ) -> None:
        """Take the rows of one target forward.

        Args:
            handles: uint64 ``[R]``; requests that are not live (dropped, skipped) are passed over.
            query_start_loc: int32 ``[R + 1]``: rows of request i are ``[q[i], q[i + 1])``.
            positions: int64 ``[rows]``.
            input_ids: int32 ``[rows]``: the tokens that were fed, the engine's own truth.
            states: raw bits ``[A + 1, rows, H]``, aux layers in order, then the final state.
            sampled: int32 ``[R, S]`` sampled token ids.
            num_sampled: int32 ``[R]``: how many of a row are valid; -1: those that are not negative.
        """
        touched = []
        starts = query_start_loc.tolist()
        counts = num_sampled.tolist()
        for i, handle in enumerate(handles.tolist()):
            seq = self._live.get(handle)
            if seq is None or seq.done is not None:
                continue
            low, high = starts[i], starts[i + 1]
            if high <= low:
                continue
            row = sampled[i]
            new_tokens = row[row >= 0] if counts[i] < 0 else row[: counts[i]]
            try:
                self._take(
                    seq, int(positions[low]), low, high, positions, input_ids, states, new_tokens.tolist()
                )
            except _Misaligned:
                self.drop(handle, "dropped_misaligned")
            except _NonFinite:
                self.drop(handle, "dropped_non_finite")
            except SinkError:
                self.drop(handle, "dropped_io_error")
            except Exception:  # a bug costs one request, not the writer process
                logger.exception("request %d cannot be assembled and is dropped", handle)
                self.drop(handle, "dropped_internal")
            else:
                touched.append(seq)
        if self._max_granules:
            self._link(touched)

    def on_finish(self, handle: int) -> None:
        """The engine is done with a request: write its last block and its record."""
        seq = self._live.get(handle)
        if seq is not None:
            self._finish(handle, seq, seq.done or "abort")

    def drop(self, handle: int, reason: str | None) -> None:
        """Forget a request; blocks that others refer to are still stored. No reason: already counted."""
        seq = self._live.pop(handle, None)
        if seq is None:
            return
        if reason is not None:
            self._count(reason, 1)
        for block, _ in seq.own:
            if block.buffer is not None:
                if block.shared and reason not in (
                    "dropped_io_error",
                    "dropped_non_finite",
                    "dropped_internal",
                ):
                    try:
                        self._store(block)
                        continue
                    except (SinkError, _NonFinite):
                        pass
                self._recycle(block)

    def on_end(self) -> None:
        """No more steps will come (the worker is gone): seal what is held."""
        for handle, seq in list(self._live.items()):
            self._finish(handle, seq, seq.done or "interrupted")

    # -- rows ---------------------------------------------------------------------------------------

    def _take(
        self,
        seq: _Sequence,
        first: int,
        low: int,
        high: int,
        positions: np.ndarray,
        input_ids: np.ndarray,
        states: np.ndarray,
        new_tokens: list[int],
    ) -> None:
        num = high - low
        if first < 0 or int(positions[high - 1]) != first + num - 1 or first >= seq.length:
            raise _Misaligned
        certain = min(num, seq.length - first)
        fed = input_ids[low : low + certain]
        known = seq.tokens[first : first + certain]
        if not np.array_equal(fed, known):
            # The engine threw a sampled token away (a forced preemption) and sampled another.
            at = first + int(np.argmax(fed != known))
            if at < len(seq.new.prompt_token_ids):
                raise _Misaligned
            self._truncate(seq, at)
            seq.append(int(input_ids[low + at - first]))
            certain = min(num, seq.length - first)
        if first + num >= seq.length:
            keep = certain + max(len(new_tokens) - 1, 0)
            if keep > num:
                raise _Misaligned
            for token in new_tokens:
                seq.append(token)
                responded = seq.length - len(seq.new.prompt_token_ids)
                if token in seq.new.stop_token_ids:
                    seq.done = "stop"
                elif responded >= seq.new.max_response_tokens:
                    seq.done = "length"
                if seq.done:
                    break
        else:
            keep = num
        if first > seq.next_position:
            seq.holes.append((seq.next_position, first))
            seq.next_position = first
        skip = seq.next_position - first  # computed again after a preemption: already held
        stop = min(first + keep, seq.row_limit)
        position, row = first + skip, low + skip
        while position < stop:
            block = self._open_block(seq, position)
            assert block.buffer is not None
            at = position - block.start
            n = min(stop - position, block.buffer.shape[1] - at)
            block.buffer[:, at : at + n] = states[:, row : row + n]
            block.filled = at + n
            seq.own[-1][1] = block.filled
            position += n
            row += n
            if block.filled == block.buffer.shape[1]:
                self._store(block)
        seq.next_position = max(seq.next_position, first + keep)

    def _open_block(self, seq: _Sequence, position: int) -> _Block:
        if seq.own:
            block = seq.own[-1][0]
            if block.buffer is not None and block.start + block.filled == position:
                return block
            if block.buffer is not None:
                self._store(block)
        capacity = self._block_tokens - position % self._block_tokens
        full = self._spare.pop() if self._spare else self._new_buffer()
        block = _Block(position, full[:, :capacity], max(0, seq.final_start - position))
        seq.own.append([block, 0])
        return block

    def _new_buffer(self) -> np.ndarray:
        return np.empty((self._layers, self._block_tokens, self._hidden), self._dtype)

    def _store(self, block: _Block) -> None:
        """Write an open block; rows after it start a new one."""
        assert block.buffer is not None
        rows = block.buffer[:, : block.filled]
        final_row = block.final_row if block.final_row < block.filled else 0
        final = rows[-1, final_row:] if block.final_row < block.filled else None
        for plane in (*rows[:-1], *(() if final is None else (final,))):
            if ((plane & self._exponent) == self._exponent).any():
                raise _NonFinite
        block.ref = self._sink.put_block(block.start, rows[:-1], final, final_row)
        self._recycle(block)

    def _recycle(self, block: _Block) -> None:
        buffer, block.buffer = block.buffer, None
        if buffer is not None and len(self._spare) < 256:
            whole = buffer.base if buffer.base is not None else buffer
            if whole.shape == (self._layers, self._block_tokens, self._hidden):
                self._spare.append(whole)

    def _truncate(self, seq: _Sequence, position: int) -> None:
        """Forget tokens and rows from ``position`` on."""
        seq.length = position
        seq.next_position = min(seq.next_position, position)
        while seq.own:
            block, rows = seq.own[-1]
            if block.start + rows <= position:
                break
            if block.start < position:
                seq.own[-1][1] = position - block.start
                if block.buffer is not None:
                    block.filled = position - block.start
                break
            if block.buffer is not None and not block.shared:
                self._recycle(block)
            seq.own.pop()
        if position < seq.hashed * GRANULE:
            seq.hashed = 0
            seq.chain = xxhash.xxh3_128_digest(seq.new.salt)

    # -- prefixes -----------------------------------------------------------------------------------

    def _link(self, touched: list[_Sequence]) -> None:
        """Extend hash chains; offer own rows to later requests, find the rows that a cache hit skipped."""
        pending = [s for s in touched if s.next_position // GRANULE > s.hashed]
        # A request may hit what another one computes in the same step: offer first, then look.
        for seq in sorted(pending, key=lambda s: bool(s.holes)):
            while (seq.hashed + 1) * GRANULE <= seq.next_position:
                low = seq.hashed * GRANULE
                tokens = seq.tokens[low : low + GRANULE]
                seq.chain = xxhash.xxh3_128_digest(seq.chain + tokens.tobytes())
                seq.hashed += 1
                self._link_granule(seq, low)

    def _link_granule(self, seq: _Sequence, low: int) -> None:
        high = low + GRANULE
        known = self._index.get(seq.chain)
        if known is not None:
            self._index.move_to_end(seq.chain)
        missing = [(max(a, low), min(b, high)) for a, b in seq.holes if a < high and low < b]
        if missing:
            for a, b in missing:
                for part in known or ():
                    found = _clip(part, a, b)
                    if found is not None and (found[0].ref is not None or found[0].buffer is not None):
                        found[0].shared = True
                        seq.parts.append(found)
            return  # rows that others computed are already in the index
        parts = []
        covered = 0
        for block, rows in reversed(seq.own):
            part = _clip((block, block.start, 0, rows), low, high)
            if part is not None:
                parts.append(part)
                covered += part[3] - part[2]
            if block.start <= low:
                break
        if covered == GRANULE:
            self._index[seq.chain] = tuple(reversed(parts))
            self._index.move_to_end(seq.chain)
            if len(self._index) > self._max_granules:
                self._index.popitem(last=False)

    # -- records ------------------------------------------------------------------------------------

    def _finish(self, handle: int, seq: _Sequence, reason: str) -> None:
        prompt_len = len(seq.new.prompt_token_ids)
        length = min(seq.length, seq.row_limit + 1)
        rows = min(length - 1, seq.next_position)
        length = min(length, rows + 1)  # an interrupted prefill: only the tokens that were fed
        if rows < 1 or length <= prompt_len:
            return self.drop(handle, "skipped_empty")
        if not self._min_tokens <= length <= self._max_tokens:
            return self.drop(handle, "skipped_length")
        try:
            for block, _ in seq.own:
                if block.buffer is not None:
                    if block.start < rows:
                        # Rows after the last needed one (an overrun after the end) are not stored.
                        block.filled = min(block.filled, rows - block.start)
                        self._store(block)
                    else:
                        self._recycle(block)
            pieces = []
            reused = 0
            for part in self._parts(seq):
                clipped = _clip(part, 0, rows)
                if clipped is None:
                    continue
                block, position, row_start, row_stop = clipped
                if block.ref is None and block.buffer is not None:
                    self._store(block)
                if block.ref is None:
                    continue  # its owner was dropped: an explicit gap
                pieces.append(Piece(position, block.ref, row_start, row_stop))
            pieces = _join(pieces)
            own_refs = {block.ref for block, _ in seq.own}
            held = sum(p.row_stop - p.row_start for p in pieces)
            reused = sum(p.row_stop - p.row_start for p in pieces if p.block not in own_refs)
            if not pieces:
                return self.drop(handle, "skipped_empty")
            spans = [Span(0, prompt_len, "prompt")] if prompt_len else []
            spans.append(Span(prompt_len, length, "response"))
            self._sink.put_record(
                RecordMeta(
                    request_id=seq.new.request_id,
                    token_ids=seq.tokens[:length].copy(),
                    spans=tuple(spans),
                    pieces=tuple(pieces),
                    finish_reason=reason,
                    started_unix_s=seq.started,
                    finished_unix_s=time.time(),
                    sampling=dict(seq.new.sampling),
                    lora=seq.new.lora,
                )
            )
        except SinkError:
            return self.drop(handle, "dropped_io_error")
        except _NonFinite:
            return self.drop(handle, "dropped_non_finite")
        except Exception:  # a bug costs one request, not the writer process
            logger.exception("request %d cannot be recorded and is dropped", handle)
            return self.drop(handle, "dropped_internal")
        self._count("requests_sealed", 1)
        self._count("tokens", length)
        self._count("response_tokens", length - prompt_len)
        self._count("rows_stored", held - reused)
        self._count("rows_reused", reused)
        self._count("gap_rows", rows - held)
        self._count("raw_bytes", rows * self._layers * self._hidden * self._dtype.itemsize)
        del self._live[handle]
        return None

    def _parts(self, seq: _Sequence) -> Iterator[_Part]:
        own = [(block, block.start, 0, rows) for block, rows in seq.own]
        return iter(sorted([*seq.parts, *own], key=lambda part: part[1]))


def _clip(part: _Part, low: int, high: int) -> _Part | None:
    """Return the part of ``part`` that covers positions ``[low, high)``."""
    block, position, row_start, row_stop = part
    a = max(position, low)
    b = min(position + row_stop - row_start, high)
    if a >= b:
        return None
    return block, a, row_start + a - position, row_start + b - position


def _join(pieces: list[Piece]) -> list[Piece]:
    """Merge pieces that continue one another inside one block."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if (
            last is not None
            and last.block == piece.block
            and last.row_stop == piece.row_start
            and last.position + last.row_stop - last.row_start == piece.position
        ):
            out[-1] = Piece(last.position, last.block, last.row_start, piece.row_stop)
        else:
            out.append(piece)
    return out


class _Misaligned(Exception):
    """Rows do not fit the tokens known of the request."""


class _NonFinite(Exception):
    """A state holds NaN or infinity."""
