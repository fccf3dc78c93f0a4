"""From engine steps to sequences: which row belongs where, what to keep, what an earlier request has.

Pure bookkeeping on NumPy arrays, no vLLM and no files, so that every order of events can be tested.
A step holds one consecutive run of rows per request. For one request (``K`` = tokens known before it)::

    position      p0 .. K-1 | K .. last          K-1 = newest token that is certain
    row is        certain   | draft tokens       rows of rejected drafts are never kept
    sampled                 | s tokens           s-1 accepted drafts and one new token

so rows up to position ``K - 1 + (s - 1)`` are kept and the sequence grows by ``s`` tokens. Rows that a
prefix-cache hit skipped were computed for an earlier request with the same leading tokens; a hash chain over
the token ids finds that request's blocks.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from ..shards.layout import BlockRef, Piece, RecordMeta, Span, bits_dtype

logger = logging.getLogger("specdec_tap.capture")

GRANULE = 16
"""Tokens per link of the hash chain, unless the engine's cache blocks are not multiples of it."""

MAX_SPARE_BYTES = 256 << 20
EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""The exponent's bits: all of them set means NaN or infinity."""


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
        given_spans: Half-open response ranges inside the prompt, sorted and disjoint: the answers were given
            and not sampled, and what the engine samples after the prompt is no part of the record. Empty: an
            ordinary request.
    """

    handle: int
    request_id: str
    prompt_token_ids: np.ndarray
    stop_token_ids: frozenset[int] = frozenset()
    max_response_tokens: int = 1 << 31
    sampling: dict[str, Any] = field(default_factory=dict)
    lora: str | None = None
    salt: bytes = b""
    given_spans: tuple[tuple[int, int], ...] = ()


class _Block:
    """Rows of consecutive positions: open (has a buffer), stored (has a ref), or dead (neither)."""

    __slots__ = ("buffer", "filled", "final_row", "pooled", "ref", "start", "wanted")

    def __init__(self, start: int, buffer: np.ndarray, final_row: int, pooled: np.ndarray | None) -> None:
        self.start = start
        self.buffer: np.ndarray | None = buffer  # [A + 1, capacity, H]
        self.pooled = pooled  # the whole buffer, to be used again; None: rows lie in the step itself
        self.filled = 0
        self.final_row = final_row  # first row whose final state is kept; >= filled: none yet
        self.ref: BlockRef | None = None
        self.wanted = False  # another request's record may need it


_Part = tuple[_Block, int, int, int]  # block, position, row_start, row_stop


class _Link:
    """One granule of the prefix index: where its rows are, and how many live requests run through it."""

    __slots__ = ("parts", "users")

    def __init__(self) -> None:
        self.parts: tuple[_Part, ...] = ()
        self.users = 0


class _Sequence:
    __slots__ = (
        "done", "final_start", "holes", "keys", "length", "new", "next_position", "own", "parts",
        "row_limit", "started", "tokens",
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
        self.keys: list[bytes] = []  # hash chain: one key per granule of the tokens fed so far
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
        dtype: Name of the states' dtype; they are kept as raw bits, uint16 or uint32.
        count: Called with a counter's name and an amount.
        block_tokens: Rows per block; blocks end at multiples of it.
        final_scope: Which positions keep their final state: ``response``, ``all`` or ``none``.
        response_window: Keep response positions ``[a, b)`` only.
        min_tokens, max_tokens: Sequences outside this length are skipped.
        max_index_tokens: How many tokens of finished requests the prefix index remembers; 0 turns it off.
        granule: Tokens per link of the hash chain; the engine's cache blocks must be multiples of it.

    Memory: one open block per live request, a small entry per indexed granule, and
    ``MAX_SPARE_BYTES`` of buffers for reuse; nothing grows with the length of a request but its token ids.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        num_layers: int,
        hidden_size: int,
        dtype: str,
        count: Callable[[str, int], None],
        block_tokens: int = 64,
        final_scope: str = "response",
        response_window: tuple[int, int] | None = None,
        min_tokens: int = 2,
        max_tokens: int | None = None,
        max_index_tokens: int = 1 << 22,
        granule: int = GRANULE,
    ) -> None:
        self._sink = sink
        self._layers, self._hidden = num_layers, hidden_size
        self._dtype, self._exponent = bits_dtype(dtype), EXPONENTS[dtype]
        self._block_tokens = block_tokens
        self._final_scope = final_scope
        self._window = response_window
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens if max_tokens is not None else 1 << 62
        self._granule = granule
        self._max_granules = max_index_tokens // granule
        self._count = count
        self._live: dict[int, _Sequence] = {}
        self._index: OrderedDict[bytes, _Link] = OrderedDict()
        self._spare: list[np.ndarray] = []
        block_bytes = num_layers * block_tokens * hidden_size * self._dtype.itemsize
        self._max_spare = max(1, MAX_SPARE_BYTES // block_bytes)

    @property
    def num_live(self) -> int:
        """Requests that are neither finished nor dropped."""
        return len(self._live)

    @property
    def num_granules(self) -> int:
        """Entries of the prefix index."""
        return len(self._index)

    def size_index(self, max_index_tokens: int) -> None:
        """The size of the engine's cache became known."""
        self._max_granules = max_index_tokens // self._granule
        self._shrink_index()

    # -- events, in engine order ------------------------------------------------------------------

    def on_new(self, new: NewRequest) -> None:
        """A request was scheduled for the first time."""
        prompt = len(new.prompt_token_ids)
        a, b = self._window or (0, 1 << 40)
        start = 0 if self._final_scope == "all" else max(prompt - 1, 0) + a
        stop = max(prompt - 1, 0) + b
        if new.given_spans:
            start = 0 if self._final_scope == "all" else max(new.given_spans[0][0] - 1, 0)
            stop = prompt - 1
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
            num_sampled: int32 ``[R]``: how many of a row are valid, 0 for a prefill chunk that is not the
                last one; -1: those that are not negative.
        """
        touched = []
        starts = query_start_loc.tolist()
        counts = num_sampled.tolist()
        for i, handle in enumerate(handles.tolist()):
            seq = self._live.get(handle)
            low, high = starts[i], starts[i + 1]
            if seq is None or high <= low:
                continue
            first = int(positions[low])
            if seq.done is not None:
                if first >= seq.length - 1:
                    continue  # a step that asynchronous scheduling had begun before the request was done
                seq.done = None  # the engine took the last token back and computes the request again
            row = sampled[i]
            new_tokens = row[row >= 0] if counts[i] < 0 else row[: counts[i]]
            try:
                self._take(seq, first, low, high, positions, input_ids, states, new_tokens.tolist())
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
            try:
                self._link(touched)
            except Exception:  # a bug costs this step's requests, not the writer process
                logger.exception("prefixes cannot be linked; the step's requests are dropped")
                for seq in touched:
                    self.drop(seq.new.handle, "dropped_internal")

    def on_finish(self, handle: int) -> None:
        """The engine is done with a request: write its last block and its record."""
        seq = self._live.get(handle)
        if seq is not None:
            self._finish(handle, seq, seq.done or "abort")

    def give_up(self, handle: int, reason: str) -> None:
        """No more rows of a request will come. One that has its last token needs none: it is recorded."""
        seq = self._live.get(handle)
        if seq is not None and seq.done:
            self._finish(handle, seq, seq.done)
        else:
            self.drop(handle, reason)

    def forget_shard(self, shard: int) -> None:
        """A shard was removed: later records must not point into it."""
        for link in self._index.values():
            for block, *_ in link.parts:
                if block.ref is not None and block.ref.shard == shard:
                    block.ref = None
        for seq in self._live.values():
            for block in (*(b for b, _ in seq.own), *(b for b, *_ in seq.parts)):
                if block.ref is not None and block.ref.shard == shard:
                    block.ref = None

    def drop(self, handle: int, reason: str | None) -> None:
        """Forget a request; blocks that others refer to are still stored. No reason: already counted."""
        seq = self._live.get(handle)
        if seq is None:
            return
        if reason is not None:
            self._count(reason, 1)
        for block, _ in seq.own:
            if block.wanted:
                self._store_for_others(block)
            self._recycle(block)
        self._retire(handle, seq)

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
        if new_tokens and first + num < seq.length:
            # Sampled before the end of what is known: the engine took tokens back (a forced preemption).
            if first + num < len(seq.new.prompt_token_ids):
                raise _Misaligned
            self._truncate(seq, first + num)
        certain = min(num, seq.length - first)
        if not np.array_equal(input_ids[low : low + certain], seq.tokens[first : first + certain]):
            raise _Misaligned
        if first + num >= seq.length:
            if certain + len(new_tokens) - 1 > num:
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
            # Accepted drafts after the token that ended the request are not part of it.
            keep = max(certain, seq.length - 1 - first)
        else:
            keep = num
        if first > seq.next_position:
            seq.holes.append((seq.next_position, first))
            seq.next_position = first
        position = seq.next_position  # rows before it were computed again after a preemption
        stop = min(first + keep, seq.row_limit)
        while position < stop:
            row = low + position - first
            block = self._open_block(seq, position, states[:, row : row + stop - position])
            assert block.buffer is not None, "an open block has a buffer"
            at = position - block.start
            n = min(stop - position, block.buffer.shape[1] - at)
            if block.filled < at + n:
                block.buffer[:, at : at + n] = states[:, row : row + n]
                block.filled = at + n
            seq.own[-1][1] = block.filled
            position += n
            if block.filled == block.buffer.shape[1]:
                self._store(block)
        seq.next_position = max(seq.next_position, first + keep)

    def _open_block(self, seq: _Sequence, position: int, rows: np.ndarray) -> _Block:
        """Return the block that takes the row at ``position``; ``rows`` are the rows from there on."""
        if seq.own:
            block = seq.own[-1][0]
            if block.buffer is not None:
                if block.start + block.filled == position:
                    return block
                self._store(block)
        capacity = self._block_tokens - position % self._block_tokens
        final_row = max(0, seq.final_start - position)
        if rows.shape[1] >= capacity:  # a whole block at once (prefill): it is stored from where it lies
            block = _Block(position, rows[:, :capacity], final_row, None)
            block.filled = capacity
        else:
            full = self._spare.pop() if self._spare else self._new_buffer()
            block = _Block(position, full[:, :capacity], final_row, full)
        seq.own.append([block, block.filled])
        return block

    def _new_buffer(self) -> np.ndarray:
        return np.empty((self._layers, self._block_tokens, self._hidden), self._dtype)

    def _store(self, block: _Block) -> None:
        """Write an open block; rows after it start a new one."""
        assert block.buffer is not None, "only open blocks are stored"
        rows = block.buffer[:, : block.filled]
        final_row = block.final_row if block.final_row < block.filled else 0
        final = rows[-1, final_row:] if block.final_row < block.filled else None
        for plane in (*rows[:-1], *(() if final is None else (final,))):
            if ((plane & self._exponent) == self._exponent).any():
                raise _NonFinite
        block.ref = self._sink.put_block(block.start, rows[:-1], final, final_row)
        self._recycle(block)

    def _store_for_others(self, block: _Block) -> None:
        """Write an open block that another request's record needs; if that fails, the other has a gap."""
        if block.buffer is None:
            return
        try:
            self._store(block)
        except (SinkError, _NonFinite):
            self._recycle(block)

    def _recycle(self, block: _Block) -> None:
        """Let go of a block's buffer; without a ref it is dead then."""
        if block.pooled is not None and len(self._spare) < self._max_spare:
            self._spare.append(block.pooled)
        block.buffer = block.pooled = None

    def _truncate(self, seq: _Sequence, position: int) -> None:
        """Forget tokens and rows from ``position`` on, which the engine computes again."""
        seq.length = position
        seq.next_position = min(seq.next_position, position)
        while seq.own and seq.own[-1][0].start + seq.own[-1][1] > position:
            block, _ = seq.own[-1]
            if block.start < position:
                seq.own[-1][1] = position - block.start
                if block.buffer is not None:
                    self._store(block)  # the index may point at its rows: new ones go elsewhere
                break
            if block.wanted:
                self._store_for_others(block)
            self._recycle(block)
            seq.own.pop()
        for key in seq.keys[position // self._granule :]:
            self._leave(key)
        del seq.keys[position // self._granule :]

    # -- prefixes -----------------------------------------------------------------------------------

    def _link(self, touched: list[_Sequence]) -> None:
        """Extend hash chains; offer own rows to later requests, find the rows that a cache hit skipped."""
        granule = self._granule
        pending = [seq for seq in touched if seq.next_position // granule > len(seq.keys)]
        # A request may hit what another one computes in the same step, always further on: offer first.
        for seq in sorted(pending, key=lambda seq: seq.holes[-1][1] if seq.holes else 0):
            key = seq.keys[-1] if seq.keys else seq.new.salt
            for low in range(len(seq.keys) * granule, seq.next_position - granule + 1, granule):
                tokens = seq.tokens[low : low + granule].tobytes()
                key = blake2b(key + tokens, digest_size=16).digest()
                seq.keys.append(key)
                self._link_granule(seq, key, low, low + granule)
        self._shrink_index()

    def _link_granule(self, seq: _Sequence, key: bytes, low: int, high: int) -> None:
        link = self._index.get(key)
        if link is None:
            link = self._index[key] = _Link()
        link.users += 1
        missing = [(max(a, low), min(b, high)) for a, b in seq.holes if a < high and low < b]
        for a, b in missing:
            for part in link.parts:
                found = _clip(part, a, b)
                if found is not None:
                    seq.parts.append(found)
        if missing:
            return  # the rows that others computed are in the index already
        parts: list[_Part] = []
        for block, rows in reversed(seq.own):
            part = _clip((block, block.start, 0, rows), low, high)
            if part is not None:
                parts.append(part)
            if block.start <= low:
                break
        if sum(stop - start for _, _, start, stop in parts) == high - low:
            link.parts = tuple(reversed(parts))
            for block, *_ in parts:
                block.wanted = True

    def _leave(self, key: bytes) -> None:
        """A live request no longer runs through this granule; it becomes the newest to be forgotten."""
        link = self._index.get(key)
        if link is not None:
            link.users -= 1
            self._index.move_to_end(key)

    def _retire(self, handle: int, seq: _Sequence) -> None:
        """Take a request off the table."""
        del self._live[handle]
        for key in reversed(seq.keys):  # as vLLM frees its blocks: the end of a prompt is forgotten first
            self._leave(key)
        self._shrink_index()

    def _shrink_index(self) -> None:
        """Forget the oldest granules; those of live requests stay, the engine's cache still has them too."""
        for _ in range(min(len(self._index) - self._max_granules, 4096)):
            key, link = self._index.popitem(last=False)
            if link.users > 0:
                self._index[key] = link

    # -- records ------------------------------------------------------------------------------------

    def _finish(self, handle: int, seq: _Sequence, reason: str) -> None:
        prompt_len = len(seq.new.prompt_token_ids)
        length = min(seq.length, seq.row_limit + 1)
        rows = min(length - 1, seq.next_position)
        length = min(length, rows + 1)  # an interrupted prefill: only the tokens that were fed
        given = seq.new.given_spans
        if rows < 1 or (length < prompt_len if given else length <= prompt_len):
            return self.drop(handle, "skipped_empty")
        if not self._min_tokens <= length <= self._max_tokens:
            return self.drop(handle, "skipped_length")
        try:
            for block, _ in seq.own:
                if block.buffer is not None:
                    self._store(block)
            pieces = []
            reused = 0
            for part in self._parts(seq):
                clipped = _clip(part, 0, rows)
                if clipped is None:
                    continue
                block, position, row_start, row_stop = clipped
                self._store_for_others(block)
                if block.ref is None:
                    continue  # its owner was dropped: an explicit gap
                pieces.append(Piece(position, block.ref, row_start, row_stop))
            pieces = _join(pieces)
            own_refs = {block.ref for block, _ in seq.own}
            held = sum(p.row_stop - p.row_start for p in pieces)
            reused = sum(p.row_stop - p.row_start for p in pieces if p.block not in own_refs)
            if not pieces:
                return self.drop(handle, "skipped_empty")
            spans = _spans(given or ((prompt_len, length),), length)
            self._sink.put_record(
                RecordMeta(
                    request_id=seq.new.request_id,
                    token_ids=seq.tokens[:length].copy(),
                    spans=spans,
                    pieces=tuple(pieces),
                    finish_reason="stop" if given else reason,
                    started_unix_s=seq.started,
                    finished_unix_s=time.time(),
                    sampling=dict(seq.new.sampling),
                    lora=seq.new.lora,
                    flags=("given_answers",) if given else (),
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
        self._count("response_tokens", sum(s.stop - s.start for s in spans if s.kind == "response"))
        self._count("rows_stored", held - reused)
        self._count("rows_reused", reused)
        self._count("gap_rows", rows - held)
        self._count("raw_bytes", rows * self._layers * self._hidden * self._dtype.itemsize)
        self._retire(handle, seq)
        return None

    def _parts(self, seq: _Sequence) -> Iterator[_Part]:
        own = [(block, block.start, 0, rows) for block, rows in seq.own]
        return iter(sorted([*seq.parts, *own], key=lambda part: part[1]))


def _spans(responses: tuple[tuple[int, int], ...], length: int) -> tuple[Span, ...]:
    """Response spans with prompt spans between them, over all of ``[0, length)``."""
    spans, at = [], 0
    for start, stop in responses:
        if start > at:
            spans.append(Span(at, start, "prompt"))
        spans.append(Span(start, stop, "response"))
        at = stop
    if at < length:
        spans.append(Span(at, length, "prompt"))
    return tuple(spans)


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
