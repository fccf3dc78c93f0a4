"""Join the turns of one conversation into one training sequence, so that every token is trained once.

In a chat, the prompt of turn two is the whole of turn one plus what the user said next. Captured one by
one, the early tokens would be trained once per later turn, and the answers of early turns would count as
prompt there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ShardError
from .layout import RecordMeta, Span
from .lossy import to_float
from .reader import Record, _some, bits_to_torch

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


def stitch(records: Iterable[Record]) -> Iterator[Stitched]:
    """Group records into conversations: one sequence per record that is no prefix of another.

    A record whose tokens, all of them, begin another record's is folded into it. Where several records
    begin alike (an answer regenerated, a conversation forked), the shared turn goes to one of them only.
    LoRA adapters are kept apart, since the same tokens give other states there. Holds the token ids of all
    records in memory.

    Args:
        records: Any records, in any order, of one target.

    Returns:
        Sequences, ordered by token ids. A lone record becomes a ``Stitched`` of one.
    """
    # Big-endian bytes sort like the token sequences do, and a prefix sorts right before its extensions.
    held = list(records)
    keyed = sorted((r.meta.lora or "", r.token_ids.astype(">i4").tobytes(), i) for i, r in enumerate(held))
    chain: list[int] = []
    for at, (lora, key, number) in enumerate(keyed):
        chain.append(number)
        follows = at + 1 < len(keyed) and keyed[at + 1][0] == lora and keyed[at + 1][1].startswith(key)
        if not follows:
            yield Stitched([held[i] for i in chain])
            chain = []


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
