"""The parts of the dashboard on their own: history, events, control, tokens, runs, numbers."""

from __future__ import annotations

import asyncio
import doctest
import json
import os
import re
import threading
import time

import pytest
import specdec_server.format
import specdec_server.routes.session
import uvicorn
from fastapi import FastAPI
from helpers.serverkit import write_run
from specdec_server.control import ACTIONS, Fresh, Shortcut, StatusEndpoint, control_router
from specdec_server.errors import ApiError
from specdec_server.events import Broadcast, encode_event
from specdec_server.history import History
from specdec_server.proxy import ServerBackend
from specdec_server.runs import Runs
from specdec_server.security import Gate, RateLimit, Sessions, bearer_token, same_secret
from specdec_server.settings import Settings
from specdec_server.text import token_texts, visible
from starlette.requests import Request
from starlette.testclient import TestClient

import specdec_tap.detokenize
from specdec_tap.capture.status import StatusReader
from specdec_tap.cli.dashboard import listen
from specdec_tap.errors import ConfigError, InputError
from specdec_tap.tapclient import TapClient, TapServerError

TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize(
    "module", [specdec_server.format, specdec_tap.detokenize, specdec_server.routes.session]
)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


# ---- history and forecast


@pytest.fixture
def sampled(tmp_path, put_status):
    """Feed a history from status files: ``sampled(at, rows, stored, ...)``."""
    history = History()
    reader = StatusReader(tmp_path / "shards")

    def add(at: float, *, rows: int, stored: int, stream: str = "a", free: int = 10**9, **more):
        put_status(
            stream, worker={"rows": rows}, writer={"stored_bytes": stored}, disk_free_bytes=free, **more
        )
        statuses = [s for s in reader.read() if s.stream == stream]
        history.add(statuses, now_unix_s=at)
        return statuses

    return history, add


def test_rates_are_differences_over_a_window(sampled):
    history, add = sampled
    for i in range(60):
        add(1000.0 + i, rows=100 * i, stored=5000 * i)
    rates = history.rates()
    assert rates["rows_per_s"] == pytest.approx(100)
    assert rates["stored_bytes_per_s"] == pytest.approx(5000)
    assert rates["window_s"] == pytest.approx(10)


def test_a_restarted_server_starts_its_rates_anew(sampled):
    """Its sums begin at zero; a difference over the restart would be nonsense."""
    history, add = sampled
    add(1000.0, rows=1_000_000, stored=1)
    add(1001.0, rows=50, stored=1, stream="b")
    assert history.rates()["rows_per_s"] == 0
    add(1002.0, rows=90, stored=1, stream="b")
    assert history.rates()["rows_per_s"] == pytest.approx(40)
    assert history.series()["rows_per_s"] == [None, 40.0]


def test_forecast_says_when_the_disk_is_full(sampled):
    history, add = sampled
    for i in range(31):
        statuses = add(1000.0 + i, rows=i, stored=10**6 * i, free=2 * 10**9, min_free_bytes=10**9)
    forecast = history.forecast(statuses)
    assert forecast["full_in_s"] == pytest.approx(1000)
    assert forecast["why"] is None


@pytest.mark.parametrize(
    ("seconds", "speed", "more", "why"),
    [
        (5, 10**6, {}, "watching for a little longer"),
        (31, 0, {}, "nothing is being written"),
        (31, 10**6, {"max_bytes": 10**12}, "kept under max_bytes"),
        (31, 10**6, {"free": None}, "how much disk is free"),
    ],
)
def test_forecast_says_why_there_is_none(sampled, seconds, speed, more, why):
    history, add = sampled
    for i in range(seconds):
        statuses = add(1000.0 + i, rows=i, stored=speed * i, **more)
    forecast = history.forecast(statuses)
    assert forecast["full_in_s"] is None
    assert why in forecast["why"]


def test_history_is_bounded_and_its_series_short(sampled):
    history, add = sampled
    statuses = add(0.0, rows=0, stored=0)
    for i in range(2000):
        history.add(statuses, now_unix_s=float(i))
    series = history.series(max_points=100)
    assert len(series["unix_s"]) <= 100
    assert series["unix_s"][-1] == 1999.0
    assert series["unix_s"][0] > 1000
    assert History().series()["unix_s"] == []
    assert History().rates()["rows_per_s"] == 0


