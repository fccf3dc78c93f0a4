"""Routes under ``/specdec_tap`` on vLLM's API server: look at the capture of this server and steer it.

vLLM loads an endpoint plugin only when ``VLLM_PLUGINS`` names it (``VLLM_PLUGINS=specdec_tap``), and its API
key does not guard these paths: the tap's admin token does. Status is read from files; only a change, and a
rank without a file on this host, is a call into the workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..capture.status import SERVER_ID_VARIABLE, StreamStatus, parse_status, total
from ..config import TapConfig
from ..errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State

logger = logging.getLogger("vllm.specdec_tap")  # inside vLLM only the "vllm" logger has a handler

ASK_INTERVAL_S = 5.0
RPC_TIMEOUT_S = 10.0
DONE_TIMEOUT_S = 10.0
POLL_S = 0.05


def endpoint_plugin() -> TapEndpoints:
    """vLLM's entry point (group ``vllm.endpoint_plugins``)."""
    return TapEndpoints()


class TapEndpoints:
    """What vLLM calls to add the routes and to hand over the engine."""

    name = "specdec_tap"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._backend: EngineBackend | None = None
        self._add_shortcut = lambda: None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the metrics; the engine comes later, with :meth:`init_state`."""
        from specdec_server.control import Shortcut, StatusEndpoint, control_router
        from specdec_server.security import Gate

        additional = getattr(app.state.args, "additional_config", None)
        config, _ = TapConfig.load(additional_config=additional if isinstance(additional, dict) else {})
        self._backend = EngineBackend(config)
        token = None if config is None else config.admin_token
        gate = Gate(token, public_read=config is not None and config.public_status)
        reader = StatusEndpoint(self._backend, gate)
        app.include_router(control_router(self._backend, gate, reader=reader, logger=logger))

        def add_shortcut() -> None:
            # Later: what is added last is asked first, and vLLM adds its middleware after this; it may even
            # have built the whole stack by then.
            if app.middleware_stack is None:
                app.add_middleware(Shortcut, reader=reader)
            else:
                app.middleware_stack = Shortcut(app.middleware_stack, reader)

        self._add_shortcut = add_shortcut
        if config is not None:
            self._expose_metrics(app)
        if token is None:
            logger.info(
                "capture can be steered at /specdec_tap once SPECDEC_TAP_ADMIN_TOKEN is set for this server"
            )

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Take the engine."""
        assert self._backend is not None, "vLLM attaches the routes first"
        self._backend.engine = engine_client
        self._add_shortcut()

    def _expose_metrics(self, app: FastAPI) -> None:
        from . import metrics

        backend = self._backend
        assert backend is not None, "made in attach_router"
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            metrics.register(backend.known)
            return
        # Several API server processes: vLLM's page is made from files of all of them; ours goes behind it.
        theirs = next((r for r in app.routes if getattr(r, "path", None) == "/metrics"), None)
        endpoint = getattr(theirs, "endpoint", None)
        if endpoint is None:
            logger.warning("vLLM's /metrics was not found; the tap's metrics are not shown there")
            return

        from fastapi import Request, Response

        def page(request: Request) -> Response:
            answer = endpoint(request)
            headers = {k: v for k, v in answer.headers.items() if k.lower() != "content-length"}
            return Response(
                bytes(answer.body) + metrics.exposition(backend.known), answer.status_code, headers
            )

        # Its annotations are names of this function, which FastAPI cannot look up.
        page.__annotations__ = {"request": Request, "return": Response}
        app.add_api_route("/metrics", page, methods=["GET"], response_class=Response, include_in_schema=False)


