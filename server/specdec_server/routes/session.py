"""Signing in with the token, from the page."""

from __future__ import annotations

import urllib.parse

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from ..dashboard import SESSION_COOKIE
from ..deps import Board
from ..errors import ApiError
from ..pages import render

router = APIRouter()

MAX_FORM_BYTES = 8192


@router.get("/sign-in")
def sign_in_page(request: Request, board: Board, next: str = "/") -> Response:
    """Show the form."""
    return render(request, board, "sign_in.html", title="Sign in", next=local_path(next))


@router.post("/sign-in")
async def sign_in(request: Request, board: Board) -> Response:
    """Check the token and give a session cookie."""
    form = await read_form(request)
    after = local_path(form.get("next", "/"))
    if not board.gate.has_token:
        problem = "This dashboard has no token. Start it with SPECDEC_TAP_ADMIN_TOKEN set."
        return render(request, board, "sign_in.html", 403, title="Sign in", next=after, problem=problem)
    try:
        right = board.gate.matches(form.get("token", "").strip())
    except ApiError as err:
        problem = f"Too many wrong tokens; {err.hint}."
        return render(request, board, "sign_in.html", 429, title="Sign in", next=after, problem=problem)
    if not right:
        problem = "That is not the token."
        return render(request, board, "sign_in.html", 401, title="Sign in", next=after, problem=problem)
    response = RedirectResponse(after, 303)
    response.set_cookie(
        SESSION_COOKIE,
        board.sessions.issue(),
        max_age=board.sessions.lifetime_s,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/sign-out")
def sign_out() -> Response:
    """Forget the session."""
    response = RedirectResponse("/", 303)
    response.delete_cookie(SESSION_COOKIE)
    return response


async def read_form(request: Request) -> dict[str, str]:
    """Read a small urlencoded form.

    Raises:
        ApiError: It is too large.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise ApiError(413, "invalid_value", f"the form is over {MAX_FORM_BYTES:,} bytes")
    return dict(urllib.parse.parse_qsl(body.decode("utf-8", "replace"), max_num_fields=20))


def local_path(path: str) -> str:
    """Return ``path`` if it leads to this dashboard and nowhere else, else the start page.

    Example:
        >>> [local_path(p) for p in ("/runs?x=1", "//evil.example", "https://evil.example", "/\\\\evil")]
        ['/runs?x=1', '/', '/', '/']
    """
    plain = path.isprintable() and path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if plain else "/"
