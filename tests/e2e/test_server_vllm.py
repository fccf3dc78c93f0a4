"""The tap's routes and metrics inside the real ``vllm serve``: one server for all tests, a tiny model."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from helpers import browser as browsers
from helpers import tiny
from helpers.browser import watched

from specdec_tap import open_shards
from specdec_tap.cli import main
from specdec_tap.serving import VllmServer, root_url

pytestmark = pytest.mark.e2e

GRAFANA = Path(__file__).parents[2] / "configs" / "grafana"
TOKEN = "correct-horse-battery-staple"
API_KEY = "sk-not-the-admin-token"
ACTIONS = ("pause", "resume", "rate", "flush", "rotate")
ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8",
    "--served-model-name", "tiny", "--api-key", API_KEY, "--allowed-origins", "[]",
]  # fmt: skip


class Tapped:
    """A server with its shards, and clients with and without the token."""

    def __init__(self, server: VllmServer, shards: Path) -> None:
        self.server, self.shards = server, shards
        self.url = root_url(server.url)
        self.anyone = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.admin = httpx.Client(
            base_url=self.url, timeout=60, trust_env=False, headers={"Authorization": f"Bearer {TOKEN}"}
        )

    def ask(self, prompt: str = "What is a queue?", tokens: int = 8, n: int = 1) -> None:
        """Let the server answer; an answer of another length is a failure."""
        body = {"model": "tiny", "prompt": [prompt] * n, "max_tokens": tokens, "ignore_eos": True}
        answer = self.anyone.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {API_KEY}"}
        )
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == n * tokens

    def status(self) -> dict[str, Any]:
        answer = self.admin.get("/specdec_tap/status")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def act(self, action: str, **body: Any) -> dict[str, Any]:
        answer = self.admin.post(f"/specdec_tap/{action}", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["done"] is True
        return answer.json()

    def settled(self) -> dict[str, Any]:
        """The status once every request has ended in it; the engine reports an end one step later."""
        deadline = time.monotonic() + 30
        while True:
            # A flush makes the writer report; asked for on every rank, so that the numbers are of one time.
            total = self.act("flush")["total"]
            ended = total["num_sealed"] + total["num_skipped"] + total["num_dropped"]
            if total["num_started"] == ended and not total["num_live"]:
                return self.status()
            assert time.monotonic() < deadline, total
            self.ask("finish the last one", 1)
            time.sleep(0.3)

    def metrics(self) -> tuple[str, dict[tuple, float]]:
        from prometheus_client.parser import text_string_to_metric_families

        answer = self.anyone.get("/metrics")
        assert answer.status_code == 200
        samples = {
            (s.name, *sorted(s.labels.items())): s.value
            for family in text_string_to_metric_families(answer.text)
            for s in family.samples
        }
        return answer.text, samples


@contextlib.contextmanager
def serve(folder: Path, arguments: list[str]) -> Iterator[Tapped]:
    model = tiny.make_llama(folder / "model", dtype="float32")
    env = {
        "SPECDEC_TAP_DIR": str(folder / "shards"), "SPECDEC_TAP_ADMIN_TOKEN": TOKEN,
        "SPECDEC_TAP_MIN_FREE_BYTES": "0", "VLLM_PLUGINS": "specdec_tap", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    with VllmServer(str(model), log_path=folder / "serve.log", arguments=arguments, env=env) as server:
        yield Tapped(server, folder / "shards")


@pytest.fixture(scope="module")
def tapped(tmp_path_factory) -> Iterator[Tapped]:
    with serve(tmp_path_factory.mktemp("tapped"), ARGUMENTS) as one:
        yield one


@pytest.fixture(autouse=True)
def steered_slowly() -> Iterator[None]:
    """Give the limit of five changes a second time to fill up again."""
    yield
    time.sleep(1)


def rank_of(status: dict[str, Any]) -> dict[str, Any]:
    assert len(status["ranks"]) == 1
    return status["ranks"][0]


# ---- who may


def test_only_the_admin_token_opens_the_routes(tapped):
    for headers in (
        {},
        {"Authorization": f"Bearer {API_KEY}"},
        {"Authorization": "Bearer wrong-wrong-wrong"},
    ):
        answer = tapped.anyone.get("/specdec_tap/status", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "sign_in")
        assert answer.headers["www-authenticate"] == "Bearer"
        answer = tapped.anyone.post("/specdec_tap/pause", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "sign_in")
    assert TOKEN not in answer.text
    assert tapped.status()["state"] == "capturing"


def test_vllms_api_key_and_the_admin_token_do_not_stand_in_for_each_other(tapped):
    assert tapped.admin.get("/v1/models").status_code == 401
    with_key = {"Authorization": f"Bearer {API_KEY}"}
    assert tapped.anyone.get("/v1/models", headers=with_key).status_code == 200
    assert tapped.anyone.get("/specdec_tap/status", headers=with_key).status_code == 401


def test_without_a_configured_token_vllms_own_application_refuses_everything(tmp_path, monkeypatch):
    """vLLM builds its application with the plugin, as it does at start; no engine is needed to refuse."""
    from fastapi.testclient import TestClient
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_PLUGINS", "specdec_tap")
    monkeypatch.setenv("SPECDEC_TAP_DIR", str(tmp_path / "shards"))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--api-key", API_KEY])
    client = TestClient(build_app(args, ("generate",)))
    asked = [client.get("/specdec_tap/status"), client.get("/specdec_tap/events")]
    asked += [client.post(f"/specdec_tap/{action}", json={}) for action in ACTIONS]
    for headers in ({}, {"Authorization": f"Bearer {API_KEY}"}):
        asked.append(client.post("/specdec_tap/pause", headers=headers))
    for answer in asked:
        assert (answer.status_code, answer.json()["code"]) == (403, "no_token_configured")
        assert "SPECDEC_TAP_ADMIN_TOKEN" in answer.json()["hint"]


def test_status_is_answered_before_vllms_own_middleware(tapped):
    """It counts every request that passes it; many readers of the status do not."""
    tapped.status()
    tapped.anyone.post("/specdec_tap/pause")  # refused, but their middleware sees it
    page = tapped.anyone.get("/metrics").text
    assert 'handler="/specdec_tap/pause"' in page and 'handler="/specdec_tap/status"' not in page


def test_another_origin_gets_no_cors_headers(tapped):
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Headers": "authorization"}
    answer = tapped.admin.get("/specdec_tap/status", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {
        **headers,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = tapped.anyone.options("/specdec_tap/pause", headers=asked)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "rate", b'{"rate": 1.5}', 422, "invalid_value"),
        ("POST", "rate", b"no json", 422, "invalid_value"),
        ("POST", "pause", b'{"dir": "/elsewhere"}', 422, "invalid_value"),
        ("POST", "rate", b'{"rate": 0.1, "pad": "' + b"x" * 5000 + b'"}', 413, "invalid_value"),
    ],
)
def test_wrong_requests_have_the_one_error_shape_inside_vllm(tapped, method, path, body, status, code):
    answer = tapped.admin.request(method, f"/specdec_tap/{path}", content=body)
    assert set(answer.json()) == {"detail", "code", "hint"}
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert tapped.status()["state"] == "capturing"


# ---- steering


def test_the_status_counts_what_was_asked(tapped):
    before = tapped.settled()["total"]
    tapped.ask("One two three", 8, n=4)
    after = tapped.settled()
    rank = rank_of(after)
    assert (after["state"], after["reason"], after["num_engines"]) == ("capturing", None, 1)
    assert rank["num_sealed"] - before["num_sealed"] >= 4
    assert rank["num_response_tokens"] - before["num_response_tokens"] >= 32
    assert (rank["aux_layer_ids"], rank["sample_rate"], rank["num_dropped"]) == ([2, 4, 5], 1.0, 0)
    assert rank["stored_bytes"] > 0
    assert after["total"]["num_tokens"] == rank["num_tokens"]
    assert rank["disk_free_bytes"] > 0
    assert rank["age_s"] < 10


def test_pause_and_resume_reach_the_worker(tapped):
    before = tapped.settled()["total"]
    answer = tapped.act("pause")
    assert (answer["action"], answer["state"], rank_of(answer)["state"]) == ("pause", "paused", "paused")
    assert "paused" in answer["reason"]
    tapped.ask("not for the shards", n=3)
    during = tapped.settled()["total"]
    assert during["num_sealed"] == before["num_sealed"]
    assert during["skipped"]["paused"] >= before["skipped"].get("paused", 0) + 3
    assert tapped.act("resume")["state"] == "capturing"
    tapped.ask("for the shards again", n=3)
    assert tapped.settled()["total"]["num_sealed"] >= before["num_sealed"] + 3


def test_the_rate_decides_how_many_are_captured(tapped):
    assert rank_of(tapped.act("rate", rate=0.0))["sample_rate"] == 0
    before = tapped.settled()["total"]
    tapped.ask(n=5)
    after = tapped.settled()["total"]
    assert after["num_sealed"] == before["num_sealed"]
    assert after["skipped"]["sample_rate"] >= before["skipped"]["sample_rate"] + 5
    assert rank_of(tapped.act("rate", rate=1.0))["sample_rate"] == 1
    tapped.ask(n=2)
    assert tapped.settled()["total"]["num_sealed"] >= before["num_sealed"] + 2


def test_flush_puts_records_on_the_disk_and_rotate_seals_them(tapped):
    tapped.settled()
    with open_shards(tapped.shards, follow=True) as store:
        known = len(store)
        sealed = sum(info.sealed for info in store.shards)
        tapped.ask("kept", n=2)
        tapped.settled()
        tapped.act("flush")
        store.refresh()
        assert len(store) >= known + 2
        tapped.act("rotate")
        store.refresh()
        assert sum(info.sealed for info in store.shards) == sealed + 1
        count = len(store)
    assert rank_of(tapped.status())["num_shards_sealed"] == sealed + 1
    assert tapped.settled()["total"]["num_sealed"] >= count


def test_events_tell_of_a_change(tapped):
    seen = []
    with tapped.admin.stream("GET", "/specdec_tap/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        for line in lines:
            if line.startswith("data:"):
                seen.append(json.loads(line[5:])["state"])
                if len(seen) == 1:
                    tapped.act("pause")
                if seen[-1] == "paused":
                    break
                assert len(seen) < 30
    assert seen[0] == "capturing"
    assert tapped.act("resume")["state"] == "capturing"


def test_too_many_changes_are_slowed_down(tapped):
    answers = [tapped.admin.post("/specdec_tap/rate", json={"rate": 2}) for _ in range(40)]
    codes = {answer.status_code for answer in answers}
    assert codes == {422, 429}
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert tapped.status()["state"] == "capturing"
    time.sleep(4)


# ---- metrics


def test_metrics_have_help_and_type_and_agree_with_the_status(tapped):
    from specdec_tap.vllm_plugin.metrics import families

    tapped.ask(n=3)
    status = tapped.settled()
    text, samples = tapped.metrics()
    for family in families([]):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"# HELP {name} {family.documentation}\n" in text
        assert f"# TYPE {name} {family.type}\n" in text
        assert f"\n{name}{{" in text
    rank = rank_of(status)
    engine = ("engine", "0")
    for metric, field in (
        ("requests_started_total", "num_started"), ("requests_sealed_total", "num_sealed"),
        ("rows_copied_total", "rows_copied"), ("raw_bytes_total", "raw_bytes"),
        ("stored_bytes_total", "stored_bytes"), ("shards_sealed_total", "num_shards_sealed"),
        ("engine_steps_total", "num_steps"), ("live_requests", "num_live"),
        ("sample_rate_ratio", "sample_rate"), ("ring_size_bytes", "ring_bytes"),
    ):  # fmt: skip
        assert samples[f"specdec_tap_{metric}", engine] == rank[field], metric
    for reason, count in rank["dropped"].items():
        assert samples["specdec_tap_requests_dropped_total", engine, ("reason", reason)] == count
    for reason, count in rank["skipped"].items():
        assert samples["specdec_tap_requests_skipped_total", engine, ("reason", reason)] == count
    kinds = [samples["specdec_tap_tokens_total", engine, ("kind", kind)] for kind in ("prompt", "response")]
    assert sum(kinds) == rank["num_tokens"]
    assert kinds[1] == rank["num_response_tokens"]
    rows = {source: samples["specdec_tap_rows_total", engine, ("source", source)]
            for source in ("stored", "reused", "gap")}  # fmt: skip
    assert rows == {source: rank[f"rows_{source}"] for source in rows}
    assert samples["specdec_tap_state", engine, ("state", "capturing")] == 1
    # vLLM's own metrics are still there, under the same label.
    assert samples["vllm:num_requests_running", engine, ("model_name", "tiny")] == 0


def test_dashboard_and_alerts_ask_only_for_what_the_server_exposes(tapped):
    _, samples = tapped.metrics()
    exposed = {name for name, *_ in samples}
    labels = {(name, label) for name, *pairs in samples for label, _ in pairs}
    dashboard = json.loads((GRAFANA / "specdec-tap.json").read_text())
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    expressions = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    expressions += [r["expr"] for r in rules]
    used = {name for e in expressions for name in re.findall(r"\b(?:specdec_tap_|vllm:)[a-z_]+", e)}
    assert len(used) > 15
    assert used <= exposed
    for expression in expressions:
        for name, selector in re.findall(r"\b((?:specdec_tap_|vllm:)[a-z_]+)\{([^}]*)\}", expression):
            for label in re.findall(r"([a-z_]+)\s*=", selector):
                assert label in ("instance", "job") or (name, label) in labels, (name, label)


# ---- command line


@pytest.fixture
def with_token(monkeypatch) -> None:
    monkeypatch.setenv("SPECDEC_TAP_ADMIN_TOKEN", TOKEN)


def test_the_command_line_looks_and_steers(tapped, with_token, capsys):
    assert main(["status", tapped.url]) == 0
    shown = capsys.readouterr().out
    assert "capturing" in shown
    assert "bytes/token" in shown
    assert main(["pause", tapped.url]) == 0
    assert "pause: paused" in capsys.readouterr().out
    assert main(["status", tapped.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "paused"
    assert main(["rate", "0.25", tapped.url]) == 0
    assert "rate 0.25 (1 rank)" in capsys.readouterr().out
    assert main(["resume", tapped.url]) == 0
    assert "resume: capturing, rate 0.25" in capsys.readouterr().out
    assert main(["rate", "1", tapped.url]) == 0
    assert main(["flush", tapped.url]) == 0
    assert main(["rotate", tapped.url]) == 0
    assert "tokens are on the disk" in capsys.readouterr().out


def test_the_command_line_says_what_a_missing_token_needs(tapped, capsys):
    assert main(["pause", tapped.url]) == 2
    message = capsys.readouterr().err
    assert "the admin token is missing" in message
    assert tapped.status()["state"] == "capturing"


# ---- the page over a live server


@contextlib.contextmanager
def traffic(tapped: Tapped) -> Iterator[None]:
    """Two clients that keep the server busy."""
    stop = threading.Event()
    failures = []

    def client(number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            try:
                tapped.ask(f"Question {count} of client {number}?", 40)
            except Exception as err:
                failures.append(err)
                return

    threads = [threading.Thread(target=client, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures


@pytest.mark.skipif(browsers.problem() is not None, reason=str(browsers.problem()))
def test_the_page_shows_the_live_capture_and_pauses_it(tapped):
    tapped.settled()
    env = {"SPECDEC_TAP_ADMIN_TOKEN": TOKEN}
    with (
        browsers.dashboard(str(tapped.shards), "--server", tapped.url, env=env) as url,
        browsers.chromium() as browser,
        watched(browser, url) as watch,
    ):
        page = watch.go("/sign-in?next=/")
        page.get_by_label("Admin token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        skipped = tapped.status()["total"]["num_skipped"]
        with traffic(tapped):  # ends before news are due within 20 s: beside it the writer may wait for long
            some = page.locator("[data-v='rates.rows_per_s']", has_text=re.compile("[1-9]"))
            some.wait_for(timeout=60_000)
            page.wait_for_timeout(8000)
            watch.shot("live-capturing")
            page.get_by_role("button", name="Pause").click()
            page.get_by_text("pause: done on every rank").wait_for()
            page.wait_for_timeout(2000)
        page.locator("#capture-state .badge", has_text="paused").wait_for()
        assert tapped.status()["state"] == "paused"
        assert tapped.status()["total"]["num_skipped"] > skipped
        page.get_by_label("Share of requests").fill("0.5")
        page.get_by_role("button", name="Set rate").click()
        page.get_by_text("rate: done on every rank").wait_for()
        assert rank_of(tapped.status())["sample_rate"] == 0.5
        watch.shot("live-paused")
        page.get_by_role("button", name="Resume").click()
        page.locator("#capture-state .badge", has_text="capturing").wait_for()
        page.get_by_label("Share of requests").fill("1")
        page.get_by_role("button", name="Set rate").click()
        page.get_by_text("rate: done on every rank").wait_for()
        page.get_by_role("navigation", name="Sections").get_by_role("link", name="Records").click()
        page.locator("tbody a").first.click()
        page.locator("#tokens").wait_for()
        watch.shot("live-record")
    assert tapped.status()["state"] == "capturing"


# ---- several engines


@pytest.mark.matrix
@pytest.mark.parametrize("api_servers", [1, 2])
def test_every_data_parallel_rank_is_seen_and_steered(tmp_path, api_servers):
    """With two API servers vLLM's metrics page is made from files, and any of the two may be asked."""
    more = ["--data-parallel-size", "2", "--api-server-count", str(api_servers)]
    with serve(tmp_path, [*ARGUMENTS, *more]) as both:
        for _ in range(6):
            both.ask(n=4)
        status = both.settled()
        assert (status["state"], status["num_engines"]) == ("capturing", 2)
        assert [rank["dp_rank"] for rank in status["ranks"]] == [0, 1]
        assert all(rank["num_sealed"] > 0 for rank in status["ranks"])
        assert status["total"]["num_sealed"] == sum(rank["num_sealed"] for rank in status["ranks"])
        _, samples = both.metrics()
        for rank in status["ranks"]:
            engine = ("engine", str(rank["dp_rank"]))
            assert samples["specdec_tap_requests_sealed_total", engine] == rank["num_sealed"]
        paused = both.act("pause")
        assert [rank["state"] for rank in paused["ranks"]] == ["paused", "paused"]
        slower = both.act("rate", rate=0.5)
        assert [rank["sample_rate"] for rank in slower["ranks"]] == [0.5, 0.5]
        assert both.act("resume")["state"] == "capturing"
        rotated = both.act("rotate")
        assert all(rank["num_shards_sealed"] >= 1 for rank in rotated["ranks"])
