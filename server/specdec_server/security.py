"""Who may read, who may change: token, session cookie, host check, rate limits."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response

ADMIN_HEADER = "authorization"
CHANGE_HEADER = "x-specdec-tap"
"""A page of another origin cannot send it without asking first, and nobody answers that question."""

NO_TOKEN_HINT = (
    "set SPECDEC_TAP_ADMIN_TOKEN (16 characters or more; 'openssl rand -hex 16' makes one) in the environment"
    " of the server, or admin_token in the file that SPECDEC_TAP_CONFIG names, and start it again"
)


def same_secret(given: str, wanted: str) -> bool:
    """Compare without telling by the time taken where, or at which length, two secrets differ."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (given, wanted))
    return hmac.compare_digest(*digests)


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """Return the token of an ``Authorization: Bearer TOKEN`` header, or None."""
    scheme, _, token = headers.get(ADMIN_HEADER, "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


class RateLimit:
    """A token bucket: ``per_s`` events a second on average, ``burst`` at once. Thread-safe."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._level = float(burst)
        self._at = clock()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take one event; return 0 if it is allowed, else the seconds until the next one is."""
        with self._lock:
            now = self._clock()
            self._level = min(self._level + (now - self._at) * self._per_s, self._burst)
            self._at = now
            if self._level >= 1.0:
                self._level -= 1.0
                return 0.0
            return (1.0 - self._level) / self._per_s

    def check(self, what: str) -> None:
        """Take one event.

        Raises:
            ApiError: 429 with ``Retry-After``, when there were too many.
        """
        wait = self.take()
        if wait:
            raise ApiError(
                429, "too_many_requests", f"too many {what}", hint=f"try again in {wait:.1f} s",
                headers={"Retry-After": str(max(1, round(wait)))},
            )  # fmt: skip


class Gate:
    """Checks admin tokens of one server; wrong ones are slowed down for everybody.

    Args:
        token: The configured secret; None refuses every change.
        public_read: Whether reading needs no token.
    """

    def __init__(self, token: str | None, *, public_read: bool) -> None:
        self._token = token
        self.public_read = public_read
        self._failures = RateLimit(per_s=0.5, burst=10)

    @property
    def has_token(self) -> bool:
        """Whether a token is configured."""
        return self._token is not None

    def matches(self, given: str | None) -> bool:
        """Whether ``given`` is the token.

        Raises:
            ApiError: 429 after too many wrong ones.
        """
        if given is None or self._token is None:
            return False
        if same_secret(given, self._token):
            return True
        self._failures.check("wrong tokens")
        return False

    def check_read(self, request: HTTPConnection) -> None:
        """Allow reading.

        Raises:
            ApiError: 403 without a configured token, 401 for a missing or wrong one, 429 for too many.
        """
        if not self.public_read:
            self._check(request, "reading this needs an admin token, and none is configured")

    def check_change(self, request: HTTPConnection) -> None:
        """Allow a change.

        Raises:
            ApiError: As :meth:`check_read`.
        """
        self._check(request, "changing anything needs an admin token, and none is configured")

    def signed_in(self, request: HTTPConnection) -> bool:
        """Whether the request carries the token.

        Raises:
            ApiError: 429 after too many wrong ones.
        """
        return self.matches(bearer_token(request.headers))

    def _check(self, request: HTTPConnection, no_token: str) -> None:
        if self._token is None:
            raise ApiError(403, "no_token_configured", no_token, hint=NO_TOKEN_HINT)
        if not self.signed_in(request):
            given = bearer_token(request.headers)
            raise ApiError(
                401, "sign_in", "the admin token is missing" if given is None else "the admin token is wrong",
                hint="send the header 'Authorization: Bearer TOKEN'", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


class Sessions:
    """Cookies of readers who signed in: signed with a key of this process, so they end with it."""

    lifetime_s = 12 * 3600

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._clock = clock

    def issue(self) -> str:
        """Return a new cookie value."""
        expires = str(int(self._clock()) + self.lifetime_s)
        return f"{expires}.{self._sign(expires)}"

    def valid(self, cookie: str | None) -> bool:
        """Whether a cookie value was issued here and has not expired."""
        expires, _, signature = (cookie or "").partition(".")
        if not expires.isdecimal() or len(expires) > 12 or not same_secret(signature, self._sign(expires)):
            return False
        return int(expires) > self._clock()

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Shield:
    """ASGI middleware: refuses foreign Host headers (DNS rebinding) and adds the security headers.

    Args:
        app: What to protect.
        hosts: Names, without port, that a request may be for; None allows every one.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                headers.extend(_HEADERS)
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
            await send(message)

        if self._hosts is not None:
            host = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
            if _without_port(host) not in self._hosts:
                answer = error_response(
                    400, "bad_request", f"this dashboard is not at {host!r}",
                    "open it at http://127.0.0.1 or http://localhost with its port",
                )  # fmt: skip
                await answer(scope, receive, send_with_headers)
                return
        await self._app(scope, receive, send_with_headers)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()
