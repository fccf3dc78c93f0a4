"""status, pause, resume, rate, flush and rotate against a server with the real routes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI
from specdec_server.control import control_router
from specdec_server.security import Gate

from specdec_tap.capture.status import StatusReader, total
from specdec_tap.cli import main
from specdec_tap.cli.dashboard import listen

TOKEN = "correct-horse-battery-staple"


class Files:
    """A backend that answers from status files, as the one in vLLM does."""

    def __init__(self, reader: StatusReader) -> None:
        self.reader = reader
        self.done = True
        self.calls: list[tuple[str, dict]] = []

    async def status(self):
        ranks = self.reader.read()
        state = ranks[0].state if ranks else "off"
        return {"state": state, "reason": ranks[0].reason if ranks else "nothing is captured",
                "ranks": [r.to_json() for r in ranks], "total": total(ranks)}  # fmt: skip

    async def control(self, action, arguments):
        self.calls.append((action, dict(arguments)))
        return {"action": action, "done": self.done, **await self.status()}


@pytest.fixture
def backend(tmp_path):
    return Files(StatusReader(tmp_path / "shards"))


@pytest.fixture
def url(backend, monkeypatch):
    monkeypatch.setenv("SPECDEC_TAP_ADMIN_TOKEN", TOKEN)
    app = FastAPI()
    app.include_router(control_router(backend, Gate(TOKEN, public_read=False)))
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    sock.close()


def test_status_shows_ranks_drops_and_errors(url, put_status, capsys):
    put_status("a", worker={"requests_started": 1234, "dropped_ring_full": 5}, sample_rate=0.25,
               writer={"requests_sealed": 1200, "tokens": 99_000, "stored_bytes": 99_000_000},
               last_error="disk full")  # fmt: skip
    assert main(["status", url]) == 0
    out = capsys.readouterr().out
    for part in (
        "capturing",
        "1,234",
        "1,200",
        "99,000",
        "1,000",
        "0.25",
        "dropped: 5 ring full",
        "disk full",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("values", "code"), [({}, 0), ({"paused": True}, 0), ({"age_s": 60}, 1), ({"active": False}, 1)]
)
def test_exit_code_tells_whether_it_works(url, put_status, capsys, values, code):
    put_status("a", **values)
    assert main(["status", url]) == code
    assert main(["status", url, "--json"]) == code
    json.loads(capsys.readouterr().out.partition("{\n")[2].join(["{\n", ""]))


def test_no_capture_is_said(url, capsys):
    assert main(["status", url]) == 1
    assert "nothing is captured" in capsys.readouterr().out


def test_without_the_token_it_says_what_to_do(url, monkeypatch, capsys):
    monkeypatch.delenv("SPECDEC_TAP_ADMIN_TOKEN")
    assert main(["status", url]) == 2
    assert "the admin token is missing" in capsys.readouterr().err
    assert main(["pause", url]) == 2


@pytest.mark.parametrize("command", ["pause", "resume", "flush", "rotate"])
def test_commands_reach_the_server(url, backend, put_status, capsys, command):
    put_status("a", writer={"requests_sealed": 7, "tokens": 70}, sample_rate=0.5)
    assert main([command, url]) == 0
    assert backend.calls == [(command, {})]
    out = capsys.readouterr().out
    assert out.startswith(f"{command}: ")
    assert ("7 requests" if command in ("flush", "rotate") else "rate 0.5") in out
    assert "(1 rank)" in out


def test_rate_takes_its_number_first(url, backend, put_status, capsys):
    put_status("a")
    assert main(["rate", "0.1", url]) == 0
    assert backend.calls == [("rate", {"rate": 0.1})]
    with pytest.raises(SystemExit) as caught:
        main(["rate", "7", url])
    assert caught.value.code == 2
    assert "7 is not from 0 to 1" in capsys.readouterr().err


def test_a_writer_that_is_behind_is_exit_code_1(url, backend, put_status, capsys):
    put_status("a")
    backend.done = False
    assert main(["flush", url]) == 1
    assert "the writer is behind" in capsys.readouterr().err


def test_watch_in_a_log_prints_a_line_a_look(url, put_status):
    put_status("a", worker={"rows": 100})
    command = [sys.executable, "-m", "specdec_tap", "status", url, "--watch", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            first = process.stdout.readline()
            for look in range(1, 400):
                put_status("a", worker={"rows": 100 + 5000 * look})  # whenever it looks, there is more
                later = process.stdout.readline()
                if "rows/s" in later and " 0 rows/s" not in later:
                    break
        finally:
            process.terminate()
    assert "capturing: 0 sealed" in first
    assert "rows/s" in later
    assert " 0 rows/s" not in later


def test_watch_on_a_terminal_draws_a_table_and_ends_with_ctrl_c(url, put_status):
    put_status("a", worker={"requests_started": 4321})
    main_end, process_end = pty.openpty()
    command = [sys.executable, "-m", "specdec_tap", "status", url, "--watch", "--interval", "0.05"]
    environment = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=process_end, stdout=process_end, stderr=process_end, env=environment,
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(process_end)
    shown = b""
    try:
        until = time.monotonic() + 20
        while b"4,321" not in shown and time.monotonic() < until:
            shown += os.read(main_end, 4096)
    finally:
        process.send_signal(signal.SIGINT)
        until = time.monotonic() + 20
        try:
            while os.read(main_end, 4096) and time.monotonic() < until:
                pass
        except OSError:
            pass  # the terminal closes with its last process
        if process.poll() is None and time.monotonic() >= until:
            process.kill()
        code = process.wait(10)
        os.close(main_end)
    assert b"4,321" in shown
    assert code == 130
