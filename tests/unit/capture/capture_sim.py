"""A small engine that does to its requests what vLLM does, and knows what every row should be.

A row is a hash of all tokens up to its position (and of the adapter), so a row that belongs to other tokens,
to another position or to another request with other tokens is always a different row.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from specdec_tap.capture.assembler import Assembler, NewRequest, SinkError
from specdec_tap.shards.layout import BlockRef, RecordMeta

NUM_AUX, HIDDEN, VOCAB = 2, 4, 5
MASK = (1 << 64) - 1


def extend(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) & MASK


def start_state(lora: str | None) -> int:
    value = 88172645463325252
    for byte in (lora or "").encode():
        value = extend(value, byte)
    return value


def row_of(state: int) -> np.ndarray:
    """uint16 ``[NUM_AUX + 1, HIDDEN]``: the row of the position whose tokens hash to ``state``."""
    mixed = [(state * (2 * i + 1) >> 24) & 0x3FFF for i in range((NUM_AUX + 1) * HIDDEN)]
    return np.array(mixed, np.uint16).reshape(NUM_AUX + 1, HIDDEN)


def rows_of(tokens: list[int], lora: str | None) -> np.ndarray:
    """Rows of one unbroken prefill, ``[NUM_AUX + 1, T, HIDDEN]``."""
    state, out = start_state(lora), []
    for token in tokens:
        state = extend(state, token)
        out.append(row_of(state))
    return np.stack(out, axis=1)


class ListSink:
    """Keeps blocks and records in memory; ``fail`` makes it fail like a full disk."""

    def __init__(self) -> None:
        self.blocks: dict[BlockRef, tuple[int, np.ndarray, np.ndarray | None, int]] = {}
        self.records: list[RecordMeta] = []
        self.fail = False

    def put_block(self, position: int, aux: np.ndarray, final: np.ndarray | None, final_row: int) -> BlockRef:
        if self.fail:
            raise SinkError("disk full")
        ref = BlockRef(1, len(self.blocks))
        self.blocks[ref] = (position, aux.copy(), None if final is None else final.copy(), final_row)
        return ref

    def put_record(self, record: RecordMeta) -> None:
        if self.fail:
            raise SinkError("disk full")
        self.records.append(record)


def check_record(record: RecordMeta, sink: ListSink, lora: str | None) -> tuple[set[int], set[int]]:
    """Assert that every stored row is the right one; return the positions with aux and with final rows."""
    want = rows_of(record.token_ids.tolist(), lora)
    aux_at, final_at = set(), set()
    for piece in record.pieces:
        start, aux, final, final_row = sink.blocks[piece.block]
        assert start + piece.row_start == piece.position
        got = aux[:, piece.row_start : piece.row_stop]
        assert np.array_equal(got, want[:NUM_AUX, piece.position : piece.stop])
        assert not aux_at & set(range(piece.position, piece.stop))
        aux_at |= set(range(piece.position, piece.stop))
        for row in range(piece.row_start, piece.row_stop):
            if final is not None and final_row <= row < final_row + len(final):
                assert np.array_equal(final[row - final_row], want[NUM_AUX, start + row])
                final_at.add(start + row)
    return aux_at, final_at


@dataclass(kw_only=True)
class SimRequest:
    handle: int  # 0: not captured
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    stops: frozenset[int]
    seed: int
    lora: str | None = None
    computed: int = 0
    announced: bool = False
    status: str = "waiting"  # waiting, running, finished
    reason: str | None = None  # as the engine sees it: stop, length, abort, silent
    dropped: bool = False
    num_resampled: int = 0
    drafted: bool = False  # a drafter proposed tokens after the last sampled one
    hits: dict[int, set[int]] = field(default_factory=dict)  # position -> handles that computed it

    def states(self, tokens: list[int]) -> list[int]:
        state, out = start_state(self.lora), []
        for token in tokens:
            state = extend(state, token)
            out.append(state)
        return out

    def next_token(self, tokens: list[int]) -> int:
        state = self.states(tokens)[-1]
        return (state >> 33 ^ self.seed ^ 7 * self.num_resampled) % VOCAB


@dataclass(kw_only=True)
class Knobs:
    """What this engine does."""

    block_size: int = 16
    budget: int = 48
    max_running: int = 4
    max_drafts: int = 0
    asynchronous: bool = False
    counted: bool = False  # V2: counts beside the sampled ids; V1: -1 where a draft was rejected
    cache: bool = True
    preempt: float = 0.1
    discard: float = 0.0
    abort: float = 0.0
    drop: float = 0.0
    evict: float = 0.0
    uncaptured: float = 0.0


class Engine:
    """Schedules, preempts, caches, drafts, rejects; feeds an Assembler what the tap would."""

    def __init__(self, assembler: Assembler, rng: random.Random, knobs: Knobs) -> None:
        self.assembler, self.rng, self.knobs = assembler, rng, knobs
        self.requests: list[SimRequest] = []
        self.cache: dict[int, set[int]] = {}  # state at the end of a block -> handles that computed it
        self.to_finish: list[SimRequest] = []
        self.ghosts: list[SimRequest] = []  # done, but one more step of theirs was already scheduled
        self.counts: Counter[str] = Counter()

    def add(self, **kwargs: object) -> SimRequest:
        captured = self.rng.random() >= self.knobs.uncaptured
        request = SimRequest(handle=len(self.requests) + 1 if captured else 0, **kwargs)
        self.requests.append(request)
        return request

    def run(self, max_steps: int = 2000) -> None:
        for step in range(max_steps):
            if step == max_steps // 4:  # enough of it; long requests must end
                self.knobs = replace(self.knobs, preempt=0.0, discard=0.0)
            if not any(r.status != "finished" for r in self.requests) and not self.ghosts:
                break
            self.step()
        else:
            raise AssertionError("the simulated engine did not come to an end")
        self._flush_finished()

    # -- one step -----------------------------------------------------------------------------------

    def step(self) -> None:
        rng, knobs = self.rng, self.knobs
        ghosts, self.ghosts = self.ghosts, []
        self._flush_finished()
        self._disturb()
        budget = rng.randint(1, knobs.budget)
        running = [r for r in self.requests if r.status == "running"]
        waiting = [r for r in self.requests if r.status == "waiting"]
        rng.shuffle(running)
        batch: list[tuple[SimRequest, int, int, list[int]]] = []  # request, first, certain rows, drafts
        for request in running + waiting:
            if budget <= 0:
                break
            if request.status == "waiting":
                if len([r for r in self.requests if r.status == "running"]) >= knobs.max_running:
                    continue
                self._start(request)
            remaining = len(request.tokens) - request.computed
            rows = min(remaining, budget)
            if rng.random() < 0.3:
                rows = rng.randint(1, rows)
            drafts: list[int] = []
            if rows == remaining and request.drafted:
                drafts = self._draft(request)[: max(0, budget - rows)]
            budget -= rows + len(drafts)
            batch.append((request, request.computed, rows, drafts))
            request.computed += rows
            self._cache_blocks(request, request.computed)
        for request in ghosts:
            # The engine scheduled one more token for it before it saw that the request was done.
            batch.append((request, len(request.tokens) - 1, 1, []))
            self.to_finish.append(request)
        rng.shuffle(batch)
        self._emit_and_update(batch, set(map(id, ghosts)))

    def _start(self, request: SimRequest) -> None:
        if not request.announced and request.handle:
            request.announced = True
            self.counts["announced"] += 1
            self.assembler.on_new(
                NewRequest(
                    handle=request.handle,
                    request_id=str(request.handle),
                    prompt_token_ids=np.array(request.tokens[: request.prompt_len], np.int32),
                    stop_token_ids=request.stops,
                    max_response_tokens=request.max_tokens,
                    lora=request.lora,
                    salt=(request.lora or "").encode(),
                )
            )
        request.status, request.drafted = "running", False
        request.computed = self._hit(request)

    def _hit(self, request: SimRequest) -> int:
        """Longest cached prefix, at least one token short of everything."""
        if not self.knobs.cache:
            return 0
        size, states = self.knobs.block_size, request.states(request.tokens)
        hit = 0
        for end in range(size, len(request.tokens), size):
            sources = self.cache.get(states[end - 1])
            if sources is None:
                break
            for position in range(end - size, end):
                request.hits.setdefault(position, set()).update(sources)
            hit = end
        return hit

    def _cache_blocks(self, request: SimRequest, computed: int) -> None:
        if not self.knobs.cache:
            return
        size, states = self.knobs.block_size, request.states(request.tokens[:computed])
        for end in range(size, computed + 1, size):
            # A block that was hit keeps the source that computed it.
            sources = set().union(*(request.hits.get(p, {request.handle}) for p in range(end - size, end)))
            self.cache.setdefault(states[end - 1], sources | {request.handle})

    def _draft(self, request: SimRequest) -> list[int]:
        count = self.rng.randint(0, self.knobs.max_drafts)
        tokens, out = list(request.tokens), []
        for _ in range(count):
            true = request.next_token(tokens)
            out.append(true if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
            tokens.append(out[-1])
        return out

    def _emit_and_update(self, batch: list[tuple[SimRequest, int, int, list[int]]], ghosts: set[int]) -> None:
        """Make the step's arrays, hand them over, and update the requests as the engine would."""
        columns = 1 + self.knobs.max_drafts
        handles, starts = [], [0]
        positions, inputs, rows, sampled, counts = [], [], [], [], []
        updates = []
        for request, first, certain, drafts in batch:
            fed = request.tokens[first : first + certain] + drafts
            got: list[int] = []
            if first + certain == len(request.tokens):
                tokens = request.tokens[: first + certain]
                for draft in [*drafts, None]:
                    true = request.next_token(tokens)
                    got.append(true)
                    tokens.append(true)
                    if draft != true:
                        break
            updates.append((request, got, first + certain == len(request.tokens), id(request) in ghosts))
            handles.append(request.handle)
            garbage = self.rng.randrange(VOCAB)
            fill = garbage if self.knobs.counted or not got else -1
            sampled.append((got + [fill] * columns)[:columns])
            counts.append(len(got) if self.knobs.counted or not got else -1)
            if request.handle:
                states = request.states(request.tokens[:first] + fed)[first:]
                positions += range(first, first + len(fed))
                inputs += fed
                rows += [row_of(state) for state in states]
            starts.append(len(positions))
        if batch:
            self.assembler.on_step(
                np.array(handles, np.uint64),
                np.array(starts, np.int32),
                np.array(positions, np.int64),
                np.array(inputs, np.int32),
                np.stack(rows, axis=1) if rows else np.zeros((NUM_AUX + 1, 0, HIDDEN), np.uint16),
                np.array(sampled, np.int32),
                np.array(counts, np.int32),
            )
        for request, got, sampled_now, is_ghost in updates:
            if sampled_now and not is_ghost and request.status == "running":
                self._append(request, got)

    def _append(self, request: SimRequest, got: list[int]) -> None:
        if self.rng.random() < self.knobs.discard:
            # A forced preemption: the sampled tokens never reach the request, it samples again. The step
            # that was already running fed them all the same.
            if self.knobs.asynchronous and self.rng.random() < 0.5:
                self._overrun(request, got)
            request.num_resampled += 1
            request.status, request.computed = "waiting", 0
            return
        for token in got:
            request.tokens.append(token)
            response = len(request.tokens) - request.prompt_len
            if token in request.stops:
                request.reason = "stop"
            elif response >= request.max_tokens:
                request.reason = "length"
            if request.reason:
                break
        request.computed, request.drafted = len(request.tokens) - 1, True
        self._cache_blocks(request, request.computed)
        if request.reason:
            request.status = "finished"
            overrun = self.knobs.asynchronous and self.rng.random() < 0.7
            (self.ghosts if overrun else self.to_finish).append(request)

    def _overrun(self, request: SimRequest, got: list[int]) -> None:
        kept, request.tokens = request.tokens, request.tokens + got
        self._emit_and_update([(request, len(request.tokens) - 1, 1, [])], {id(request)})
        request.tokens = kept

    def _flush_finished(self) -> None:
        finished, self.to_finish = self.to_finish, []
        for request in finished:
            if request.handle:
                self.assembler.on_finish(request.handle)

    def _disturb(self) -> None:
        rng, knobs = self.rng, self.knobs
        for request in self.requests:
            if request.status == "running" and rng.random() < knobs.preempt:
                request.status, request.computed = "waiting", 0
            if request.status == "running" and rng.random() < knobs.abort:
                request.status, request.reason = "finished", "abort"
                self.to_finish.append(request)
            live = request.announced and request.status == "running" and not request.dropped
            if live and rng.random() < knobs.drop:
                request.dropped = True
                self.counts["dropped_by_worker"] += 1
                self.assembler.drop(request.handle, None)
        for key in list(self.cache):
            if rng.random() < knobs.evict:
                del self.cache[key]
        self._flush_finished()
