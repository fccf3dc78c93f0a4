"""Join the turns of one conversation into one training sequence, so that every token is trained once.

In a chat, the prompt of turn two is the whole of turn one plus what the user said next. Captured one by
one, the early tokens would be trained once per later turn, and the answers of early turns would count as
prompt there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ShardError
from .layout import RecordMeta, Span
from .lossy import to_float
from .reader import Record, ShardStore, _some, bits_to_torch

if TYPE_CHECKING:
    import torch


class Stitched:
    """One sequence made of records whose tokens are prefixes of the longest one. Reads like a ``Record``."""

    def __init__(self, records: list[Record]) -> None:
        """Take records that are prefixes of each other, shortest first."""
        self.records = tuple(records)
        self._longest = records[-1]
        self.header = self._longest.header
        self.spans = _joined_spans(self.records)
        self._aux = _assign([[(p.position, p.stop) for p in r.pieces] for r in records])
        self._final = _assign([r.final_span for r in records])

    def __repr__(self) -> str:
        return f"Stitched({[r.id for r in self.records]}, {self.num_tokens:,} tokens)"

    @property
    def id(self) -> str:
        """Id of the longest record."""
        return self._longest.id

    @property
    def meta(self) -> RecordMeta:
        """Facts of the longest record; its spans are only its own, ``spans`` here are of all turns."""
        return self._longest.meta

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T] of the longest record."""
        return self._longest.token_ids

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._longest.num_tokens

    @property
    def num_rows(self) -> int:
        """T - 1."""
        return self._longest.num_rows

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of positions below T - 1 whose aux states no turn has."""
        gaps, at = [], 0
        for start, stop, _ in self._aux:
            if start > at:
                gaps.append((at, start))
            at = stop
        if at < self.num_rows:
            gaps.append((at, self.num_rows))
        return gaps

    @property
    def final_span(self) -> list[tuple[int, int]]:
        """Ranges of positions with a final state in some turn, merged."""
        spans: list[tuple[int, int]] = []
        for start, stop, _ in self._final:
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        return spans

    def aux(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Aux states as raw bits [rows, A, H]; see ``Record.aux``."""
        stop = self.num_rows if stop is None else stop
        out = np.empty((stop - start, self.header.num_aux, self.header.hidden_size), self.header.bits_dtype)
        self._fill(out, start, stop, self._aux, Record.aux, "aux", self.gaps)
        return out

    def final(self, start: int, stop: int) -> np.ndarray:
        """Final states as raw bits [rows, H]; see ``Record.final``."""
        out = np.empty((stop - start, self.header.hidden_size), self.header.bits_dtype)
        self._fill(out, start, stop, self._final, Record.final, "final", self.final_span)
        return out

    def _fill(
        self,
        out: np.ndarray,
        start: int,
        stop: int,
        ranges: list[tuple[int, int, int]],
        read: Callable[[Record, int, int], np.ndarray],
        what: str,
        shown: list[tuple[int, int]],
    ) -> None:
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(
                f"positions [{start}, {stop}) are not inside the {self.num_rows:,} rows of {self.id}"
            )
        at = start
        for low, high, source in ranges:
            low, high = max(low, start), min(high, stop)
            if low >= high:
                continue
            if low > at:
                break
            out[low - start : high - start] = read(self.records[source], low, high)
            at = high
        if at < stop:
            held = "its gaps are" if what == "aux" else "it has"
            raise ShardError(
                f"{self.id} (stitched) has no {what} states at position {at:,}; {held} {_some(shown)}"
            )

    def aux_float(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """``aux`` as float32."""
        return to_float(self.aux(start, stop), self.header.dtype)

    def final_float(self, start: int, stop: int) -> np.ndarray:
        """``final`` as float32."""
        return to_float(self.final(start, stop), self.header.dtype)

    def aux_torch(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """``aux`` as a torch tensor of the shard's dtype."""
        return bits_to_torch(self.aux(start, stop), self.header.dtype)

    def final_torch(self, start: int, stop: int) -> torch.Tensor:
        """``final`` as a torch tensor of the shard's dtype."""
        return bits_to_torch(self.final(start, stop), self.header.dtype)


@dataclass(slots=True)
class _Node:
    """Records with the same tokens and the same adapter."""

    records: list[int]
    length: int
    first_prompt: int | None
    """Tokens before the first answer; None without one."""
    parent: _Node | None = None
    """Longest record that this one goes on from."""
    heir: _Node | None = None
    """The first record that goes on from this one."""


@dataclass(frozen=True, slots=True)
class Group:
    """Records that form one sequence."""

    records: tuple[int, ...]
    """Numbers in the store, shortest first."""
    first_prompt: int | None
    """Tokens before the first answer of the conversation; None without one."""
    known_tokens: int = 0
    """Tokens at the start that another sequence trains."""


def stitch(records: Iterable[Record]) -> Iterator[Stitched]:
    """Group records into conversations: one sequence per record that is no prefix of another.

    A record whose tokens, all of them, begin another record's is folded into it. Where several records
    begin alike (an answer regenerated, a conversation forked), the shared turn goes to the first of them.
    LoRA adapters are kept apart, since the same tokens give other states there, and records that lost a part
    join nothing.

    Args:
        records: Any records, in any order, of one target.

    Returns:
        Sequences, in the order of their first records. A lone record becomes a ``Stitched`` of one.
    """
    held = records if isinstance(records, ShardStore | Sequence) else list(records)
    for found in group(held):
        yield Stitched([held[i] for i in found.records])


def group(store: Sequence[Record] | ShardStore) -> list[Group]:
    """Find the conversations of a store, in the order of their first records.

    Reads the tokens of every record twice and holds a few hundred bytes a record, which is known by a 64-bit
    number that is a sum over its positions: the numbers of all its prefixes are one cumulative sum. What
    matches is compared by digest.
    """
    nodes: dict[tuple[str, bytes], _Node] = {}
    keys: dict[str, dict[int, bytes]] = defaultdict(dict)
    """By adapter: digests of whole records by their number."""
    alone = []
    sums = _Sums()
    for index in range(len(store)):
        record = store[index]
        if record.removed_rows:
            # Trains nothing, so nothing may rely on it.
            alone.append(Group((index,), _first_prompt(record)))
            continue
        ids, lora = np.asarray(record.token_ids), record.meta.lora or ""
        digest = _digest(ids)
        if node := nodes.get((lora, digest)):
            node.records.append(index)
            found = [p for p in (node.first_prompt, _first_prompt(record)) if p is not None]
            node.first_prompt = min(found, default=None)
            continue
        nodes[lora, digest] = _Node([index], len(ids), _first_prompt(record))
        keys[lora][int(sums(ids)[-1])] = digest
    known = {lora: np.array(sorted(found), np.uint64) for lora, found in keys.items()}
    for (lora, _), node in nodes.items():
        ids = np.asarray(store[node.records[0]].token_ids)
        prefixes, mine = sums(ids)[:-1], known[lora]
        at = np.searchsorted(mine, prefixes)
        hits = np.flatnonzero(mine[np.minimum(at, len(mine) - 1)] == prefixes)
        for last in hits[::-1].tolist():
            digest = keys[lora][int(prefixes[last])]
            if digest == _digest(ids[: last + 1]):
                node.parent = nodes[lora, digest]
                node.parent.heir = node.parent.heir or node  # nodes come in the order of the records
                break
    groups = alone + [_group_of(node) for node in nodes.values() if node.heir is None]
    return sorted(groups, key=lambda g: min(g.records))


def _group_of(last: _Node) -> Group:
    """The sequence that ends with a node."""
    chain = [last]
    while (parent := chain[-1].parent) is not None and parent.heir is chain[-1]:
        chain.append(parent)
    root = chain[-1]
    known = 0 if root.parent is None else root.parent.length
    # A request without an answer, such as a system prompt alone, is where many conversations begin.
    first, node = None, last
    while node is not None:
        first = first if node.first_prompt is None else node.first_prompt
        node = node.parent
    return Group(tuple(i for node in chain[::-1] for i in node.records), first, known)


class _Sums:
    """Numbers of all prefixes of a token sequence."""

    def __init__(self) -> None:
        self._factors = np.empty(0, np.uint64)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) > len(self._factors):
            size = max(4096, 2 * len(ids))
            self._factors = np.random.default_rng(0).integers(0, 2**64, size, dtype=np.uint64)
        terms = (ids.astype(np.int64) + 1).astype(np.uint64) * self._factors[: len(ids)]
        return np.cumsum(terms, dtype=np.uint64)


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=16).digest()


