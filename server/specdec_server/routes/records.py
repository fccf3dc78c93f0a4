"""Captured requests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from specdec_tap.errors import InputError
from specdec_tap.runlog import RecordPredictions
from specdec_tap.shards import Record

from ..deps import Board, Limit, Offset, Ordinal, SeesText, Shard, Stream, reader
from ..library import record_facts
from ..sequence import WINDOW, draft_summary, safe_sources, sequence

router = APIRouter(prefix="/api/records", dependencies=[Depends(reader)])

Run = Annotated[str | None, Query(max_length=200)]


@router.get("")
def records(
    board: Board,
    sort: Annotated[str, Query(max_length=20)] = "newest",
    q: Annotated[str, Query(max_length=256)] = "",
    min_tokens: Annotated[int, Query(ge=0, le=1 << 24)] = 0,
    gaps_only: bool = False,
    stream: Annotated[str | None, Query(max_length=128)] = None,
    shard: Annotated[int | None, Query(ge=0)] = None,
    offset: Offset = 0,
    limit: Limit = 50,
) -> dict[str, Any]:
    """Return one page of records; ``q`` is a part of a record id or request id."""
    return board.library.records(
        sort=sort, offset=offset, limit=limit, query=q, min_tokens=min_tokens, gaps_only=gaps_only,
        stream=stream or None, shard=shard,
    )  # fmt: skip


@router.get("/{stream}/{shard}/{ordinal}")
def record(board: Board, stream: Stream, shard: Shard, ordinal: Ordinal) -> dict[str, Any]:
    """Return everything about a record but its tokens."""
    return record_view(board, stream, shard, ordinal)


def record_view(board: Board, stream: str, shard: int, ordinal: int) -> dict[str, Any]:
    """Return a record's facts, where its states come from, its neighbours, and the runs that predicted it."""
    with board.library.store() as store:
        found = board.library.find(store, stream, shard, ordinal)
        facts = record_facts(found)
        facts["sources"] = safe_sources(lambda: board.library.sources(store, found))
        facts["prediction_runs"] = board.runs.prediction_runs(found)
    facts["previous"], facts["next"] = board.library.neighbours(facts["id"])
    return facts


@router.get("/{stream}/{shard}/{ordinal}/tokens")
def tokens(
    board: Board,
    text: SeesText,
    stream: Stream,
    shard: Shard,
    ordinal: Ordinal,
    start: Annotated[int, Query(ge=0, le=1 << 24)] = 0,
    stop: Annotated[int | None, Query(ge=0, le=1 << 25)] = None,
    run: Run = None,
) -> dict[str, Any]:
    """Return tokens of a record; text and ids only to those who may see them."""
    return tokens_view(board, text, stream, shard, ordinal, start, stop, run)


def _predictions(board: Board, run: str, record: Record) -> RecordPredictions | None:
    """What a run predicted for a record; None when it is not the record any more that the run saw."""
    predictions = board.runs.predictions(run)
    return predictions.get(record.id) if predictions.is_about(record.id, record.token_ids) else None


def tokens_view(
    board: Board,
    text: bool,
    stream: str,
    shard: int,
    ordinal: int,
    start: int,
    stop: int | None,
    run: str | None,
) -> dict[str, Any]:
    """Return a window of tokens with, for a run, how its drafter predicted them."""
    with board.library.store() as store:
        found = board.library.find(store, stream, shard, ordinal)
        sources = safe_sources(lambda: board.library.sources(store, found))
        predictions = _predictions(board, run, found) if run else None
    decode, text_problem = None, None
    if text:
        try:
            decode = board.tokenizer.decoder()
        except InputError as err:
            text_problem = str(err)
    out = sequence(
        found,
        start=start,
        stop=start + WINDOW if stop is None else stop,
        sources=sources,
        decode=decode,
        show_ids=text,
        predictions=predictions,
    )
    return out | {
        "text_shown": text,
        "text_problem": text_problem,
        "run": run,
        "draft_summary": draft_summary(predictions) if predictions is not None else None,
    }
