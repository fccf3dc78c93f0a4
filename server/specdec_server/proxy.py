"""Passes control of a capture on to the ``vllm serve`` that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from specdec_tap.tapclient import TapClient, TapServerError

from .errors import CODES, ApiError


class ServerBackend:
    """A :class:`specdec_server.control.Backend` that is another server's.

    Args:
        url: The server's address.
        token: Admin token to send, or None.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.client = TapClient(url, token)

    async def status(self) -> Mapping[str, Any]:
        """Return the status of every rank of that server."""
        return await asyncio.to_thread(self._call, "status", None)

    async def control(self, action: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Do something on every rank of that server."""
        return await asyncio.to_thread(self._call, action, arguments)

    def _call(self, name: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        try:
            return self.client.call(name, body)
        except TapServerError as err:
            code = err.code if err.code in CODES else "server_unreachable"
            raise ApiError(err.status, code, err.detail, hint=err.hint) from err
