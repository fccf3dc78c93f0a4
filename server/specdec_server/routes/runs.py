"""Training runs and evaluations."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query

from ..deps import Board, reader

router = APIRouter(prefix="/api", dependencies=[Depends(reader)])


@router.get("/runs")
def runs(board: Board) -> dict[str, Any]:
    """Return one row per run, the one that was started last first."""
    return {"runs": board.runs.rows()}


@router.get("/runs/{name}")
def run(
    board: Board,
    name: Annotated[str, Path(max_length=255)],
    points: Annotated[int, Query(ge=10, le=5000)] = 500,
) -> dict[str, Any]:
    """Return one run with its settings and curves of at most ``points`` points."""
    return board.run(name, points)


@router.get("/evaluations")
def evaluations(board: Board) -> dict[str, Any]:
    """Return what ``specdec-tap eval --json`` wrote in the runs folder, newest first."""
    return {"evaluations": board.runs.evaluations()}