class EngineBackend:
    """A :class:`specdec_server.control.Backend` over the engines behind this API server.

    Args:
        config: Settings of this server's tap; None when capture is not configured.
    """

    def __init__(self, config: TapConfig | None) -> None:
        self.config = config
        self.engine: Any = None
        self._files = None
        if config is not None:
            from .metrics import FileStatuses

            self._files = FileStatuses(config)
        self._asked: list[StreamStatus] = []
        self._asked_at = 0.0
        self._asking: asyncio.Lock | None = None
        self._num_engines = 0
        self._silent: list[int] = []

    # ---- what the routes call

    async def status(self) -> Mapping[str, Any]:
        """Return the status of every rank, at most a second old where its file is on this host."""
        ranks = await asyncio.to_thread(self.known)
        if self._incomplete(ranks):
            await self._ask()
            ranks = await asyncio.to_thread(self.known)
        return self._answer(ranks)

    async def control(self, action: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Do something on every rank, wait until its writer has done it too, and return the status.

        ``done`` in the answer is False when a writer had not worked through its queue after ten seconds.
        """
        from specdec_server.errors import ApiError

        per_engine = await self._call("specdec_tap_control", (action, arguments.get("rate")))
        answers = [a for workers in per_engine for a in workers if isinstance(a, Mapping)]
        problems = sorted({str(a["error"]) for a in answers if "error" in a})
        if problems:
            raise ApiError(409, "control_failed", "; ".join(problems))
        if not answers:
            raise ApiError(
                409, "capture_off", self._why_off(), hint="set SPECDEC_TAP_DIR and start the server again"
            )
        self._take(per_engine)
        done = await self._wait_until_done({a["stream"]: a["controls_sent"] for a in answers})
        return {"action": action, "done": done, **self._answer(await asyncio.to_thread(self.known))}

    def known(self) -> list[StreamStatus]:
        """Return what is known without asking the workers: files, then the last answers. Thread-safe."""
        ranks = {} if self._files is None else {s.dp_rank: s for s in self._files()}
        for asked in self._asked:
            ranks.setdefault(asked.dp_rank, asked)
        return [ranks[rank] for rank in sorted(ranks)]

    # ---- the rest

    def _answer(self, ranks: Sequence[StreamStatus]) -> dict[str, Any]:
        capturing = [s.state == "capturing" for s in ranks]
        if not ranks:
            state, reason = "off", self._why_off()
        elif all(capturing) and not self._silent:
            state, reason = "capturing", None
        else:
            worst = next((s for name in ("off", "stale", "paused") for s in ranks if s.state == name), None)
            state = "off" if worst is None else worst.state
            reason = f"engines {self._silent} do not capture" if worst is None else worst.reason
        return {
            "state": state,
            "reason": reason,
            "num_engines": self._num_engines or len(ranks),
            "specdec_tap": __version__,
            "ranks": [s.to_json() for s in ranks],
            "total": total(ranks),
        }

    def _why_off(self) -> str:
        if self.config is None:
            return (
                "capture is not configured for this server: SPECDEC_TAP_DIR is not set, or SPECDEC_TAP is off"
            )
        return "no engine of this server captures; its log at start says why"

    def _incomplete(self, ranks: Sequence[StreamStatus]) -> bool:
        if self.config is None or time.monotonic() < self._asked_at + ASK_INTERVAL_S:
            return False
        first = not self._num_engines
        missing = len(ranks) + len(self._silent) < self._num_engines
        remote = bool(self._asked) and {s.stream for s in self._asked} & {s.stream for s in ranks}
        return first or missing or bool(remote) or any(s.state == "stale" for s in ranks)

    async def _ask(self) -> None:
        """Ask every worker once; readers that come meanwhile wait for the same answer."""
        if self._asking is None:
            self._asking = asyncio.Lock()
        async with self._asking:
            if time.monotonic() < self._asked_at + ASK_INTERVAL_S:
                return
            self._asked_at = time.monotonic()
            try:
                self._take(await self._call("specdec_tap_status", ()))
            except Exception as err:  # a status that cannot be completed is still shown as far as it is known
                logger.warning("the workers could not be asked for the state of their capture (%s)", err)

    def _take(self, per_engine: Sequence[Sequence[Any]]) -> None:
        """Remember what workers said, for ranks that have no file on this host."""
        asked, silent = [], []
        for number, workers in enumerate(per_engine):
            said = [w for w in workers if isinstance(w, Mapping) and "stream" in w]
            if not said:
                silent.append(number)
            for worker in said:
                try:
                    asked.append(from_worker(worker))
                except InputError as err:
                    logger.warning("%s", err)
        self._num_engines, self._silent = len(per_engine), silent
        local = set() if self._files is None else {s.stream for s in self._files()}
        self._asked = [s for s in asked if s.stream not in local]

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[list[Any]]:
        """Call a method on every worker of every engine.

        Returns:
            Per engine, what each of its workers answered.

        Raises:
            ApiError: 503 when the engine is not up or does not answer in time.
        """
        from specdec_server.errors import ApiError

        if self.engine is None:
            raise ApiError(503, "busy", "the engine is not up yet", headers={"Retry-After": "1"})
        core = getattr(self.engine, "engine_core", None)
        call_all = getattr(core, "call_utility_all_async", None)
        try:
            if call_all is not None:  # collective_rpc returns the answer of the first engine only
                call = call_all("collective_rpc", method, RPC_TIMEOUT_S, args, None)
            else:
                call = self._first_only(method, args)
            return list(await asyncio.wait_for(call, RPC_TIMEOUT_S + 1))
        except TimeoutError as err:
            raise ApiError(
                503, "busy", f"the engine did not answer within {RPC_TIMEOUT_S:.0f} s", hint="try again"
            ) from err
        except Exception as err:  # whatever a dead or failing engine raises
            raise ApiError(
                503, "busy", f"the engine could not be asked ({type(err).__name__}: {err})"
            ) from err

    async def _first_only(self, method: str, args: tuple[Any, ...]) -> list[list[Any]]:
        return [await self.engine.collective_rpc(method, RPC_TIMEOUT_S, args)]

    async def _wait_until_done(self, sent: Mapping[str, int]) -> bool:
        """Wait until every writer has handled the controls that were sent to it."""
        until = time.monotonic() + DONE_TIMEOUT_S
        while time.monotonic() < until:
            done = {s.stream: s.writer.get("controls_done", 0) for s in await asyncio.to_thread(self.known)}
            if all(done.get(stream, -1) >= number for stream, number in sent.items()):
                return True
            if {s.stream for s in self._asked} & set(sent):
                self._take(await self._call("specdec_tap_status", ()))
            await asyncio.sleep(POLL_S)
        return False


def from_worker(said: Mapping[str, Any]) -> StreamStatus:
    """Turn a worker's own status into the form of a status file; what only the writer knows stays unknown.

    Raises:
        InputError: It is not one.
    """
    data = {
        "pid": 0,
        "closed": False,
        "started_unix_s": 0.0,
        "updated_unix_s": time.time(),
        "disk_free_bytes": None,
        "last_error": "the writer process died; another one is being started"
        if said.get("writer_lost")
        else None,
        "engine": {"dp_rank": said.get("dp_rank", 0)},
        "aux_layer_ids": [],
        "server_id": os.environ.get(SERVER_ID_VARIABLE),
        **said,
    }
    return parse_status(data, stream=str(said.get("stream", "")))