# ---- events


def test_readers_get_the_newest_and_only_what_changed():
    async def scenario() -> list[bytes]:
        value = {"n": 0}

        async def produce():
            return {"a": {"n": value["n"] // 3}, "b": 1}

        broadcast = Broadcast(produce, interval_s=0.01)
        stream = broadcast.response().body_iterator
        got = [await anext(stream)]
        for _ in range(12):
            value["n"] += 1
            await asyncio.sleep(0.012)
        await broadcast.close()
        got += [event async for event in stream]
        assert broadcast.num_subscribers == 0
        return got

    text = b"".join(asyncio.run(scenario())).decode()
    assert text.startswith("retry: 3000\n\n")
    numbers = [json.loads(m) for m in re.findall(r"event: a\ndata: (.*)\n\n", text)]
    assert [n["n"] for n in numbers] == sorted({n["n"] for n in numbers})
    assert numbers[-1]["n"] >= 3
    assert text.count("event: b") == 1


def test_a_reader_that_does_not_read_holds_nobody_up():
    async def scenario() -> None:
        count = 0

        async def produce():
            nonlocal count
            count += 1
            return {"a": count}

        broadcast = Broadcast(produce, interval_s=0.001)
        slow = broadcast.response().body_iterator
        await anext(slow)
        fast = broadcast.response().body_iterator
        await anext(fast)
        for _ in range(50):
            await anext(fast)
        assert count >= 50
        # The slow one gets the last few, not the backlog.
        await broadcast.close()
        assert len([event async for event in slow]) <= 9

    asyncio.run(scenario())


def test_too_many_readers_are_refused_and_nobody_costs_nothing():
    async def scenario() -> None:
        calls = 0

        async def produce():
            nonlocal calls
            calls += 1
            return {"a": calls}

        broadcast = Broadcast(produce, interval_s=0.001, max_subscribers=2)
        streams = [broadcast.response().body_iterator for _ in range(2)]
        with pytest.raises(ApiError, match="2 event streams are open") as caught:
            broadcast.response()
        assert caught.value.status == 503
        for stream in streams:
            await anext(stream)
            await stream.aclose()
        await asyncio.sleep(0.02)
        before = calls
        await asyncio.sleep(0.02)
        assert calls == before

    asyncio.run(scenario())


def test_an_error_of_the_producer_does_not_end_the_stream():
    async def scenario() -> None:
        calls = 0

        async def produce():
            nonlocal calls
            calls += 1
            if calls == 1:
                raise OSError("disk")
            return {"a": calls}

        broadcast = Broadcast(produce, interval_s=0.001)
        stream = broadcast.response().body_iterator
        await anext(stream)
        assert b"event: a" in await anext(stream)
        await broadcast.close()

    asyncio.run(scenario())


def test_event_data_is_one_line():
    assert encode_event("a", {"x": "1\n2"}) == b'event: a\ndata: {"x":"1\\n2"}\n\n'


# ---- tokens and limits


def test_secrets_are_compared_whole():
    assert same_secret(TOKEN, TOKEN)
    assert not same_secret(TOKEN[:-1], TOKEN)
    assert not same_secret("", TOKEN)
    assert not same_secret("\udcff", TOKEN)


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
    ],
)
def test_bearer_header(header, token):
    assert bearer_token({"authorization": header}) == token


def test_rate_limit_allows_a_burst_then_an_average():
    now = [0.0]
    limit = RateLimit(per_s=2, burst=3, clock=lambda: now[0])
    assert [limit.take() for _ in range(4)] == [0, 0, 0, 0.5]
    now[0] += 0.5
    assert [limit.take() for _ in range(2)] == [0, 0.5]
    now[0] += 100
    assert [limit.take() for _ in range(3)] == [0, 0, 0]
    with pytest.raises(ApiError) as caught:
        limit.check("things")
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})


def test_sessions_expire_and_cannot_be_made_up():
    now = [1000.0]
    sessions = Sessions(clock=lambda: now[0])
    cookie = sessions.issue()
    assert sessions.valid(cookie)
    assert not Sessions().valid(cookie)  # another process
    expires, signature = cookie.split(".")
    for forged in (
        None,
        "",
        "x",
        f"{int(expires) + 9}.{signature}",
        f"{expires}.",
        f"-{cookie}",
        f"{expires}.\u00e9",
    ):
        assert not sessions.valid(forged)
    now[0] += Sessions.lifetime_s + 1
    assert not sessions.valid(cookie)


