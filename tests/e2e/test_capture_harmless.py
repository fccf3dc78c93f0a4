"""Whatever goes wrong in the tap, the answers stay the same, the server stays up, everything is counted."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.engine import runner_env
from helpers.oracle import max_error

from specdec_tap import open_shards
from specdec_tap.capture.status import StatusReader
from specdec_tap.serving import VllmServer

pytestmark = pytest.mark.e2e

FAULTS = Path(__file__).parent.parent / "helpers" / "faults"
ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "128", "--served-model-name", "tiny",
]  # fmt: skip
PROMPT = "Say something about the weather in the mountains."


class Served:
    """One tapped server and what its folder says of it."""

    def __init__(self, server: VllmServer, shards: Path) -> None:
        from openai import OpenAI

        self.server, self.shards = server, shards
        self.client = OpenAI(base_url=server.url, api_key="-", max_retries=0, timeout=120)

    def ask(
        self, prompt: str | list[int] = PROMPT, *, headers: dict[str, str] | None = None, **body: Any
    ) -> Any:
        extra = body.pop("extra_body", {})
        body = {"max_tokens": 16, "temperature": 0.0} | body
        return self.client.completions.create(
            model="tiny", prompt=prompt, extra_body=extra, extra_headers=headers, **body
        )

    def ask_later(self) -> Any:
        time.sleep(0.5)
        return self.ask()

    def ask_for(self, fault: str, times: int = 1, **body: Any) -> Any:
        return self.ask(extra_body={"vllm_xargs": {"fault": fault, "times": times}}, **body)

    def status(self) -> dict[str, Any]:
        """The newest stream's status: the counters go on from writer to writer."""
        newest = max(self.shards.glob("*/.status.json"), key=lambda path: path.stat().st_mtime_ns)
        return json.loads(newest.read_text())

    def counts(self) -> dict[str, int]:
        status = self.status()
        out: dict[str, int] = {}
        for side in ("worker", "writer"):
            for name, value in status[side].items():
                out[name] = out.get(name, 0) + value
        return out

    def settled(self) -> dict[str, int]:
        """Counters once every request has ended somewhere; fails when they never add up."""
        deadline = time.monotonic() + 30
        begin = time.time()
        while True:
            status = self.status()  # read first: the counts are then at least as new
            counts = self.counts()
            ended = sum(n for name, n in counts.items() if name.startswith(("dropped_", "skipped_")))
            all_ended = counts["requests_started"] == ended + counts["requests_sealed"]
            new = status["closed"] or status["updated_unix_s"] > begin
            if new and all_ended and status["live_requests"] == 0:
                return counts
            assert time.monotonic() < deadline, counts
            time.sleep(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.make_llama(tmp_path_factory.mktemp("model") / "llama", dtype="float32")


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.matrix)])
def runner(request) -> str:
    """vLLM's model runner; every server says that it runs this one."""
    return request.param


@contextlib.contextmanager
def serve(model: Path, folder: Path, runner: str, **env: str) -> Iterator[Served]:
    shards = folder / "shards"
    env = {
        "SPECDEC_TAP_DIR": str(shards), "SPECDEC_TAP_MIN_FREE_BYTES": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        **runner_env(runner, FAULTS), **env,
    }  # fmt: skip
    server = VllmServer(str(model), log_path=folder / "log.txt", arguments=ARGUMENTS, env=env)
    with server:
        one = Served(server, shards)
        assert one.status()["engine"]["runner"] == runner
        yield one


@pytest.fixture(scope="module")
def served(model, runner, tmp_path_factory) -> Iterator[Served]:
    """A server with a ring of 2 MB, half of which a prompt of 900 tokens takes; tests leave it well."""
    with serve(model, tmp_path_factory.mktemp("served"), runner, SPECDEC_TAP_RING_BYTES="2MB") as one:
        yield one