def _first_prompt(record: Record) -> int | None:
    return next((s.start for s in record.spans if s.kind == "response"), None)


def _joined_spans(records: tuple[Record, ...]) -> tuple[Span, ...]:
    """Response where any turn says response, prompt elsewhere."""
    total = records[-1].num_tokens
    response = np.zeros(total, bool)
    for record in records:
        for span in record.spans:
            if span.kind == "response":
                response[span.start : span.stop] = True
    edges = [0, *(np.flatnonzero(response[1:] != response[:-1]) + 1).tolist(), total]
    return tuple(Span(a, b, "response" if response[a] else "prompt") for a, b in itertools.pairwise(edges))


def _assign(ranges: list[list[tuple[int, int]]]) -> list[tuple[int, int, int]]:
    """Disjoint sorted (start, stop, source) covering the union of all ranges; earlier sources first."""
    size = max((stop for spans in ranges for _, stop in spans), default=0)
    source = np.full(size + 1, -1, np.int32)
    for number, spans in reversed(list(enumerate(ranges))):
        for start, stop in spans:
            source[start:stop] = number
    edges = [0, *(np.flatnonzero(source[1:] != source[:-1]) + 1).tolist()]
    out = []
    for a, b in zip(edges, [*edges[1:], size], strict=True):
        if a < b and source[a] >= 0:
            out.append((a, b, int(source[a])))
    return out