# ---- control


class Tap:
    """A backend that does what the engine's does, without an engine."""

    def __init__(self) -> None:
        self.done: list[tuple[str, dict]] = []
        self.reads = 0

    async def status(self):
        self.reads += 1
        await asyncio.sleep(0.01)
        return {"state": "paused" if self.done and self.done[-1][0] == "pause" else "capturing", "ranks": []}

    async def control(self, action, arguments):
        self.done.append((action, dict(arguments)))
        return await self.status()


def controlled(token=TOKEN, public_read=False) -> tuple[Tap, TestClient]:
    tap = Tap()
    app = FastAPI()
    app.include_router(control_router(tap, Gate(token, public_read=public_read)))
    return tap, TestClient(app, raise_server_exceptions=False)


AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_need_the_token_and_reach_the_backend(action):
    tap, client = controlled()
    body = {"rate": 0.25} if action == "rate" else None
    path = f"/specdec_tap/{action}"
    assert client.post(path, json=body).status_code == 401
    assert client.post(path, json=body, headers={"Authorization": "Bearer x"}).status_code == 401
    assert client.post(path, json=body, headers={"Authorization": TOKEN}).status_code == 401
    assert client.get(path, headers=AUTH).status_code == 405
    assert tap.done == []
    assert client.post(path, json=body, headers=AUTH).status_code == 200
    assert tap.done == [(action, body or {})]


@pytest.mark.parametrize("action", ["status", "events", *ACTIONS])
def test_without_a_token_everything_is_refused_and_says_how(action):
    tap, client = controlled(token=None)
    method = "GET" if action in ("status", "events") else "POST"
    answer = client.request(method, f"/specdec_tap/{action}", headers=AUTH)
    data = answer.json()
    assert (answer.status_code, data["code"]) == (403, "no_token_configured")
    assert "SPECDEC_TAP_ADMIN_TOKEN" in data["hint"]
    assert (tap.done, tap.reads) == ([], 0)


def test_status_is_open_when_public_and_changes_are_not():
    _, client = controlled(public_read=True)
    assert client.get("/specdec_tap/status").json()["state"] == "capturing"
    assert client.post("/specdec_tap/pause").status_code == 401
    _, client = controlled(token=None, public_read=True)
    assert client.get("/specdec_tap/status").status_code == 200
    assert client.post("/specdec_tap/pause").status_code == 403


