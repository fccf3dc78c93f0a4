"""Shards as the records of an algorithm: which captured states are its input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from specdec_tap.errors import InputError

from .algorithms import ALGORITHMS
from .drafter import Drafter


def view(store: Any, kind: type[Drafter]) -> Any:
    """The store itself, or one whose input states are the final ones.

    Raises:
        InputError: The shards lack states that the algorithm reads.
    """
    if kind.reads == "aux":
        if not store.header.aux_layer_ids:
            others = " or ".join(name for name, other in ALGORITHMS.items() if other.reads == "final")
            raise InputError(
                f"the shards hold no aux states, which {kind.title} reads; capture with aux_layer_ids, or "
                f"train with --algorithm {others}"
            )
        return store
    scope = getattr(store.header, "final_scope", "all")
    if kind.needs_context and scope != "all":
        raise InputError(
            f"the shards hold final states at {scope} positions only, and {kind.title} reads them at every "
            "one; capture with SPECDEC_TAP_FINAL_HIDDEN=all"
        )
    return FinalStore(store)


Place = list[int]
"""``[shard, ordinal]`` of a record in its stream."""


def held_records(store: Any) -> dict[str, Any]:
    """What a store holds now, to find the same records again: ``last`` of each stream, and how many."""
    last: dict[str, Place] = {}
    for index in range(len(store)):
        stream, place = _place(store[index])
        last[stream] = max(place, last.get(stream, place))
    return {"last": last, "count": len(store)}


def as_it_was(store: Any, then: dict[str, Any], shards: Any) -> Any:
    """The records of a store that ``held_records`` counted.

    Raises:
        InputError: Some of them are gone.
    """
    indices = []
    for index in range(len(store)):
        stream, place = _place(store[index])
        if place <= then["last"].get(stream, [-1, -1]):
            indices.append(index)
    if len(indices) != then["count"]:
        raise InputError(
            f"the run started with {then['count']:,} records, of which {str(shards)!r} now holds "
            f"{len(indices):,}, and a resumed run must see the same; put them back, or start a new run with "
            "--init-from"
        )
    return store if len(indices) == len(store) else Subset(store, indices)


def _place(record: Any) -> tuple[str, Place]:
    stream, shard, ordinal = record.id.rsplit("/", 2)
    return stream, [int(shard), int(ordinal)]


class Subset:
    """Some records of a store; everything else is the store's."""

    def __init__(self, store: Any, indices: list[int]) -> None:
        self._store, self._indices = store, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._store[self._indices[index]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class FinalRecord:
    """A captured request whose input states are the final ones, ``[rows, 1, H]``."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Rows without a final state."""
        out, at = [], 0
        for start, stop in sorted(self._record.final_span):
            if start > at:
                out.append((at, start))
            at = max(at, stop)
        if at < self._record.num_rows:
            out.append((at, self._record.num_rows))
        return out

    def aux(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = self._record.num_rows if stop is None else stop
        return self._record.final(start, stop)[:, None]


class FinalStore:
    """A store of ``FinalRecord``; everything else is the wrapped store's."""

    def __init__(self, store: Any) -> None:
        self._store = store
        header = store.header
        self.header = SimpleNamespace(
            **{
                name: getattr(header, name)
                for name in ("dtype", "target", "final_hidden", "final_scope")
                if hasattr(header, name)
            },
            aux_layer_ids=(),
        )

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> FinalRecord:
        return FinalRecord(self._store[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
