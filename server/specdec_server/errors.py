"""One JSON shape for every error: ``{"detail": message, "code": word, "hint": what to do or null}``."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specdec_tap.errors import (
    ConfigError,
    CorruptShardError,
    IncompatibleShardsError,
    InputError,
    ShardError,
    SpecdecTapError,
)

logger = logging.getLogger("specdec_tap.server")

CODES = {
    "bad_request": "the request is malformed, or for another host",
    "not_found": "no such page, shard, record or run",
    "method_not_allowed": "the path exists, for another method",
    "invalid_value": "a parameter is missing or out of range",
    "sign_in": "the token is missing or wrong",
    "no_token_configured": "nothing can be changed until the server has an admin token",
    "forbidden": "this reader may not do that",
    "too_many_requests": "slow down; Retry-After says for how long",
    "busy": "something else is under way; try again",
    "shard_corrupt": "a shard is damaged",
    "shards_mixed": "shards of different targets are in one folder",
    "input_error": "a file or folder is not what was expected",
    "server_unreachable": "the vLLM server does not answer",
    "capture_off": "the server does not capture",
    "control_failed": "a rank refused a change",
    "internal": "a bug; the log has the traceback",
}
"""Every value that ``code`` can have, and what it means."""

_BY_STATUS = {400: "bad_request", 401: "sign_in", 403: "forbidden", 404: "not_found",
              405: "method_not_allowed", 429: "too_many_requests", 503: "busy"}  # fmt: skip


class ApiError(SpecdecTapError):
    """An error with its HTTP status and code."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        hint: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        assert code in CODES, f"{code} is not in CODES"
        self.status, self.code, self.hint, self.headers = status, code, hint, headers


def not_found(what: str, hint: str | None = None) -> ApiError:
    """Return the error for a thing that does not exist."""
    return ApiError(404, "not_found", what, hint=hint)


def error_response(
    status: int, code: str, detail: str, hint: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the one shape."""
    return JSONResponse({"detail": detail, "code": code, "hint": hint}, status, headers)


def as_api_error(err: Exception) -> ApiError:
    """Return what a client is told about an exception of the library."""
    if isinstance(err, ApiError):
        return err
    message = str(err)
    if isinstance(err, IncompatibleShardsError):
        return ApiError(409, "shards_mixed", message, hint="keep each target in a folder of its own")
    if isinstance(err, (CorruptShardError, ShardError)):
        hint = "'specdec-tap shards verify' says what is wrong, 'shards repair' seals or rebuilds"
        return ApiError(409, "shard_corrupt", message, hint=hint)
    if isinstance(err, (InputError, ConfigError)):
        return ApiError(422, "input_error", message)
    return ApiError(500, "internal", "the server made an error; its log has the traceback")


async def on_library_error(request: Request, err: Exception) -> JSONResponse:
    told = as_api_error(err)
    return error_response(told.status, told.code, str(told), told.hint, told.headers)


async def on_http_error(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, HTTPException), "registered for it"
    code = _BY_STATUS.get(err.status_code, "bad_request" if err.status_code < 500 else "internal")
    detail = str(err.detail)
    if err.status_code == 404 and detail == "Not Found":
        detail = "there is nothing at this path"
    return error_response(err.status_code, code, detail, None, dict(err.headers or {}))


async def on_validation_error(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestValidationError), "registered for it"
    parts = [_one_problem(e) for e in err.errors()[:5]]
    return error_response(422, "invalid_value", "; ".join(parts))


def _one_problem(problem: dict[str, Any]) -> str:
    where = ".".join(str(p) for p in problem["loc"] if p not in ("query", "path", "body")) or "body"
    return f"{where}: {problem['msg']}"


async def on_bug(request: Request, err: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=err)
    return error_response(500, "internal", "the server made an error; its log has the traceback")


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of an application leave in the one shape."""
    app.add_exception_handler(SpecdecTapError, on_library_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_bug)