@pytest.fixture
def answer(served) -> Iterator[str]:
    """What the server says when nothing is wrong; it must say the same after the test, and be well."""
    before = served.ask().choices[0].text
    yield before
    assert served.ask().choices[0].text == before
    assert served.server.is_healthy()
    served.settled()


def happens(condition: Callable[[], Any], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not (done := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def wait(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    assert happens(condition, timeout_s), "it did not happen in time"


@pytest.mark.parametrize(
    "fault",
    [
        "_why_not",
        "_introduce",
        "_handles_of",
        "_watch_silence",
        "stage",
        "post",
        "pump",
        "allocate",
        "step",
    ],
)
def test_an_exception_inside_a_hook_changes_no_answer(served, answer, fault):
    errors = served.settled()["hook_errors"]
    assert served.ask_for(fault).choices[0].text == answer
    assert served.ask().choices[0].text == answer
    if fault not in ("_watch_silence", "pump"):  # not called at every request, or called by another thread
        wait(lambda: served.settled()["hook_errors"] > errors)


def test_nan_rows_are_dropped_and_counted(served, answer):
    before = served.settled()["dropped_non_finite"]
    assert served.ask_for("nan").choices[0].text == answer
    assert served.settled()["dropped_non_finite"] == before + 1


def test_a_killed_writer_is_replaced(served, answer):
    before = served.settled()
    os.kill(served.status()["pid"], signal.SIGKILL)
    texts = [served.ask().choices[0].text for _ in range(5)]
    assert texts == [answer] * 5
    # A new writer is taken over at an engine step.
    wait(lambda: served.ask_later() and served.counts()["writer_restarts"] == before["writer_restarts"] + 1)
    sealed = served.settled()["requests_sealed"]
    served.ask()
    wait(lambda: served.counts()["requests_sealed"] > sealed)


def test_a_stopped_writer_is_not_waited_for(served, answer):
    dropped = served.settled()["dropped_ring_full"]
    pid = served.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for i in range(8):
            served.ask([5 + i, *[7] * 900], max_tokens=1)
        assert served.ask().choices[0].text == answer
        assert time.monotonic() - begin < 30
    finally:
        os.kill(pid, signal.SIGCONT)
    wait(lambda: served.settled()["dropped_ring_full"] > dropped)


def test_a_full_disk_costs_requests_and_nothing_else(served, answer):
    """The writer may not make its journal any longer, until it may again."""
    before = served.settled()
    status = served.status()
    (journal,) = (served.shards / status["stream"]).glob("*.open")
    limit = (journal.stat().st_size, resource.RLIM_INFINITY)
    resource.prlimit(status["pid"], resource.RLIMIT_FSIZE, limit)
    try:
        assert served.ask().choices[0].text == answer
        wait(lambda: served.settled()["dropped_io_error"] > before["dropped_io_error"])
        assert "File too large" in served.status()["last_error"]
    finally:
        resource.prlimit(status["pid"], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    wait(lambda: served.ask_later() and served.counts()["requests_sealed"] > before["requests_sealed"])
    assert not open_shards(served.shards).skipped


def test_a_removed_folder_does_not_end_serving_nor_capture(served, answer):
    shutil.rmtree(served.shards)
    assert served.ask().choices[0].text == answer
    wait(lambda: served.ask_later() and list(served.shards.glob("*/.status.json")))
    served.ask()
    sealed = served.settled()["requests_sealed"]
    served.ask()
    wait(lambda: served.counts()["requests_sealed"] > sealed)


@pytest.mark.parametrize(
    "name", ["../../evil", "a/b/c", "x" * 4096, "caf%C3%A9", "same", "same", ""], ids=repr
)
def test_a_client_chooses_its_request_id(served, answer, name, tmp_path):
    served.ask(headers={"X-Request-Id": name})
    assert not list(served.shards.parent.rglob("evil*"))


def test_a_client_opts_out(served, answer):
    before = served.settled()
    served.ask(extra_body={"vllm_xargs": {"specdec_tap": 0}})
    served.ask(extra_body={"vllm_xargs": {"specdec_tap": 1}})
    after = served.settled()
    assert after["skipped_consent"] == before["skipped_consent"] + 1
    assert after["requests_sealed"] == before["requests_sealed"] + 1


def test_every_kind_of_request_is_captured_as_it_was_answered(served, answer, model):
    """Streams, chat, echo, token ids, several choices, log probabilities, stop strings, structured output."""
    before = served.settled()
    chat = served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert chat.usage.completion_tokens <= 5
    stream = served.ask(stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in stream if part.choices) == answer
    assert len(served.ask(n=3, temperature=1.0).choices) == 3
    assert served.ask(echo=True).choices[0].text == PROMPT + answer
    served.ask([5, 6, 7, 8], max_tokens=1)
    served.ask(logprobs=2, extra_body={"prompt_logprobs": 1})
    served.ask(stop=[answer[3:5]])
    served.ask(max_tokens=1)
    served.ask(extra_body={"ignore_eos": True, "min_tokens": 16})
    picked = served.ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert picked.choices[0].text in ("yes", "no")
    after = served.settled()
    assert after["requests_sealed"] == before["requests_sealed"] + 12
    assert after["dropped_misaligned"] == 0
    assert after["hook_errors"] == before["hook_errors"]
    records = list(open_shards(served.shards, streams=[served.status()["stream"]]))[-12:]
    assert max_error(records, model) < 1e-4


def test_a_long_answer_goes_to_the_disk_while_it_runs(served, answer):
    """A server is stopped in the middle of an answer: what it computed so far is on the disk, in blocks."""

    def backlog() -> int:  # and what killed writers never handled
        counts = served.counts()
        return counts["steps"] - counts["steps_handled"]

    def is_all_handled(since: float) -> bool:
        return served.status()["updated_unix_s"] > since and backlog() == lost

    begin, lost = served.settled()["rows"], backlog()
    (journal,) = (served.shards / served.status()["stream"]).glob("*.open")
    size = journal.stat().st_size
    body = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    one = threading.Thread(target=served.ask, kwargs=body)
    one.start()
    rows = 0
    while rows < 200:
        time.sleep(0.2)
        os.killpg(served.server.pid, signal.SIGSTOP)  # the writer has a group of its own
        try:
            assert one.is_alive(), served.counts()
            stopped = time.time()
            if happens(partial(is_all_handled, stopped), 5):  # else stopped between counting and sending
                rows = served.counts()["rows"] - begin
                half_way = journal.stat().st_size - size
        finally:
            os.killpg(served.server.pid, signal.SIGCONT)
    one.join()
    all_rows = served.settled()["rows"] - begin
    block = open_shards(served.shards, follow=True).header.block_tokens
    assert rows < all_rows and rows >= 3 * block
    blocks = rows // block - 1  # one is not full
    assert half_way >= 0.9 * blocks * block / all_rows * (journal.stat().st_size - size)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(served, answer):
    """Queued requests were never announced; the others end as aborted or are skipped."""
    import httpx

    def leave_after(seconds: float, prompt_tokens: int) -> None:
        body = {
            "model": "tiny", "prompt": [9] * prompt_tokens, "max_tokens": 100, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(timeout=seconds, trust_env=False) as client,
            client.stream("POST", served.server.url + "/completions", json=body) as response,
        ):
            deadline = time.monotonic() + seconds
            for _ in response.iter_lines():
                if time.monotonic() > deadline:
                    break

    threads = [threading.Thread(target=leave_after, args=(0.05 + 0.03 * i, 100 + 30 * i)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = served.settled()
    assert counts["dropped_misaligned"] == counts["dropped_internal"] == 0


def test_a_tap_that_keeps_failing_goes_off_and_the_server_serves_on(served):
    """The last test of this server: its tap stays off."""
    before = served.ask().choices[0].text
    served.settled()
    served.ask_for("stage", times=1000)
    for _ in range(25):
        assert served.ask().choices[0].text == before
    wait(lambda: served.status()["active"] is False)
    assert served.server.is_healthy()
    log = served.server.log_path.read_text()
    assert log.count("capture failed in") == 1
    assert log.count("capture is off for this process: capture failed 20 times; serving continues") == 1
    served.settled()


@pytest.mark.matrix
def test_killing_the_worker_seals_what_the_writer_had(model, runner, tmp_path):
    with serve(model, tmp_path, runner) as one:
        one.ask()
        before = one.settled()
        stream = one.client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(5):
            next(iter(stream))
        group = one.server.pid
        names = {pid: name_of(pid) for pid in processes(group)}
        # With one rank vLLM may run the model in the engine's own process.
        workers = [pid for pid, name in names.items() if "VLLM::Worker" in name]
        workers = workers or [pid for pid, name in names.items() if "VLLM::EngineCore" in name]
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            for _ in stream:
                pass
        wait(lambda: not list(one.shards.glob("*/*.open")))
        reasons = [record.meta.finish_reason for record in open_shards(one.shards)]
        assert sorted(reasons) == ["interrupted", "length"]
        assert one.counts()["requests_sealed"] == before["requests_sealed"] + 1
        assert one.status()["closed"] is True


@pytest.mark.matrix
def test_a_stopped_server_seals_everything_it_answered(model, runner, tmp_path):
    with serve(model, tmp_path, runner, SPECDEC_TAP_SAMPLE_RATE="0.5") as one:
        for i in range(30):
            one.ask(f"{i} {PROMPT}")
    wait(lambda: not list(one.shards.glob("*/*.open")))
    counts = one.settled()
    assert counts["requests_started"] == 30
    assert 3 <= counts["skipped_sample_rate"] <= 27
    assert len(open_shards(one.shards)) == counts["requests_sealed"] == 30 - counts["skipped_sample_rate"]
    (status,) = StatusReader(one.shards).read()
    assert status.state == "closed"


@pytest.mark.matrix
def test_a_server_told_to_stop_while_requests_run_loses_none_of_them_half(model, runner, tmp_path):
    """SIGTERM: what was answered is sealed, what ran is marked as cut off, the counters add up.

    With its engine gone, vLLM leaves the streams open and its API server waits for them, tap or no tap.
    """
    with serve(model, tmp_path, runner) as one:
        one.client, one.server.stop_timeout_s = one.client.with_options(timeout=10), 10
        for i in range(5):
            one.ask(f"{i} {PROMPT}")
        writer = one.status()["pid"]
        streams = [
            one.ask(f"{i} {i} {PROMPT}", max_tokens=900, stream=True, extra_body={"ignore_eos": True})
            for i in range(6)  # two more than run at once
        ]
        running = [stream for stream in streams[:4] if next(iter(stream))]
        os.kill(one.server.pid, signal.SIGTERM)
        for stream in running:
            with contextlib.suppress(Exception):
                for _ in stream:
                    pass
        wait(lambda: not list(one.shards.glob("*/*.open")))  # whether or not the API server has ended
        one.server.stop()
    counts = one.settled()
    store = open_shards(one.shards)
    reasons = sorted(record.meta.finish_reason for record in store)
    cut = [record for record in store if record.meta.finish_reason != "length"]
    assert reasons.count("length") == 5
    assert {record.meta.finish_reason for record in cut} <= {"abort", "interrupted"}
    assert len(cut) >= 1
    assert all(record.num_tokens < 900 and record.gaps == [] for record in cut)
    assert max_error(list(store), model) < 1e-4
    assert len(store) == counts["requests_sealed"]
    assert counts["dropped_misaligned"] == counts["dropped_internal"] == counts["hook_errors"] == 0
    assert not store.skipped
    wait(lambda: not Path(f"/proc/{writer}").exists() or name_of(writer) == "")


def processes(group: int) -> list[int]:
    """Processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.name)) == group:
                found.append(int(path.name))
    return found


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""
