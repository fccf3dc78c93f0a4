"""Static files, cached for good when they are asked for by their content's hash."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"


@functools.cache
def asset_url(name: str) -> str:
    """Return the address of a static file, with a part that changes when the file does.

    Raises:
        OSError: There is no such file; a template is wrong.
    """
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


class VersionedFiles(StaticFiles):
    """Static files; an address with a version may be kept for a year, one without is checked each time."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """See Starlette."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        versioned = scope.get("query_string", b"").startswith(b"v=")
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if versioned else "no-cache"
        return response
