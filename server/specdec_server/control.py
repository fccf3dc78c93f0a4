"""The routes under ``/specdec_tap``: look at a running capture and steer it.

The same router is mounted into ``vllm serve`` (``specdec_tap.vllm_plugin.endpoints``) and into the dashboard,
where the backend passes everything on to a server. Every error leaves in the one shape, whatever handlers the
application around it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec_tap.errors import SpecdecTapError

from .errors import (
    ApiError,
    error_response,
    on_http_error,
    on_library_error,
    on_validation_error,
)
from .events import Broadcast
from .security import Gate, RateLimit

logger = logging.getLogger("specdec_tap.server")

PREFIX = "/specdec_tap"
STATUS_PATH = f"{PREFIX}/status"
ACTIONS = {
    "pause": "capture no new requests; those under way are finished",
    "resume": "capture new requests again",
    "rate": 'change the share of requests that is captured; the body is {"rate": 0.1}',
    "flush": "put everything written so far on the disk",
    "rotate": "seal the open shard and start the next one",
}
MAX_BODY_BYTES = 4096
STATUS_FRESH_S = 0.5
CHANGES_PER_S, CHANGES_BURST = 5.0, 20
READS_PER_S, READS_BURST = 500.0, 1000


class Backend(Protocol):
    """What the routes talk to."""

    async def status(self) -> Mapping[str, Any]:
        """Return the status of every rank."""
        ...

    async def control(self, action: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Do one of ``ACTIONS`` on every rank and return the status after it."""
        ...


class OwnErrorsRoute(APIRoute):
    """A route whose errors have our shape also inside an application with other error handlers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await with_own_errors(handler, request)

        return handle


async def with_own_errors(handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """Return what the handler returns, and an answer of our shape for whatever it raises."""
    try:
        return await handler(request)
    except SpecdecTapError as err:
        return await on_library_error(request, err)
    except HTTPException as err:
        return await on_http_error(request, err)
    except RequestValidationError as err:
        return await on_validation_error(request, err)
    except Exception:  # the server around us must not see it: serving goes on
        logger.exception("%s %s failed", request.method, request.url.path)
        return error_response(500, "internal", "the server made an error; its log has the traceback")


class Fresh:
    """One answer for many readers: made at most twice a second.

    A reader who finds it a little old starts the next one and takes the old one: if all waited, all would
    be answered in one moment, and what else this event loop does, such as streaming tokens, would stand
    still.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        fresh_s: float = STATUS_FRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._fresh_s, self._clock = make, fresh_s, clock
        self._lock = asyncio.Lock()
        self._value: bytes | None = None
        self._until = 0.0
        self._changes = 0
        self._renewal: asyncio.Task[None] | None = None

    async def get(self) -> bytes:
        """Return the value, at most ``2 * fresh_s`` seconds old.

        Raises:
            Exception: Whatever ``make`` raised, for the readers who waited for it.
        """
        now = self._clock()
        if self._value is not None and now < self._until + self._fresh_s:
            if now >= self._until and (self._renewal is None or self._renewal.done()):
                self._renewal = asyncio.create_task(self._renew())
            return self._value
        async with self._lock:
            if self._value is None or self._clock() >= self._until:
                await self._make_one()
            assert self._value is not None, "made, or an error was raised"
            return self._value

    async def _renew(self) -> None:
        with contextlib.suppress(Exception):  # the value grows too old, and whoever then waits is told
            async with self._lock:
                if self._clock() >= self._until:
                    await self._make_one()

    async def _make_one(self) -> None:
        while True:
            changes = self._changes
            value = await self._make()
            if changes == self._changes:  # else it may be from before the change
                self._value, self._until = value, self._clock() + self._fresh_s
                return

    def forget(self) -> None:
        """The next reader gets a new one."""
        self._changes += 1
        self._value = None


