"""Templates: how a page is made from a view."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specdec_tap._version import __version__

from .assets import asset_url
from .dashboard import Dashboard
from .errors import ApiError
from .format import FILTERS
from .text import visible

NAVIGATION = (
    ("/", "Capture"),
    ("/shards", "Shards"),
    ("/records", "Records"),
    ("/runs", "Runs"),
    ("/evaluations", "Evaluations"),
)


@functools.cache
def environment() -> Environment:
    """Return the template environment: everything is escaped, an unknown name is an error."""
    env = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= FILTERS
    env.filters["visible"] = visible
    env.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=True)
    env.globals["asset"] = asset_url
    env.globals["version"] = __version__
    env.globals["navigation"] = NAVIGATION
    return env


def render(
    request: Request, board: Dashboard, template: str, status_code: int = 200, *, title: str, **values: Any
) -> HTMLResponse:
    """Return a page.

    Args:
        request: What was asked for.
        board: The dashboard.
        template: File in ``templates/``.
        status_code: Of the response.
        title: Of the page.
        values: What the template names.
    """
    section = "/" + request.url.path.split("/")[1]
    try:
        signed_in = board.gate.signed_in(request)
    except ApiError:  # too many wrong tokens: the page itself is still shown
        signed_in = False
    context = {
        "request_path": request.url.path + (f"?{request.url.query}" if request.url.query else ""),
        "section": section,
        "title": title,
        "signed_in": signed_in,
        "has_token": board.gate.has_token,
        "can_control": board.settings.server_url is not None,
        "has_runs": board.settings.runs_dir is not None,
        "shards_name": board.settings.shards_dir.resolve().name,
        "problem": None,
        **values,
    }
    return HTMLResponse(environment().get_template(template).render(context), status_code)
