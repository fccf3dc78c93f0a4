"""The pages. Each is its API view put into a template, so it works without a script too."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute

from specdec_tap.errors import SpecdecTapError

from ..deps import Board, Ordinal, SeesText, Shard, Stream
from ..errors import as_api_error
from ..library import SORTS
from ..pages import render
from ..sequence import WINDOW
from .records import record_view, tokens_view
from .shards import shards_page

PAGE_ROWS = 50
MAX_COMPARED = 6


class PageRoute(APIRoute):
    """A route whose errors are pages, and whose readers are sent to sign in where that is needed."""

    def get_route_handler(self) -> Any:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            board = request.app.state.dashboard
            try:
                return await handler(request)
            except SpecdecTapError as err:
                told = as_api_error(err)
                if told.code == "sign_in":
                    return RedirectResponse(f"/sign-in?next={quote(request.url.path)}", 303)
                return render(
                    request, board, "error.html", told.status, title="Not shown", detail=str(told),
                    hint=told.hint,
                )  # fmt: skip

        return handle


def page_reader(request: Request, board: Board) -> None:
    """Refuse whoever may not read."""
    board.gate.check_read(request)


router = APIRouter(route_class=PageRoute, dependencies=[Depends(page_reader)])


@router.get("/")
def capture_page(request: Request, board: Board) -> HTMLResponse:
    """Capture now."""
    return render(
        request, board, "capture.html", title="Capture", capture=board.capture(), ended=board.ended()[:20],
        summary=board.library.summary(), history=board.history.series(),
    )  # fmt: skip


@router.get("/shards")
def shards_list_page(
    request: Request,
    board: Board,
    q: Annotated[str, Query(max_length=200)] = "",
    offset: Annotated[int, Query(ge=0)] = 0,
) -> HTMLResponse:
    """Shard files."""
    view = shards_page(board, q, offset, PAGE_ROWS)
    return render(
        request, board, "shards.html", title="Shards", q=q, offset=offset, page_rows=PAGE_ROWS,
        capture=board.capture(), **view,
    )  # fmt: skip


@router.get("/shards/{stream}/{shard}")
def shard_page(
    request: Request, board: Board, stream: Stream, shard: Shard, offset: Annotated[int, Query(ge=0)] = 0
) -> HTMLResponse:
    """One shard and its records."""
    view = board.library.shard(stream, shard)
    path = board.library.shard_path(stream, shard)
    records = board.library.records(sort="oldest", stream=stream, shard=shard, offset=offset, limit=PAGE_ROWS)
    return render(
        request, board, "shard.html", title=view["name"], shard=view, page=records, offset=offset,
        page_rows=PAGE_ROWS, verification=board.verifier.get(stream, shard, path),
    )  # fmt: skip


@router.get("/records")
def records_page(
    request: Request,
    board: Board,
    sort: Annotated[str, Query(max_length=20)] = "newest",
    q: Annotated[str, Query(max_length=256)] = "",
    min_tokens: Annotated[str, Query(max_length=12)] = "",
    gaps_only: bool = False,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> HTMLResponse:
    """Captured requests."""
    least = int(min_tokens) if min_tokens.isdecimal() else 0
    page = board.library.records(
        sort=sort, query=q, offset=offset, limit=PAGE_ROWS, min_tokens=least, gaps_only=gaps_only
    )
    return render(
        request, board, "records.html", title="Records", page=page, sorts=SORTS, sort=sort, q=q,
        min_tokens=least or "", gaps_only=gaps_only, offset=offset, page_rows=PAGE_ROWS,
    )  # fmt: skip


@router.get("/records/{stream}/{shard}/{ordinal}")
def record_page(
    request: Request,
    board: Board,
    text: SeesText,
    stream: Stream,
    shard: Shard,
    ordinal: Ordinal,
    start: Annotated[int, Query(ge=0, le=1 << 24)] = 0,
    run: Annotated[str, Query(max_length=255)] = "",
) -> HTMLResponse:
    """One conversation, token by token."""
    record = record_view(board, stream, shard, ordinal)
    usable = [r["name"] for r in record["prediction_runs"] if not r["problem"]]
    chosen = run if run in usable else usable[0] if usable and run != "none" else None
    view = tokens_view(board, text, stream, shard, ordinal, start, start + WINDOW, chosen)
    return render(
        request, board, "record.html", title=record["id"], record=record, view=view, run=chosen,
        window=WINDOW, num_drafts=len(view["draft_summary"]["positions"]) if view["draft_summary"] else 0,
    )  # fmt: skip


@router.get("/runs")
def runs_page(
    request: Request, board: Board, compare: Annotated[list[str] | None, Query(max_length=50)] = None
) -> HTMLResponse:
    """Training runs, side by side."""
    rows = board.runs.rows()
    names = [row["name"] for row in rows]
    chosen = [name for name in dict.fromkeys(compare or names[:3]) if name in names][:MAX_COMPARED]
    return render(
        request, board, "runs.html", title="Runs", runs=rows, chosen=chosen,
        curves=[board.runs.run(name) for name in chosen],
    )  # fmt: skip


@router.get("/runs/{name}")
def run_page(request: Request, board: Board, name: Annotated[str, Path(max_length=255)]) -> HTMLResponse:
    """One training run."""
    run = board.run(name)
    evaluations = [e for e in board.runs.evaluations() if e["run"] == name]
    return render(request, board, "run.html", title=name, run=run, evaluations=evaluations)


@router.get("/evaluations")
def evaluations_page(request: Request, board: Board) -> HTMLResponse:
    """Measured acceptance."""
    return render(
        request, board, "evaluations.html", title="Evaluations", evaluations=board.runs.evaluations()
    )
