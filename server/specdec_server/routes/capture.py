"""What is being captured now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from ..deps import Board, reader

router = APIRouter(prefix="/api", dependencies=[Depends(reader)])


@router.get("/capture")
def capture(board: Board, history: bool = False) -> dict[str, Any]:
    """Return running ranks, sums, rates and the disk forecast; with ``history`` the last minutes too."""
    out = board.capture()
    if history:
        out["history"] = board.history.series()
    return out


@router.get("/streams/ended")
def ended(board: Board) -> dict[str, Any]:
    """Return the streams of servers that have ended, newest first."""
    return {"streams": board.ended()[:500]}


@router.get("/events")
async def events(board: Board) -> StreamingResponse:
    """Stream ``capture``, ``shards`` and ``runs`` events as they change."""
    return board.events.response()
