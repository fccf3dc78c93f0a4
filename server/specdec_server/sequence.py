"""One record token by token: text, what each position is, and how a drafter predicted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_tap.errors import InputError, ShardError
from specdec_tap.runlog import RecordPredictions
from specdec_tap.shards import Record

from .errors import ApiError
from .text import token_texts, visible

MAX_WINDOW = 4096
WINDOW = 1024
CONTEXT_TOKENS = 4

KINDS = ("prompt", "earlier", "response")
"""What a position is: prompt, an answer of an earlier turn inside the prompt, or response."""


def sequence(
    record: Record,
    *,
    start: int,
    stop: int,
    sources: dict[str, Any],
    decode: Callable[[list[int]], str] | None,
    show_ids: bool,
    predictions: RecordPredictions | None,
) -> dict[str, Any]:
    """Return the tokens ``[start, stop)`` of a record.

    Args:
        record: The record.
        start: First position.
        stop: Position after the last; cut to the record's length and to ``MAX_WINDOW`` tokens.
        sources: From ``Library.sources``.
        decode: Token ids to text; None leaves the text out.
        show_ids: Whether token ids are told (they are the text, for whoever has the tokenizer).
        predictions: Of this record, or None.

    Raises:
        ApiError: 422 when the range is not inside the record.
    """
    total = record.num_tokens
    if not 0 <= start < max(total, 1):
        raise ApiError(422, "invalid_value", f"start is {start:,}; expected 0 to {total - 1:,}")
    stop = min(stop, total, start + MAX_WINDOW)
    kind = np.zeros(total, np.int8)
    for a, b in sources["earlier"]:
        kind[a:b] = 1
    for span in record.spans:
        if span.kind == "response":
            kind[span.start : span.stop] = 2
    cached = np.zeros(total, bool)
    for part in sources["cached"]:
        cached[part["start"] : part["stop"]] = True
    gap = np.zeros(total, bool)
    for a, b in record.gaps:
        gap[a:b] = True
    ids = record.token_ids[start:stop].tolist()
    texts: list[str] | None = None
    if decode is not None:
        context = record.token_ids[max(0, start - CONTEXT_TOKENS) : start].tolist()
        texts = [visible(text) for text in token_texts(decode, ids, context)]
    drafts = _drafts(predictions, start, stop)
    accepted = {} if predictions is None else simulate(predictions)[0]
    tokens = []
    for i, position in enumerate(range(start, stop)):
        tokens.append(
            {
                "position": position,
                "id": ids[i] if show_ids else None,
                "text": texts[i] if texts is not None else None,
                "kind": KINDS[kind[position]],
                "cached": bool(cached[position]),
                "gap": bool(gap[position]),
                "drafts": drafts[i] if drafts is not None else None,
                "accepted": accepted.get(position),
            }
        )
    return {"start": start, "stop": stop, "num_tokens": total, "tokens": tokens}


def _drafts(
    predictions: RecordPredictions | None, start: int, stop: int
) -> list[list[dict[str, Any]]] | None:
    """Per token, one ``{correct, probability, rank}`` per draft position; all None where not evaluated."""
    if predictions is None:
        return None
    out = []
    for position in range(start, stop):
        i = position - predictions.first_position
        inside = 0 <= i < predictions.num_tokens
        out.append(
            [
                {
                    "correct": step.correct[i] if inside else None,
                    "probability": step.probability[i] if inside else None,
                    "rank": step.rank[i] if inside else None,
                }
                for step in predictions.steps
            ]
        )
    return out


def simulate(predictions: RecordPredictions) -> tuple[dict[int, bool], int]:
    """Walk a record as a greedy server would: draft, keep the right tokens, add the target's own one.

    Returns:
        Token position to whether it was an accepted draft (True) or cost a step of the target (False), for
        every token that was evaluated at draft position 1; and the number of rounds, the last one included
        when the record ends in the middle of it. Where a chain runs into a token that was not evaluated, it
        ends.
    """
    first = predictions.first_position
    out: dict[int, bool] = {}
    at, end, rounds = 0, predictions.num_tokens, 0
    while at < end:
        if predictions.steps[0].correct[at] is None:
            at += 1
            continue
        length = 0
        rounds += 1
        for k, step in enumerate(predictions.steps):
            if at + k >= end or step.correct[at + k] != 1:
                break
            length += 1
        for i in range(at, at + length):
            out[first + i] = True
        if at + length < end and predictions.steps[0].correct[at + length] is not None:
            out[first + at + length] = False
        at += length + 1
    return out, rounds


def draft_summary(predictions: RecordPredictions, worst: int = 8) -> dict[str, Any]:
    """Say how a drafter did on a whole record.

    Returns:
        ``positions``: per draft position ``num_evaluated``, ``num_correct`` and the sum of probabilities;
        ``misses``: the longest stretches of tokens that the first draft position got wrong, longest first;
        ``num_rounds`` and ``num_accepted`` of a greedy server that drafts this far.
    """
    fates, rounds = simulate(predictions)
    positions = []
    for step in predictions.steps:
        known = [c for c in step.correct if c is not None]
        given = [p for p in step.probability if p is not None]
        positions.append(
            {
                "num_evaluated": len(known),
                "num_correct": sum(known),
                "correct_fraction": sum(known) / len(known) if known else None,
                "mean_probability": sum(given) / len(given) if given else None,
            }
        )
    wrong = np.array([c == 0 for c in predictions.steps[0].correct], bool)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], wrong.astype(np.int8), [0])))).tolist()
    runs = sorted(zip(edges[::2], edges[1::2], strict=True), key=lambda r: (r[0] - r[1], r[0]))
    first = predictions.first_position
    return {
        "positions": positions,
        "num_accepted": sum(fates.values()),
        "num_rounds": rounds,
        "misses": [{"start": first + a, "stop": first + b} for a, b in runs[:worst] if b - a > 1],
    }


def safe_sources(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the sources of a record; where its shards are damaged, none, with the reason."""
    try:
        return find() | {"problem": None}
    except (ShardError, InputError) as err:
        return {"cached": [], "earlier": [], "complete": False, "problem": str(err)}
