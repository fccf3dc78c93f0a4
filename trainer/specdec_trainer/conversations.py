"""A store of requests as one of conversations, so that every token is trained once.

In a chat the prompt of turn two is all of turn one and what the user said next. A record whose tokens, all
of them, begin another record's is joined with it (``specdec_tap.shards.stitch``). Where several records go on
from the same one (a fork, an answer that was regenerated), it is joined with the first of them; in the others
its tokens are context without loss.

``stitch`` itself holds the tokens of all records. Here a record is known by a 64-bit number that is a sum
over its positions, so that the numbers of all its prefixes are one cumulative sum; what matches is compared
by digest. That takes a few hundred bytes a record.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_tap.shards import Stitched


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


class Conversation(Stitched):
    """A group of records, read like one record."""

    removed_rows = 0

    def __init__(self, records: list[Any], group: Group) -> None:
        super().__init__(records)
        self.first_prompt = group.first_prompt
        self.known_tokens = group.known_tokens


@dataclass(slots=True)
class ConversationStore:
    """Conversations of a store, in the order of their first records; the rest is the store's."""

    store: Any
    groups: list[Group] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = group(self.store)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Any:
        found = self.groups[index]
        records = [self.store[i] for i in found.records]
        if len(records) == 1 and not found.known_tokens:
            return records[0]  # a fork's first prompt is shorter than its own, but then it knows tokens
        return Conversation(records, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def group(store: Any) -> list[Group]:
    """Find the conversations of a store. Reads the tokens of every record twice."""
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


def _first_prompt(record: Any) -> int | None:
    return next((s.start for s in record.spans if s.kind == "response"), None)
