"""What the routes ask FastAPI for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from .dashboard import Dashboard, check_same_origin
from .library import MAX_PAGE


def dashboard(request: Request) -> Dashboard:
    """The application's one dashboard."""
    return request.app.state.dashboard


Board = Annotated[Dashboard, Depends(dashboard)]


def reader(request: Request, board: Board) -> None:
    """Refuse whoever may not read."""
    board.gate.check_read(request)


def changer(request: Request, board: Board) -> None:
    """Refuse a request that a browser was led to, or whose sender may not read."""
    check_same_origin(request)
    board.gate.check_read(request)


def sees_text(request: Request, board: Board) -> bool:
    """Whether the sender may see what people wrote."""
    return board.may_see_text(request)


SeesText = Annotated[bool, Depends(sees_text)]
Stream = Annotated[str, Path(max_length=128, description="stream name")]
Shard = Annotated[int, Path(ge=0, le=10**9, description="number of the shard in its stream")]
Ordinal = Annotated[int, Path(ge=0, le=1 << 31, description="number of the record in its shard")]
Offset = Annotated[int, Query(ge=0, le=1 << 40)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
