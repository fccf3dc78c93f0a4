"""A store of requests as one of conversations, so that every token is trained once.

In a chat the prompt of turn two is all of turn one and what the user said next; ``specdec_tap.shards.stitch``
joins them. Where several records go on from the same one (a fork, an answer that was regenerated), it is
joined with the first of them; in the others its tokens are context without loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec_tap.shards.stitch import Group, Stitched, group


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