@pytest.mark.parametrize(
    ("action", "body", "message"),
    [
        ("rate", b"", "rate is None"),
        ("rate", b"{}", "rate is None"),
        ("rate", b'{"rate": 2}', "rate is 2; expected a number from 0 to 1"),
        ("rate", b'{"rate": -0.1}', "expected a number from 0 to 1"),
        ("rate", b'{"rate": true}', "rate is True"),
        ("rate", b'{"rate": NaN}', "rate is nan"),
        ("rate", b'{"rate": "0.5"}', "rate is '0.5'"),
        ("rate", b'{"rate": 0.1, "dir": "/etc"}', "takes no 'dir'"),
        ("pause", b'{"path": "../../x"}', "pause takes no 'path'"),
        ("pause", b"[]", "no JSON object"),
        ("flush", b"{", "no JSON"),
        ("flush", b"[" * 3000, "no JSON"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused(action, body, message):
    tap, client = controlled()
    answer = client.post(f"/specdec_tap/{action}", content=body, headers=AUTH)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_value")
    assert message in answer.json()["detail"]
    assert tap.done == []


def test_a_huge_body_is_refused():
    tap, client = controlled()
    answer = client.post("/specdec_tap/pause", content=b" " * 100_000, headers=AUTH)
    assert (answer.status_code, tap.done) == (413, [])


def test_many_readers_cost_one_look():
    tap = Tap()
    app = FastAPI()
    app.include_router(control_router(tap, Gate(None, public_read=True)))

    async def scenario() -> None:
        import httpx

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = await asyncio.gather(*(client.get("/specdec_tap/status") for _ in range(100)))
        assert {a.status_code for a in answers} == {200}

    asyncio.run(scenario())
    assert tap.reads <= 3


def test_a_change_is_seen_by_the_next_reader():
    _, client = controlled()
    assert client.get("/specdec_tap/status", headers=AUTH).json()["state"] == "capturing"
    client.post("/specdec_tap/pause", headers=AUTH)
    assert client.get("/specdec_tap/status", headers=AUTH).json()["state"] == "paused"


def test_an_old_answer_is_given_while_the_next_one_is_made():
    """The event loop streams tokens too: a hundred readers must not wait for one answer and leave at once."""
    now, made, release = [0.0], [], asyncio.Event()

    async def make() -> bytes:
        made.append(now[0])
        if len(made) > 1:
            await release.wait()
        return str(len(made)).encode()

    async def scenario() -> None:
        fresh = Fresh(make, fresh_s=1.0, clock=lambda: now[0])
        assert await fresh.get() == b"1"
        now[0] = 1.5
        for _ in range(10):
            assert await asyncio.wait_for(fresh.get(), 1) == b"1"
            await asyncio.sleep(0)
        assert made == [0.0, 1.5]
        release.set()
        await asyncio.sleep(0.01)
        assert await fresh.get() == b"2"
        now[0] = 5.0  # nobody asked for long: too old to be given
        assert await fresh.get() == b"3"

    asyncio.run(scenario())


def test_an_answer_from_before_a_change_is_not_kept():
    states, started, release = ["before"], asyncio.Event(), asyncio.Event()

    async def make() -> bytes:
        state = states[-1]
        started.set()
        if state == "before":
            await release.wait()
        return state.encode()

    async def scenario() -> None:
        fresh = Fresh(make)
        reader = asyncio.create_task(fresh.get())
        await started.wait()
        states.append("after")
        fresh.forget()
        release.set()
        assert await reader == b"after"
        assert await fresh.get() == b"after"

    asyncio.run(scenario())


def test_an_error_is_told_to_the_reader_who_waits_and_not_kept():
    now, fails = [0.0], [False]

    async def make() -> bytes:
        if fails[0]:
            raise OSError("no folder")
        return b"fine"

    async def scenario() -> None:
        fresh = Fresh(make, fresh_s=1.0, clock=lambda: now[0])
        assert await fresh.get() == b"fine"
        fails[0], now[0] = True, 1.5
        assert await fresh.get() == b"fine"
        await asyncio.sleep(0.01)
        now[0] = 3.0
        with pytest.raises(OSError, match="no folder"):
            await fresh.get()
        fails[0] = False
        assert await fresh.get() == b"fine"

    asyncio.run(scenario())


def test_too_many_changes_are_slowed_down():
    tap, client = controlled()
    codes = [client.post("/specdec_tap/flush", headers=AUTH).status_code for _ in range(60)]
    assert codes[:20] == [200] * 20
    assert 429 in codes
    assert len(tap.done) < 60


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guess"}], ids=["none", "wrong"])
def test_who_has_no_token_takes_no_change_and_no_look_from_the_admin(headers, monkeypatch):
    monkeypatch.setattr("specdec_server.control.READS_BURST", 20)
    monkeypatch.setattr("specdec_server.control.READS_PER_S", 0.01)
    tap, client = controlled()
    for method, path in (("POST", "/specdec_tap/pause"), ("GET", "/specdec_tap/status")):
        codes = [client.request(method, path, headers=headers).status_code for _ in range(60)]
        assert set(codes) <= {401, 429} and (headers or 429 not in codes)
    assert (tap.done, tap.reads) == ([], 0)
    assert client.post("/specdec_tap/pause", headers=AUTH).json()["state"] == "paused"
    assert client.get("/specdec_tap/status", headers=AUTH).status_code == 200


def test_errors_keep_their_shape_inside_a_foreign_application():
    tap = Tap()
    tap.status = None  # type: ignore[method-assign]  # calling it raises TypeError: a bug
    app = FastAPI()

    @app.exception_handler(Exception)
    async def theirs(request: Request, err: Exception):
        raise AssertionError("their handler must not see our error")

    app.include_router(control_router(tap, Gate(None, public_read=True)))
    answer = TestClient(app, raise_server_exceptions=False).get("/specdec_tap/status")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")


def test_a_shortcut_answers_status_alone_and_as_the_route_does():
    tap, passed = Tap(), []
    app = FastAPI()
    gate = Gate(TOKEN, public_read=False)
    reader = StatusEndpoint(tap, gate)
    app.include_router(control_router(tap, gate, reader=reader))

    @app.middleware("http")
    async def theirs(request: Request, call_next):
        passed.append(f"{request.method} {request.url.path}")
        return await call_next(request)

    route = TestClient(app)
    by_route = [route.get("/specdec_tap/status", headers=h) for h in ({}, AUTH)]
    assert passed == ["GET /specdec_tap/status"] * 2
    client = TestClient(Shortcut(app, reader))
    passed.clear()
    for headers, want in zip(({}, AUTH), by_route, strict=True):
        got = client.get("/specdec_tap/status", headers=headers)
        assert (got.status_code, got.content, got.headers) == (want.status_code, want.content, want.headers)
    assert [a.status_code for a in by_route] == [401, 200] and passed == []
    assert client.post("/specdec_tap/status", headers=AUTH).status_code == 405
    assert client.post("/specdec_tap/pause", headers=AUTH).status_code == 200
    assert client.get("/specdec_tap/status", headers=AUTH).json()["state"] == "paused"
    assert passed == ["POST /specdec_tap/status", "POST /specdec_tap/pause"]


# ---- the client and the proxy, over a real socket


@pytest.fixture
def served():
    """Serve an application on a free port."""
    servers = []

    def serve(app: FastAPI) -> str:
        sock = listen("127.0.0.1", 0)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        until = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        servers.append((server, thread, sock))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield serve
    for server, thread, sock in servers:
        server.should_exit = True
        thread.join(10)
        sock.close()


def test_the_client_talks_to_the_routes(served):
    tap = Tap()
    app = FastAPI()
    app.include_router(control_router(tap, Gate(TOKEN, public_read=False)))
    url = served(app)
    client = TapClient(f"{url}/v1", TOKEN)
    assert client.status()["state"] == "capturing"
    client.call("rate", {"rate": 0.5})
    assert tap.done == [("rate", {"rate": 0.5})]
    with pytest.raises(TapServerError, match=r"the admin token is missing; send the header 'Authorization"):
        TapClient(url).status()
    with pytest.raises(TapServerError, match="expected a number from 0 to 1"):
        client.call("rate", {"rate": 7})


def test_the_proxy_passes_on_what_the_server_says(served):
    app = FastAPI()
    app.include_router(control_router(Tap(), Gate(TOKEN, public_read=False)))
    url = served(app)
    assert asyncio.run(ServerBackend(url, TOKEN).control("pause", {}))["state"] == "paused"
    with pytest.raises(ApiError) as caught:
        asyncio.run(ServerBackend(url, None).status())
    assert (caught.value.status, caught.value.code) == (401, "sign_in")


def test_a_server_without_the_routes_says_how_to_get_them(served):
    with pytest.raises(TapServerError, match="VLLM_PLUGINS=specdec_tap"):
        TapClient(served(FastAPI())).status()


def test_a_redirect_does_not_carry_the_token_away(served):
    from starlette.responses import RedirectResponse

    seen = []
    thief, front = FastAPI(), FastAPI()

    @thief.get("/{path:path}")
    def take(request: Request):
        seen.append(request.headers.get("authorization"))
        return {}

    there = served(thief)

    @front.get("/{path:path}")
    def redirect(request: Request):
        return RedirectResponse(there)

    with pytest.raises(TapServerError, match="answers 307"):
        TapClient(served(front), TOKEN).status()
    assert seen == []


def test_nobody_there_is_said():
    with pytest.raises(TapServerError, match=r"does not answer .*refused.*is 'vllm serve' running"):
        TapClient("http://127.0.0.1:9", TOKEN).status()
    with pytest.raises(InputError, match="expected one such as http"):
        TapClient("localhost:8000")


# ---- settings


def test_other_machines_only_with_a_token(tmp_path):
    with pytest.raises(ConfigError, match=r"--host is '0.0.0.0'.*SPECDEC_TAP_ADMIN_TOKEN"):
        Settings(shards_dir=tmp_path, host="0.0.0.0")
    assert Settings(shards_dir=tmp_path, host="0.0.0.0", token=TOKEN).loopback is False
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert Settings(shards_dir=tmp_path, host=host).loopback
    assert TOKEN not in repr(Settings(shards_dir=tmp_path, token=TOKEN))


def test_all_wrong_settings_are_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Settings(shards_dir=tmp_path, host="0.0.0.0", port=99999, server_url="localhost:8000")
    for part in ("--host", "--port is 99999", "--server is 'localhost:8000'"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="has 5 characters") as caught:
        Settings(shards_dir=tmp_path, token="short")
    assert "short" not in str(caught.value).replace("shorter", "")


# ---- runs


def test_a_log_is_read_as_it_grows(tmp_path):
    folder = write_run(tmp_path / "r", steps=3, evals=0, end=False)
    runs = Runs(tmp_path)
    assert (runs.rows()[0]["num_steps"], runs.rows()[0]["state"]) == (30, "running")
    before = runs.version()
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 40, "loss": [1.5], "tok')
    assert runs.rows()[0]["num_steps"] == 30  # a line that is being written
    with (folder / "log.jsonl").open("a") as log:
        log.write('ens": 7}\n')
    assert runs.rows()[0]["num_steps"] == 40
    assert runs.version() != before


def test_a_resumed_run_shows_each_step_once(tmp_path):
    folder = write_run(tmp_path / "r", steps=3, evals=0, end=False)
    lines = [json.dumps({"kind": "start"})]
    lines += [json.dumps({"kind": "train", "step": s, "loss": [9.0]}) for s in (20, 30, 40)]
    with (folder / "log.jsonl").open("a") as log:
        log.write("\n".join(lines) + "\n")
    train = Runs(tmp_path).run("r")["train"]
    assert train["step"] == [10, 20, 30, 40]
    assert train["loss"][0][1:] == [9.0, 9.0, 9.0]


def test_states_of_a_run(tmp_path):
    write_run(tmp_path / "done")
    stopped = write_run(tmp_path / "stopped", end=False)
    os.utime(stopped / "log.jsonl", (1, 1))
    write_run(tmp_path / "running", end=False)
    interrupted = write_run(tmp_path / "interrupted", end=False)
    with (interrupted / "log.jsonl").open("a") as log:
        log.write('{"kind": "end", "interrupted": true, "step": 300}\n')
    states = {r["name"]: r["state"] for r in Runs(tmp_path).rows()}
    assert states == {
        "done": "finished", "stopped": "stopped", "running": "running", "interrupted": "interrupted"
    }  # fmt: skip


def test_hostile_logs_are_harmless(tmp_path):
    folder = tmp_path / "r"
    folder.mkdir()
    lines = [
        "",
        "[]",
        "3",
        "{",
        '{"kind": "train"}',
        '{"kind": "train", "step": "x", "loss": "y"}',
        '{"kind": "eval", "step": 1, "simulated_acceptance_length": NaN, "accuracy": [NaN, 1e999]}',
        '{"kind": "start", "settings": {"a": NaN, "b": [[[[[[[[[1]]]]]]]]]}}',
        "[" * 5000,
        "\x00\xff",
    ]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    data = Runs(tmp_path).run("r")
    json.dumps(data, allow_nan=False)
    assert data["num_bad_lines"] >= 5
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "log.jsonl").symlink_to("/etc/passwd")
    assert [r["name"] for r in Runs(tmp_path).rows()] == ["r"]


def test_a_single_run_folder_and_no_folder(tmp_path):
    write_run(tmp_path / "one")
    assert [r["name"] for r in Runs(tmp_path / "one").rows()] == ["one"]
    assert Runs(None).rows() == []
    assert Runs(tmp_path / "none").evaluations() == []


# ---- text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \u65e5\u672c", "plain \u00e9 \u65e5\u672c"),
        ("a\nb\tc", "a\nb\tc"),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("\u200b", "\\u200b"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
        ("\r\x7f", "\\r\\x7f"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_invisible_characters_are_spelled_out(text, shown):
    assert visible(text) == shown


def test_texts_of_tokens_join_to_the_text():
    pieces = {0: b"He", 1: b"llo", 2: b" ", 3: "\u65e5".encode()[:1], 4: "\u65e5".encode()[1:], 5: b"\xff"}

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    assert token_texts(decode, [0, 1, 2, 3, 4, 0], []) == ["He", "llo", " ", "", "\u65e5", "He"]
    assert token_texts(decode, [5], [0])[-1].endswith("\ufffd")
    assert token_texts(decode, [], [0]) == []
