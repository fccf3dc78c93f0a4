"""Server-sent events: one producer, many readers, each reader gets the newest and nobody can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse

from .errors import ApiError

logger = logging.getLogger("specdec_tap.server")

HEARTBEAT_S = 15.0
QUEUE_EVENTS = 8
SEND_AT_ONCE, SEND_PAUSE_S = 8, 0.01
"""A few readers at a time: an event loop that also streams tokens must not stand still for them."""
MAX_SUBSCRIBERS = 256

Produce = Callable[[], Awaitable[Mapping[str, Any]]]


def encode_event(name: str, data: Any) -> bytes:
    """Return one event; the data is one line of JSON."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Broadcast:
    """Calls ``produce`` once per interval while anybody listens, and sends what changed to everybody.

    Args:
        produce: Returns event names and their data. An event whose data is as before is not sent again.
        interval_s: Time between two calls, in seconds.
        max_subscribers: Readers at once; one more is refused.
    """

    def __init__(
        self, produce: Produce, *, interval_s: float = 1.0, max_subscribers: int = MAX_SUBSCRIBERS
    ) -> None:
        self._produce = produce
        self._interval_s = interval_s
        self._max_subscribers = max_subscribers
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._latest: dict[str, bytes] = {}

    @property
    def num_subscribers(self) -> int:
        """Readers now."""
        return len(self._queues)

    def response(self) -> StreamingResponse:
        """Return the stream as a response.

        Raises:
            ApiError: 503, when there are too many readers.
        """
        if len(self._queues) >= self._max_subscribers:
            raise ApiError(
                503, "busy", f"{len(self._queues)} event streams are open, which is the limit",
                hint="close some pages, or poll the status", headers={"Retry-After": "5"},
            )  # fmt: skip
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_EVENTS)
        self._queues.add(queue)
        return StreamingResponse(
            self._stream(queue),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _stream(self, queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        try:
            if self._task is None or self._task.done():
                self._latest.clear()  # from before the last reader left
                self._task = asyncio.create_task(self._run(), name="specdec-tap-events")
            yield b"retry: 3000\n\n" + b"".join(self._latest.values())
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    event = b": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._queues.discard(queue)

    async def _run(self) -> None:
        while self._queues:
            try:
                events = await self._produce()
            except Exception:  # one bad look at the disk must not end everybody's stream
                logger.exception("events cannot be produced")
                events = {}
            changed = []
            for name, data in events.items():
                encoded = encode_event(name, data)
                if self._latest.get(name) != encoded:
                    self._latest[name] = encoded
                    changed.append(encoded)
            if changed:
                await self._send(b"".join(changed))
            await asyncio.sleep(self._interval_s)

    async def _send(self, event: bytes) -> None:
        for number, queue in enumerate(list(self._queues)):
            if number and number % SEND_AT_ONCE == 0:
                await asyncio.sleep(SEND_PAUSE_S)
            self._put(queue, event)

    @staticmethod
    def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
        if queue.full():  # a reader that does not read: the oldest is of no use to it any more
            with contextlib.suppress(asyncio.QueueEmpty):
                queue.get_nowait()
        queue.put_nowait(event)

    async def close(self) -> None:
        """End every stream."""
        for queue in self._queues:
            self._put(queue, None)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