class StatusEndpoint:
    """Answers requests for the status: checks the token, counts them, sends the newest answer."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self._backend, self._gate = backend, gate
        self._reads = RateLimit(READS_PER_S, READS_BURST)
        self.fresh = Fresh(self._encoded)

    async def _encoded(self) -> bytes:
        return json.dumps(dict(await self._backend.status()), separators=(",", ":")).encode()

    def admit(self, request: Request) -> None:
        """Let a reader in, and count it.

        Raises:
            ApiError: 401, 403 or 429.
        """
        self._gate.check_read(request)  # first, as for changes
        self._reads.check("status requests")

    async def answer(self, request: Request) -> Response:
        """Return the status.

        Raises:
            ApiError: As :meth:`admit`.
        """
        self.admit(request)
        headers = {"Cache-Control": "no-store"}
        return Response(await self.fresh.get(), media_type="application/json", headers=headers)


class Shortcut:
    """ASGI middleware that answers ``GET /specdec_tap/status`` ahead of the application around it.

    Two hundred readers a second cost a third of what they cost on the way through vLLM's middleware and
    FastAPI's routing, and that process streams tokens. Other requests pass.
    """

    def __init__(self, app: ASGIApp, reader: StatusEndpoint) -> None:
        self._app, self._reader = app, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != STATUS_PATH or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        response = await with_own_errors(self._reader.answer, Request(scope, receive))
        await response(scope, receive, send)


def control_router(
    backend: Backend,
    gate: Gate,
    *,
    reader: StatusEndpoint | None = None,
    max_streams: int = 256,
    logger: logging.Logger = logger,
) -> APIRouter:
    """Return the routes ``GET status``, ``GET events`` and ``POST`` of every action, under ``/specdec_tap``.

    Args:
        backend: Where the answers come from.
        gate: Who may read and who may change.
        reader: Answers status requests; a :class:`Shortcut` may share it. Made here by default.
        max_streams: Event streams at once.
        logger: Gets a line for every change.
    """
    router = APIRouter(prefix=PREFIX, route_class=OwnErrorsRoute)
    reader = reader or StatusEndpoint(backend, gate)
    changes = RateLimit(CHANGES_PER_S, CHANGES_BURST)

    async def events() -> dict[str, Any]:
        return {"status": dict(await backend.status())}

    broadcast = Broadcast(events, max_subscribers=max_streams)

    @router.get("/status")
    async def status(request: Request) -> Response:
        """Return what every rank is doing."""
        return await reader.answer(request)

    @router.get("/events")
    async def event_stream(request: Request) -> Response:
        """Stream the status as server-sent events."""
        reader.admit(request)
        return broadcast.response()

    def add(action: str, summary: str) -> None:
        async def change(request: Request) -> Response:
            gate.check_change(request)  # first: who has no token must not use up what the admin may do
            changes.check("changes")
            arguments = await _arguments(action, request)
            answer = await backend.control(action, arguments)
            reader.fresh.forget()
            logger.info("capture: %s %s", action, arguments or "")
            return JSONResponse(dict(answer), headers={"Cache-Control": "no-store"})

        change.__name__ = action
        change.__doc__ = summary[0].upper() + summary[1:] + "."
        router.add_api_route(f"/{action}", change, methods=["POST"])

    for name, summary in ACTIONS.items():
        add(name, summary)
    return router


async def _arguments(action: str, request: Request) -> dict[str, Any]:
    """Read the arguments of an action from the body: nothing but what the action knows is passed on.

    Raises:
        ApiError: 413 or 422, saying what was expected.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, "invalid_value", f"the body is over {MAX_BODY_BYTES:,} bytes")
    try:
        values = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as err:
        raise ApiError(422, "invalid_value", "the body is no JSON", hint=ACTIONS[action]) from err
    if not isinstance(values, dict):
        raise ApiError(422, "invalid_value", "the body is no JSON object", hint=ACTIONS[action])
    known = {"rate"} if action == "rate" else set()
    if unknown := sorted(set(values) - known):
        raise ApiError(422, "invalid_value", f"{action} takes no {', '.join(map(repr, unknown))[:200]}")
    if action != "rate":
        return {}
    rate = values.get("rate")
    if type(rate) not in (int, float) or not math.isfinite(rate) or not 0 <= rate <= 1:
        raise ApiError(422, "invalid_value", f"rate is {rate!r:.60}; expected a number from 0 to 1")
    return {"rate": float(rate)}
