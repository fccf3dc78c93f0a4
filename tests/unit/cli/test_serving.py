"""Starting and stopping a server process. A small script stands in for vLLM; the real one: tests/e2e."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from specdec_tap import serving
from specdec_tap.errors import InputError
from specdec_tap.serving import VllmServer

HEALTHY = """
    import os, signal, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"up_total 1\\n")

        def log_message(self, *args):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("arguments", sys.argv[1:], flush=True)
    print("env", os.environ.get("SPECDEC_TAP_DIR"), os.environ.get("DROPPED"), flush=True)
    {before}
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """Return a function that makes ``vllm`` a given Python script."""

    def make(script: str) -> None:
        path = tmp_path / "fake_vllm.py"
        path.write_text(textwrap.dedent(script))
        monkeypatch.setattr(serving, "vllm_command", lambda: [sys.executable, str(path)])

    return make


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def make_server(model: str, tmp_path: Path, **options) -> VllmServer:
    return VllmServer(model, log_path=tmp_path / "logs" / "serve.log", **options)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_server_starts_answers_and_stops(fake_vllm, model, tmp_path, monkeypatch):
    fake_vllm(HEALTHY.format(before=""))
    monkeypatch.setenv("DROPPED", "still here")
    env = {"SPECDEC_TAP_DIR": "shards", "DROPPED": None}
    with make_server(model, tmp_path, arguments=["--max-model-len", "64"], env=env) as server:
        assert server.is_healthy()
        assert server.startup_s is not None
        assert server.metrics()[0].name == "up_total"
        pid = server.pid
    assert not is_alive(pid)
    log = (tmp_path / "logs" / "serve.log").read_text()
    assert log.startswith("$ SPECDEC_TAP_DIR=shards vllm serve ")
    assert "'--max-model-len', '64'" in log
    assert "env shards None" in log
    assert (tmp_path / "logs" / "serve.log").stat().st_mode & 0o777 == 0o600


def test_children_of_the_server_are_stopped_too(fake_vllm, model, tmp_path):
    """vLLM's engine is a child process; one that ignores SIGTERM would keep the port and gigabytes."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child'); time.sleep(600)"
    )
    before = f"print('pid', subprocess.Popen([sys.executable, '-uc', {child!r}]).pid, flush=True)"
    fake_vllm(HEALTHY.format(before=before))
    with make_server(model, tmp_path, stop_timeout_s=1.0) as server:
        text = server.log_path.read_text()
        pid = int(text.partition("pid ")[2].split()[0])
        assert is_alive(pid)
    deadline = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ends_at_start_says_why(fake_vllm, model, tmp_path):
    fake_vllm("""
        import sys
        print("(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:9] ValueError: no memory for the KV cache")
        print("(APIServer pid=6) RuntimeError: Engine core failed. See root cause above.")
        sys.exit(3)
    """)
    with pytest.raises(InputError) as caught, make_server(model, tmp_path):
        pass
    message = str(caught.value)
    assert "ended with exit code 3 after" in message
    assert "ValueError: no memory for the KV cache" in message
    assert "serve.log" in message
    assert "See root cause" not in message


def test_without_an_exception_the_end_of_the_log_is_shown(fake_vllm, model, tmp_path):
    fake_vllm("import sys; print('going down'); sys.exit(1)")
    with pytest.raises(InputError, match=r"its end:(.|\n)*going down"), make_server(model, tmp_path):
        pass


def test_a_server_that_never_answers_is_stopped(fake_vllm, model, tmp_path):
    fake_vllm("import time; print('thinking', flush=True); time.sleep(600)")
    server = make_server(model, tmp_path, startup_timeout_s=0.5)
    with pytest.raises(InputError, match=r"did not answer /health within 0 s(.|\n)*thinking"), server:
        pass
    assert not is_alive(server.pid)


def test_a_port_in_use_is_named_before_anything_starts(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = make_server(model, tmp_path, port=port)
        with pytest.raises(
            InputError, match=rf"port {port} on 127\.0\.0\.1 cannot be used \(Address already"
        ):
            server.start()
    assert server.pid is None


def test_a_port_out_of_range_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="port 70000"):
        make_server(model, tmp_path, port=70000).start()


def test_a_missing_model_is_named_before_anything_starts(tmp_path):
    with pytest.raises(InputError, match="none' does not exist; give a Hugging Face folder"):
        make_server(str(tmp_path / "none"), tmp_path).start()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no config\.json"):
        make_server(str(tmp_path / "empty"), tmp_path).start()


@pytest.mark.parametrize("name", ["org/name", "Qwen/Qwen3-8B"])
def test_a_hub_name_is_left_to_vllm(name):
    serving.check_model(name)


def test_death_while_in_use_is_noticed(fake_vllm, model, tmp_path):
    fake_vllm(HEALTHY.format(before="import threading; threading.Timer(0.7, os._exit, [9]).start()"))
    with make_server(model, tmp_path) as server:
        while server.is_healthy():
            time.sleep(0.02)
        assert server.has_died()
    assert server.stop() == 9


def test_sigterm_becomes_an_interrupt_inside_the_context():
    def send() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), 15)

    thread = threading.Thread(target=send)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), serving.stop_on_signal():
        thread.start()
        time.sleep(5)
    thread.join()


def test_metrics_of_no_server_are_an_input_error(unused_url):
    with pytest.raises(InputError, match=r"/metrics cannot be read \(Connection refused\)"):
        serving.read_metrics(unused_url)


def test_loopback_is_recognised():
    assert serving.is_loopback("http://127.0.0.1:8000/v1")
    assert serving.is_loopback("http://localhost/v1")
    assert serving.is_loopback("http://[::1]:80/v1")
    assert not serving.is_loopback("http://127.0.0.1.example.org/v1")
    assert not serving.is_loopback("https://api.example.org/v1")


def test_a_proxy_never_comes_between_loopback_and_us(stand_in):
    """With http_proxy set, urllib would ask the proxy for 127.0.0.1, and the proxy has no server there."""
    code = f"from specdec_tap.serving import read_metrics; print(len(read_metrics({stand_in.url!r})))"
    env = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_importing_the_commands_loads_no_heavy_package():
    modules = "replay evaluate serving smollm2 prompts doctor steps"
    modules += " cli.replay cli.eval cli.demo cli.doctor cli.config"
    code = "import sys\n" + "".join(f"import specdec_tap.{name}\n" for name in modules.split())
    code += (
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib', 'openai', 'fastapi'} & set(sys.modules)\n"
    )
    code += "print(sorted(heavy))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512vl\n", True),
        ("flags\t\t: fpu avx avx2 fma\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("nothing that says it\n", True),
    ],
)
def test_the_model_is_served_in_a_dtype_that_the_cpu_multiplies(
    cpuinfo: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}")
    assert serving.has_fast_bfloat16(tmp_path / "cpuinfo") == fast
    monkeypatch.setattr(serving, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serving, "has_fast_bfloat16", lambda: fast)
    assert ("--dtype" in serving.default_arguments()) != fast
    monkeypatch.setattr(serving, "is_cpu_build", lambda: False)
    assert serving.default_arguments() == []
