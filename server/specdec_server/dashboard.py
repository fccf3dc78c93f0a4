"""Everything one dashboard holds: no state lives in a module."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from starlette.requests import HTTPConnection

from specdec_tap.capture.status import StatusReader, StreamStatus, current, total
from specdec_tap.errors import InputError, ShardError
from specdec_tap.runlog import token_digest
from specdec_tap.shards import ShardStore

from .errors import ApiError
from .events import Broadcast
from .history import History
from .library import Library
from .runs import Runs
from .security import CHANGE_HEADER, Gate, Sessions
from .settings import Settings
from .text import TargetTokenizer
from .verify import Verifier

SAMPLE_INTERVAL_S = 1.0
SESSION_COOKIE = "specdec_tap_session"


class Dashboard:
    """The services behind the routes.

    Args:
        settings: Checked settings.

    Raises:
        InputError: The shards folder does not exist.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.library = Library(settings.shards_dir)
        self.runs = Runs(settings.runs_dir)
        self.tokenizer = TargetTokenizer(settings.shards_dir / "target")
        self.history = History()
        self.sessions = Sessions()
        self.gate = DashboardGate(settings, self.sessions)
        self.verifier = Verifier()
        self.events = Broadcast(self._events)
        self._reader = StatusReader(settings.shards_dir)
        self._lock = threading.Lock()
        self._statuses: tuple[list[StreamStatus], list[StreamStatus]] = ([], [])
        self._sampler: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> None:
        """Begin to sample."""
        await asyncio.to_thread(self.sample)
        self._sampler = asyncio.create_task(self._sample_for_ever(), name="specdec-tap-sampler")

    async def stop(self) -> None:
        """End streams, verifications and sampling; close the shards."""
        await self.events.close()
        await self.verifier.close()
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.gather(self._sampler, return_exceptions=True)
        self.library.close()

    async def _sample_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            await asyncio.to_thread(self.sample)

    def sample(self) -> None:
        """Read all status files once and remember the sums."""
        with self._lock:
            everything = self._reader.read()
            running = current(everything)
            self._statuses = (everything, running)
            self.history.add(running)

    # ---- views that several routes share

    def capture(self) -> dict[str, Any]:
        """What is being captured now: ranks, sums, rates, disk forecast."""
        everything, running = self._statuses
        names = {s.stream for s in running}
        states = [s.state for s in running]
        if not running:
            state = "none"
        elif all(s == "capturing" for s in states):
            state = "capturing"
        else:
            state = next(s for s in ("off", "stale", "paused") if s in states)
        return {
            "state": state,
            "ranks": [s.to_json() for s in running],
            "total": total(running),
            "rates": self.history.rates(),
            "forecast": self.history.forecast(running),
            "num_ended_streams": sum(s.stream not in names for s in everything),
            "problems": [{"stream": k, "message": v} for k, v in self._reader.problems.items()],
        }

    def ended(self) -> list[dict[str, Any]]:
        """Streams of servers that have ended, newest first."""
        everything, running = self._statuses
        names = {s.stream for s in running}
        ended = [s.to_json() for s in everything if s.stream not in names]
        return sorted(ended, key=lambda s: s["updated_unix_s"], reverse=True)

    def run(self, name: str, points: int = 500) -> dict[str, Any]:
        """One run; of the records that it predicted, those that the folder still holds."""
        run = self.runs.run(name, points)
        with self.library.store() as store:
            run["predicted_records"] = [
                row for row in run["predicted_records"] if holds(store, row["record"], row["digest"])
            ]
        return run

    async def _events(self) -> dict[str, Any]:
        shards, runs = await asyncio.to_thread(self._versions)
        return {
            "capture": self.capture(),
            "shards": {"version": shards, "verifications": self.verifier.version},
            "runs": {"version": runs},
        }

    def _versions(self) -> tuple[str, str]:
        summary = self.library.version()
        return f"{hash(summary) & 0xFFFFFFFF:08x}", f"{hash(self.runs.version()) & 0xFFFFFFFF:08x}"

    # ---- who may

    def may_see_text(self, request: HTTPConnection) -> bool:
        """Whether text and token ids may be shown to whoever sent this request."""
        return self.settings.show_text or self.gate.signed_in(request)


def holds(store: ShardStore, record_id: str, digest: str) -> bool:
    """Whether a folder has a record with these tokens."""
    try:
        return token_digest(store.find(record_id).token_ids) == digest
    except (InputError, ShardError):
        return False


class DashboardGate(Gate):
    """Also lets in readers with a session cookie; a loopback dashboard is read without one."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        super().__init__(settings.token, public_read=settings.loopback)
        self._sessions = sessions

    def signed_in(self, request: HTTPConnection) -> bool:
        """See :meth:`Gate.signed_in`."""
        return self._sessions.valid(request.cookies.get(SESSION_COOKIE)) or super().signed_in(request)

    def check_change(self, request: HTTPConnection) -> None:
        """See :meth:`Gate.check_change`; a page of another origin cannot send what is asked for here."""
        check_same_origin(request)
        super().check_change(request)


def check_same_origin(request: HTTPConnection) -> None:
    """Refuse changes that a browser was led to by another site.

    Raises:
        ApiError: 403.
    """
    if CHANGE_HEADER not in request.headers and "authorization" not in request.headers:
        raise ApiError(
            403, "forbidden", "a change needs the header X-Specdec-Tap", hint="send 'X-Specdec-Tap: 1'"
        )
