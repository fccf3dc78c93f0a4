"""Talks to the routes under ``/specdec_tap`` of a running ``vllm serve``; standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import IO, Any

from .errors import InputError
from .serving import is_loopback, root_url

TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 8 << 20
NOT_MOUNTED_HINT = (
    "start that server with VLLM_PLUGINS=specdec_tap: vLLM adds the routes of a plugin only when it is named"
)


class TapServerError(InputError):
    """The server refused, or does not answer; ``code`` and ``hint`` are its own words where it had any."""

    def __init__(self, status: int, code: str, detail: str, hint: str | None) -> None:
        super().__init__(f"{detail}; {hint}" if hint else detail)
        self.status, self.code, self.detail, self.hint = status, code, detail, hint


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it points."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


class TapClient:
    """One server.

    Args:
        url: Its address, with or without ``/v1``.
        token: Admin token to send, or None.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"the server's address is {url!r}; expected one such as http://127.0.0.1:8000")
        self.url = root_url(url)
        self._token = token
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if is_loopback(self.url):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def status(self) -> dict[str, Any]:
        """Return what every rank is doing.

        Raises:
            TapServerError: The server refused or does not answer.
        """
        return self.call("status")

    def call(self, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """GET a route, or POST ``body`` to it.

        Raises:
            TapServerError: The server refused or does not answer.
        """
        address = f"{self.url}/specdec_tap/{name}"
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(address, data, headers, method="GET" if body is None else "POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                value = json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as err:
            raise _refusal(address, err) from err
        except (OSError, ValueError) as err:
            reason = getattr(err, "reason", err)
            why = getattr(reason, "strerror", None) or reason
            raise TapServerError(
                502,
                "server_unreachable",
                f"{address} does not answer ({why})",
                "is 'vllm serve' running there?",
            ) from err
        if not isinstance(value, dict):
            raise TapServerError(502, "server_unreachable", f"{address} answers no JSON object", None)
        return value


def _refusal(address: str, err: urllib.error.HTTPError) -> TapServerError:
    try:
        told = json.loads(err.read(1 << 16))
        hint = told["hint"]
        return TapServerError(
            err.code, str(told["code"]), str(told["detail"]), None if hint is None else str(hint)
        )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if err.code == 404:
        return TapServerError(
            502, "server_unreachable", f"{address} does not exist on that server", NOT_MOUNTED_HINT
        )
    return TapServerError(502, "server_unreachable", f"{address} answers {err.code} {err.reason}", None)
