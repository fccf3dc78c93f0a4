"""Shard files and their verification."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from ..deps import Board, Limit, Offset, Shard, Stream, changer, reader
from ..errors import not_found

router = APIRouter(prefix="/api/shards", dependencies=[Depends(reader)])


@router.get("")
def shards(
    board: Board, q: Annotated[str, Query(max_length=200)] = "", offset: Offset = 0, limit: Limit = 100
) -> dict[str, Any]:
    """Return one page of shards, newest first; ``q`` is a part of the name or a state."""
    return shards_page(board, q, offset, limit)


def shards_page(board: Board, q: str, offset: int, limit: int) -> dict[str, Any]:
    """Return shards with what was verified of them, the folder's sums, and what could not be read."""
    rows = board.library.shards()
    needle = q.strip().lower()
    if needle:
        rows = [row for row in rows if needle in row["name"].lower() or needle == row["state"]]
    page = rows[offset : offset + limit]
    for row in page:
        row["verification"] = board.verifier.get(row["stream"], row["shard"])
    end = offset + len(page)
    return {
        "summary": board.library.summary(),
        "shards": page,
        "num_matching": len(rows),
        "next_offset": end if end < len(rows) else None,
        "skipped": board.library.skipped(),
    }


@router.get("/{stream}/{shard}")
def shard(board: Board, stream: Stream, shard: Shard) -> dict[str, Any]:
    """Return one shard with its whole header."""
    out = board.library.shard(stream, shard)
    path = board.library.shard_path(stream, shard)
    return out | {"verification": board.verifier.get(stream, shard, path)}


@router.get("/{stream}/{shard}/verify")
def verification(board: Board, stream: Stream, shard: Shard) -> dict[str, Any]:
    """Return the newest verification of a shard."""
    path = board.library.shard_path(stream, shard)
    result = board.verifier.get(stream, shard, path)
    if result is None:
        raise not_found(f"shard {stream}/{shard:06d} was not verified here", "POST to this path verifies it")
    return result


@router.post("/{stream}/{shard}/verify", dependencies=[Depends(changer)], status_code=202)
async def verify(board: Board, stream: Stream, shard: Shard) -> dict[str, Any]:
    """Verify a shard in the background."""
    path = await asyncio.to_thread(board.library.shard_path, stream, shard)
    return board.verifier.start(stream, shard, path)
