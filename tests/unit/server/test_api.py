"""The JSON API and the pages over real shards, through the in-process client."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.serverkit import (
    BLOCK,
    EVALUATION,
    ids_of,
    make_folder,
    make_header,
    make_many,
    put,
    put_target,
    put_tiktoken,
    write_run,
)
from specdec_server.app import create_app
from specdec_server.errors import CODES
from specdec_server.settings import Settings
from starlette.testclient import TestClient

from specdec_tap.runlog import PredictionsWriter, RecordPredictions, StepPrediction, token_digest
from specdec_tap.shards import ShardWriter, open_shards
from specdec_tap.shards.reader import ShardFile

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "shards")


@pytest.fixture
def open_client(folder, tmp_path):
    """Make a client for the folder; every one is closed at the end."""
    clients = []

    def make(**settings) -> TestClient:
        app = create_app(Settings(shards_dir=settings.pop("shards_dir", folder), **settings))
        client = TestClient(app, base_url="http://127.0.0.1:8095", raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


PAGES = ("/", "/shards", "/shards/s0/1", "/records", "/records/s0/1/2", "/runs", "/evaluations", "/sign-in")
VIEWS = ("/api/capture", "/api/streams/ended", "/api/shards", "/api/shards/s0/1", "/api/records",
         "/api/records/s0/1/2", "/api/records/s0/1/2/tokens", "/api/runs", "/api/evaluations")  # fmt: skip


# ---- what is shown


def test_shards_are_listed_with_their_sums(open_client):
    data = open_client().get("/api/shards").json()
    assert [s["name"] for s in data["shards"]] == ["s0/000001"]
    assert data["summary"]["num_records"] == 5
    assert data["summary"]["differences"] == []
    assert data["next_offset"] is None
    assert data["shards"][0]["state"] == "sealed"


def test_records_page_sort_filter_and_find(open_client):
    client = open_client()
    get = lambda **q: client.get("/api/records", params=q).json()  # noqa: E731
    ids = [r["id"] for r in get()["records"]]
    assert ids == [f"s0/000001/{i}" for i in (4, 3, 2, 1, 0)]
    page = get(limit=2, offset=2, sort="oldest")
    assert [r["id"] for r in page["records"]] == ["s0/000001/2", "s0/000001/3"]
    assert (page["num_matching"], page["next_offset"]) == (5, 4)
    assert get(sort="longest")["records"][0]["id"] == "s0/000001/4"
    shortest = get(sort="shortest")["records"][0]
    assert shortest["id"] == "s0/000001/0"
    assert len(get(min_tokens=shortest["num_tokens"] + 1)["records"]) == 4
    assert get(gaps_only=True)["records"] == []
    assert [r["id"] for r in get(q="cmpl-0003")["records"]] == ["s0/000001/3"]
    assert [r["id"] for r in get(q="s0/000001/1")["records"]] == ["s0/000001/1"]
    assert get(q="no such thing")["num_matching"] == 0
    assert len(get(stream="s0", shard=1)["records"]) == 5
    assert get(stream="s1")["records"] == []


def test_a_live_journal_grows_on_the_page(open_client, folder):
    client = open_client()
    with ShardWriter(folder, make_header("s1"), min_free_bytes=0) as writer:
        put(writer, "hello ", "there " * 9)
        writer.flush()
        wait_until(lambda: client.get("/api/records").json()["num_records"] == 6)
        put(writer, "hello ", "again " * 9)
        writer.flush()
        wait_until(lambda: client.get("/api/records").json()["num_records"] == 7)
        states = {s["name"]: s["state"] for s in client.get("/api/shards").json()["shards"]}
        assert states == {"s0/000001": "sealed", "s1/000001": "live"}
    wait_until(lambda: client.get("/api/shards").json()["shards"][0]["state"] == "sealed")
    assert client.get("/api/records").json()["num_records"] == 7


def test_a_retired_shard_goes_and_its_disk_space_is_freed(open_client, folder):
    """An open descriptor would keep the space of a deleted file."""
    with ShardWriter(folder, make_header("s1"), min_free_bytes=0) as writer:
        put(writer, "hello ", "there " * 9)
    client = open_client()
    assert client.get("/api/records").json()["num_records"] == 6
    path = folder / "s0" / "000001.safetensors"
    path.unlink()
    wait_until(lambda: client.get("/api/records").json()["num_records"] == 1)
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]  # noqa: PTH115, PTH208
    assert not [name for name in held if name.startswith(str(path))]
    assert client.get("/api/records/s0/1/0").status_code == 404


def test_a_forgotten_record_is_gone_from_an_open_dashboard(open_client, folder):
    from specdec_tap.cli import main

    client = open_client(show_text=True)
    shown = client.get("/api/records/s0/1/2/tokens").json()["tokens"]
    assert "".join(t["text"] for t in shown).startswith("question 2? ")
    kept = client.get("/api/records/s0/1/3/tokens").json()
    assert main(["shards", "forget", str(folder), "s0/000001/2"]) == 0
    time.sleep(1.1)  # the folder is looked at once a second
    found = {r["id"]: r for r in client.get("/api/records").json()["records"]}
    assert len(found) == 4
    assert "chatcmpl-0002" not in json.dumps(found)
    # The records after it have moved up by one.
    assert client.get("/api/records/s0/1/2/tokens").json() == kept
    assert client.get("/records/s0/1/4").status_code == 404


def test_a_folder_without_shards_is_fine_and_fills(open_client, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    client = open_client(shards_dir=empty)
    assert client.get("/api/shards").json()["summary"] is None
    for page in ("/", "/shards", "/records", "/runs", "/evaluations"):
        assert client.get(page).status_code == 200
    make_folder(empty)
    wait_until(lambda: client.get("/api/records").json()["num_records"] == 5)


def test_shards_of_two_targets_are_shown_with_a_warning(open_client, folder):
    with ShardWriter(folder, make_header("s1", name="other", hidden_size=16), min_free_bytes=0) as writer:
        put(writer, "hello ", "there " * 9)
    client = open_client()
    assert client.get("/api/shards").json()["summary"]["differences"] == ["target.hidden_size", "target.name"]
    assert "cannot be trained on together" in client.get("/shards").text


def test_a_damaged_shard_is_named_and_the_others_are_shown(open_client, folder):
    for stream in ("s1", "s2"):
        with ShardWriter(folder, make_header(stream), min_free_bytes=0) as writer:
            put(writer, "hello ", "there " * 9)
    cut = folder / "s1" / "000001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    flipped = folder / "s2" / "000001.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1  # inside the index
    flipped.write_bytes(data)
    client = open_client()
    view = client.get("/api/shards").json()
    assert [p["file"] for p in view["skipped"]] == ["s1/000001.safetensors"]
    assert client.get("/api/records").json()["num_records"] == 5
    answer = client.get("/shards/s2/1")
    assert answer.status_code in (200, 409)
    assert "Traceback" not in answer.text


def test_where_a_prefix_came_from_and_what_was_answered_before(open_client, tmp_path):
    root = tmp_path / "chat"
    root.mkdir()
    put_target(root)
    first_prompt, first_answer = "user: hi! assistant: ", "hello, how are you today? "
    with ShardWriter(root, make_header(), min_free_bytes=0) as writer:
        first = put(writer, first_prompt, first_answer, started=100.0)
        put(writer, "something else ", "entirely " * 4, started=101.0)
        shared = 2 * BLOCK
        put(
            writer,
            first_prompt + first_answer + "user: fine ",
            "great! " * 3,
            reuse=(first, shared),
            started=102.0,
        )
    client = open_client(shards_dir=root, show_text=True)
    sources = client.get("/api/records/s0/1/2").json()["sources"]
    assert sources["cached"] == [{"start": 0, "stop": shared, "record": "s0/000001/0"}]
    begin = len(ids_of(first_prompt))
    assert sources["earlier"] == [[begin, begin + len(ids_of(first_answer))]]
    tokens = client.get("/api/records/s0/1/2/tokens").json()["tokens"]
    assert "".join(t["text"] for t in tokens if t["kind"] == "earlier") == first_answer
    assert sum(t["cached"] for t in tokens) == shared
    assert client.get("/api/records/s0/1/0").json()["sources"]["cached"] == []


def test_gaps_and_windows(open_client, folder):
    with ShardWriter(folder, make_header("s1"), min_free_bytes=0) as writer:
        put(writer, "x" * 40, "y" * 60, gap=BLOCK)
    client = open_client(show_text=True)
    facts = client.get("/api/records/s1/1/0").json()
    assert (facts["gaps"], facts["gap_rows"]) == ([[0, BLOCK]], BLOCK)
    assert (facts["previous"], facts["next"]) == ("s0/000001/4", None)
    window = client.get("/api/records/s1/1/0/tokens", params={"start": 10, "stop": 45}).json()
    assert (window["start"], window["stop"], window["num_tokens"]) == (10, 45, 100)
    assert [t["gap"] for t in window["tokens"]] == [True] * 6 + [False] * 29
    assert "".join(t["text"] for t in window["tokens"]) == "x" * 30 + "y" * 5
    assert client.get("/api/records/s1/1/0/tokens", params={"start": 100}).status_code == 422
    assert client.get("/records/s1/1/0?start=64").status_code == 200


def test_a_removed_shard_of_a_record_is_said_and_its_tokens_are_shown(open_client, tmp_path):
    root = tmp_path / "chat"
    root.mkdir()
    put_target(root)
    with ShardWriter(root, make_header(), min_free_bytes=0) as writer:
        first = put(writer, "a" * 40, "b" * 40)
        writer.rotate()
        put(writer, "a" * 40 + "b" * 40, "c" * 20, reuse=(first, 64))
    (root / "s0" / "000001.safetensors").unlink()
    client = open_client(shards_dir=root, show_text=True)
    facts = client.get("/api/records/s0/2/0").json()
    assert "s0/000001 has been removed: 64 positions" in facts["problem"]
    assert (facts["gaps"], facts["gap_rows"]) == ([[0, 64]], 64)
    page = client.get("/records/s0/2/0")
    assert page.status_code == 200
    assert "has been removed" in page.text


# ---- predictions


def digest_of(folder: Path, ordinal: int) -> str:
    with open_shards(folder) as store:
        return token_digest(store[ordinal].token_ids)


def test_a_drafter_is_shown_token_by_token(open_client, folder, tmp_path):
    run = write_run(tmp_path / "runs" / "r1")
    client = open_client(runs_dir=tmp_path / "runs", show_text=True)
    record = client.get("/api/records/s0/1/0").json()
    assert record["prediction_runs"] == []
    first = record["spans"][1]["start"] + 1
    with PredictionsWriter(run / "predictions.jsonl", draft_tokens=2, drafter="r1") as out:
        steps = (StepPrediction([1, 0, 0, 1], [0.9, 0.1, 0.0, 0.6], [1, 4, None, 1]),
                 StepPrediction([None, 1, 0, 0], [None, 0.5, 0.2, 0.1], [None, 1, 3, 8]))  # fmt: skip
        out.write(RecordPredictions("s0/000001/0", digest_of(folder, 0), first, steps))
    record = client.get("/api/records/s0/1/0").json()
    assert [(r["name"], r["draft_tokens"]) for r in record["prediction_runs"]] == [("r1", 2)]
    view = client.get("/api/records/s0/1/0/tokens", params={"run": "r1"}).json()
    by_position = {t["position"]: t for t in view["tokens"]}
    assert by_position[first]["drafts"][0] == {"correct": 1, "probability": 0.9, "rank": 1}
    assert by_position[first - 1]["drafts"][0]["correct"] is None
    # Draft 1 and 2 of the chain at first: right, right; then a step of the target; then a right draft.
    assert [by_position[first + i]["accepted"] for i in range(4)] == [True, True, False, True]
    assert view["draft_summary"]["positions"][0]["num_correct"] == 2
    assert view["draft_summary"]["misses"] == [{"start": first + 1, "stop": first + 3}]
    page = client.get("/records/s0/1/0").text
    assert f'id="t{first}"' in page
    assert "simulated acceptance length" in page
    assert client.get("/api/records/s0/1/1/tokens", params={"run": "r1"}).json()["draft_summary"] is None
    listed = client.get("/api/runs/r1").json()["predicted_records"]
    assert [(r["record"], r["num_correct"], r["num_evaluated"]) for r in listed] == [("s0/000001/0", 2, 4)]


def test_predictions_of_a_record_that_is_another_one_now_are_not_shown(open_client, folder, tmp_path):
    """Forgetting a record gives the later ones of its shard new numbers."""
    from specdec_tap.cli import main

    run = write_run(tmp_path / "runs" / "r1")
    with PredictionsWriter(run / "predictions.jsonl", draft_tokens=1, drafter="r1") as out:
        for i in range(2):
            steps = (StepPrediction([1, 0], [0.9, 0.1], [1, 4]),)
            out.write(RecordPredictions(f"s0/000001/{i}", digest_of(folder, i), 15, steps))
    assert main(["shards", "forget", str(folder), "s0/000001/1"]) == 0
    client = open_client(runs_dir=tmp_path / "runs")
    names = [r["name"] for r in client.get("/api/records/s0/1/0").json()["prediction_runs"]]
    assert names == ["r1"]
    assert client.get("/api/records/s0/1/1").json()["prediction_runs"] == []
    assert client.get("/api/records/s0/1/1/tokens", params={"run": "r1"}).json()["draft_summary"] is None
    listed = client.get("/api/runs/r1").json()["predicted_records"]
    assert [r["record"] for r in listed] == ["s0/000001/0"]
    assert "/records/s0/000001/1" not in client.get("/runs/r1").text


def test_a_damaged_predictions_file_does_not_take_the_page_down(open_client, tmp_path):
    run = write_run(tmp_path / "runs" / "r1")
    (run / "predictions.jsonl").write_text("no json\n")
    client = open_client(runs_dir=tmp_path / "runs")
    assert (
        "is no predictions file" in client.get("/api/records/s0/1/0").json()["prediction_runs"][0]["problem"]
    )
    assert client.get("/records/s0/1/0").status_code == 200


# ---- runs


def test_runs_and_evaluations(open_client, tmp_path):
    write_run(tmp_path / "runs" / "old", started=1.0)
    run = write_run(tmp_path / "runs" / "new", started=2.0)
    (run / "eval.json").write_text(json.dumps(EVALUATION))
    client = open_client(runs_dir=tmp_path / "runs")
    assert [r["name"] for r in client.get("/api/runs").json()["runs"]] == ["new", "old"]
    data = client.get("/api/runs/new", params={"points": 10}).json()
    assert len(data["train"]["step"]) == 10
    assert data["train"]["step"][-1] == 300
    assert data["best_simulated_acceptance_length"] == pytest.approx(1.4)
    (evaluation,) = client.get("/api/evaluations").json()["evaluations"]
    assert (evaluation["run"], evaluation["acceptance_length"], evaluation["speedup"]) == ("new", 1.358, 1.28)
    for page in ("/runs", "/runs?compare=old&compare=new", "/runs/new", "/evaluations"):
        assert client.get(page).status_code == 200
    assert "1.358" in client.get("/evaluations").text


@pytest.mark.parametrize("name", ["..%2fshards", "%2e%2e", "nope", "x" * 300, "new%00"])
def test_a_run_name_is_looked_up_and_never_a_path(open_client, tmp_path, name):
    write_run(tmp_path / "runs" / "new")
    client = open_client(runs_dir=tmp_path / "runs")
    answer = client.get(f"/api/runs/{name}")
    assert answer.status_code in (404, 422)
    assert set(answer.json()) == {"detail", "code", "hint"}


# ---- privacy


SECRET = "the secret word is xylophone"


def secret_folder(root: Path, text: str = SECRET) -> Path:
    root.mkdir()
    put_target(root)
    with ShardWriter(root, make_header(), min_free_bytes=0) as writer:
        put(writer, text + " ", text * 3)
    return root


def test_text_and_token_ids_are_hidden_until_asked_for(open_client, tmp_path):
    client = open_client(shards_dir=secret_folder(tmp_path / "secret"))
    for path in (*VIEWS, *PAGES):
        answer = client.get(path.replace("s0/1/2", "s0/1/0"))
        assert "xylophone" not in answer.text
    view = client.get("/api/records/s0/1/0/tokens").json()
    assert view["text_shown"] is False
    assert {(t["text"], t["id"]) for t in view["tokens"]} == {(None, None)}
    page = client.get("/records/s0/1/0").text
    assert "data-id" not in page
    assert "--show-text" in page


def test_text_is_shown_with_show_text_or_the_token(open_client, tmp_path):
    root = secret_folder(tmp_path / "secret")
    path = "/api/records/s0/1/0/tokens"
    text_of = lambda answer: "".join(t["text"] or "" for t in answer.json()["tokens"])  # noqa: E731
    assert SECRET in text_of(open_client(shards_dir=root, show_text=True).get(path))
    client = open_client(shards_dir=root, token=TOKEN)
    assert text_of(client.get(path)) == ""
    assert SECRET in text_of(client.get(path, headers={"Authorization": f"Bearer {TOKEN}"}))
    assert text_of(client.get(path, headers={"Authorization": f"Bearer {TOKEN}x"})) == ""


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;"),
        ('"><img src=x onerror=alert(1)>', "&lt;"),
        ("\x1b[31mred\x1b[0m\x07", "\\x1b"),
        ("\u202egnp.exe", "\\u202e"),
        ("</span></div></main>", "&lt;/"),
        ("{{ 7 * 7 }}", "{{ 7 * 7 }}"),
    ],
)
def test_hostile_text_is_shown_as_text(open_client, tmp_path, hostile, harmless):
    root = secret_folder(tmp_path / "secret", hostile)
    client = open_client(shards_dir=root, show_text=True)
    page = client.get("/records/s0/1/0").text
    shown = re.search(r'<div class="tokens.*?</div>', page, re.DOTALL)[0]
    plain = re.sub(r"<span[^>]*>|</span>", "", shown)
    assert harmless in plain
    assert harmless == hostile or hostile not in plain
    assert not re.search(r"<(script|img)[^>]*>(?!</script>)", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", page)
    tokens = client.get("/api/records/s0/1/0/tokens").json()["tokens"]
    assert not re.search(r"[\x1b\u202e]", "".join(t["text"] for t in tokens))


def test_hostile_names_are_shown_as_text(open_client, folder, tmp_path):
    """Request ids, LoRA names and run names come from others too."""
    with ShardWriter(folder, make_header("s1"), min_free_bytes=0) as writer:
        put(writer, "a ", "b " * 20, request_id="<b>x</b>\x1b[1m", lora="<i>lora</i>")
    write_run(tmp_path / "runs" / "<u>run<u>")
    client = open_client(runs_dir=tmp_path / "runs")
    for path in ("/records", "/records/s1/1/0", "/runs"):
        text = client.get(path).text
        assert "<b>x" not in text
        assert "<i>lora" not in text
        assert "<u>run" not in text
        assert "\x1b" not in text


def test_characters_of_several_tokens_come_out_whole(open_client, tmp_path):
    text = "na\u00efve \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680 ok"
    client = open_client(shards_dir=secret_folder(tmp_path / "secret", text), show_text=True)
    tokens = client.get("/api/records/s0/1/0/tokens").json()["tokens"]
    assert "".join(t["text"] for t in tokens).startswith(text)
    # A window that begins inside a character has the bytes that it has, and goes on whole.
    later = client.get("/api/records/s0/1/0/tokens", params={"start": 8}).json()["tokens"]
    assert "\u672c\u8a9e \U0001f469\u200d\U0001f680 ok" in "".join(t["text"] for t in later)


def test_text_of_a_tiktoken_model_is_shown(open_client, tmp_path):
    """Kimi's tokenizer files: no tokenizer.json, and code beside them that must not run."""
    root, trap = tmp_path / "kimi", tmp_path / "ran"
    root.mkdir()
    pieces = [bytes([i]) for i in range(256)] + [
        b"Hello",
        "w\u00f6rld".encode(),
        b"\xe6\x97",
        b"\xa5<b>\x1b[1m",
    ]
    put_tiktoken(root, pieces, {280: "[BOS]", 281: "<|im_end|>"}, code=f"open({str(trap)!r}, 'w')")
    prompt, response = np.array([280, 256, 32, 257], np.int32), np.array([258, 259, 256, 270, 281], np.int32)
    with ShardWriter(root, make_header(), min_free_bytes=0) as writer:
        put(writer, prompt, response)
    client = open_client(shards_dir=root, show_text=True)
    view = client.get("/api/records/s0/1/0/tokens").json()
    assert view["text_problem"] is None
    texts = [token["text"] for token in view["tokens"]]
    assert texts[:4] == ["[BOS]", "Hello", " ", "w\u00f6rld"]
    # One character of two tokens comes out whole, and what a terminal or a browser acts on does not.
    assert "".join(texts[4:]) == "\u65e5<b>\\x1b[1mHello<|270|><|im_end|>"
    page = client.get("/records/s0/1/0").text
    assert "w\u00f6rld" in page and "&lt;b&gt;" in page and "&lt;|im_end|&gt;" in page
    assert "\x1b" not in page and not trap.exists()


def test_without_a_tokenizer_ids_are_shown_with_the_reason(open_client, tmp_path):
    root = secret_folder(tmp_path / "secret")
    (root / "target" / "tokenizer.json").unlink()
    client = open_client(shards_dir=root, show_text=True)
    view = client.get("/api/records/s0/1/0/tokens").json()
    assert "tokenizer.json cannot be read" in view["text_problem"]
    assert view["tokens"][0]["id"] == ids_of(SECRET)[0]
    assert client.get("/records/s0/1/0").status_code == 200


# ---- who may


def test_signing_in_opens_text_and_signing_out_closes_it(open_client, tmp_path):
    client = open_client(shards_dir=secret_folder(tmp_path / "secret"), token=TOKEN)
    wrong = client.post("/sign-in", data={"token": "wrong", "next": "/"})
    assert (wrong.status_code, "not the token" in wrong.text) == (401, True)
    answer = client.post("/sign-in", data={"token": TOKEN, "next": "/records/s0/1/0"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/records/s0/1/0")
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert client.get("/api/records/s0/1/0/tokens").json()["text_shown"] is True
    client.post("/sign-out")
    assert client.get("/api/records/s0/1/0/tokens").json()["text_shown"] is False


@pytest.mark.parametrize(
    "where", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:x"]
)
def test_signing_in_leads_nowhere_else(open_client, where):
    client = open_client(token=TOKEN)
    answer = client.post("/sign-in", data={"token": TOKEN, "next": where}, follow_redirects=False)
    assert answer.headers["location"] == "/"


def test_guessing_the_token_is_slowed_down(open_client):
    client = open_client(token=TOKEN)
    codes = [client.post("/sign-in", data={"token": f"guess {i}"}).status_code for i in range(14)]
    assert codes[:10] == [401] * 10
    assert codes[-1] == 429
    answer = client.get("/api/records/s0/1/0/tokens", headers={"Authorization": "Bearer guess"})
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_requests")
    assert int(answer.headers["retry-after"]) >= 1


def test_other_machines_need_the_token_for_everything(open_client, folder):
    client = open_client(host="0.0.0.0", token=TOKEN)
    for path in VIEWS:
        answer = client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (401, "sign_in")
    for path in PAGES[:-1]:
        answer = client.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/sign-in?next={path}")
    assert client.get("/sign-in").status_code == 200
    assert client.get("/api/events").status_code == 401
    header = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/shards", headers=header).status_code == 200
    assert client.get("/shards", headers=header).status_code == 200


def test_a_request_for_another_host_is_refused(open_client):
    """A page of another site can make a browser resolve its own name to 127.0.0.1."""
    client = open_client()
    answer = client.get("/api/shards", headers={"Host": "evil.example:8095"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    for host in ("localhost:8095", "127.0.0.1:8095", "[::1]:8095", "LOCALHOST"):
        assert client.get("/api/shards", headers={"Host": host}).status_code == 200


def test_changes_that_a_browser_was_led_to_are_refused(open_client):
    client = open_client()
    answer = client.post("/api/shards/s0/1/verify")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


def test_security_headers_are_on_everything_and_cors_on_nothing(open_client):
    client = open_client()
    for path in (*VIEWS, *PAGES, "/static/app.js", "/nothing/here", "/healthz"):
        headers = client.get(path, headers={"Origin": "https://evil.example"}).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
        if not path.startswith("/static"):
            assert headers["cache-control"] == "no-store"


def test_pages_have_nothing_inline(open_client, tmp_path):
    """What the content security policy would block."""
    write_run(tmp_path / "runs" / "new")
    client = open_client(runs_dir=tmp_path / "runs", show_text=True)
    for path in (*PAGES, "/runs/new"):
        text = client.get(path).text
        assert not re.search(r'\sstyle="|\son\w+="', text)
        assert not re.search(r"<script(?![^>]*(src=|application/json))", text)


def test_static_files_are_kept_by_version(open_client):
    client = open_client()
    page = client.get("/").text
    (address,) = re.findall(r'src="(/static/app\.js\?v=[0-9a-f]{12})"', page)
    assert "immutable" in client.get(address).headers["cache-control"]
    assert client.get("/static/app.js").headers["cache-control"] == "no-cache"
    assert client.get("/static/../app.py").status_code == 404


# ---- errors


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/shards/none/1", 404, "not_found"),
        ("/api/shards/s0/9", 404, "not_found"),
        ("/api/shards/s0/x", 422, "invalid_value"),
        ("/api/shards/s0/-1", 422, "invalid_value"),
        ("/api/shards/s0/1/verify", 404, "not_found"),
        ("/api/shards?limit=0", 422, "invalid_value"),
        ("/api/shards?limit=201", 422, "invalid_value"),
        ("/api/records?sort=size", 422, "invalid_value"),
        ("/api/records?offset=-1", 422, "invalid_value"),
        ("/api/records?q=" + "x" * 300, 422, "invalid_value"),
        ("/api/records/s0/1/99", 404, "not_found"),
        ("/api/records/s0/1/0/tokens?start=99999", 422, "invalid_value"),
        ("/api/records/s0/1/0/tokens?run=none", 404, "not_found"),
        ("/api/records/..%2f..%2fetc/1/0", 404, "not_found"),
        ("/api/runs/none", 404, "not_found"),
        ("/nothing", 404, "not_found"),
    ],
)
def test_every_error_has_the_one_shape(open_client, path, status, code):
    answer = open_client().get(path)
    assert answer.status_code == status
    data = answer.json()
    assert set(data) == {"detail", "code", "hint"}
    assert data["code"] == code
    assert isinstance(data["detail"], str)
    assert data["detail"]


def test_a_wrong_method_has_the_one_shape(open_client):
    data = open_client().delete("/api/shards").json()
    assert (data["code"], set(data)) == ("method_not_allowed", {"detail", "code", "hint"})


def test_a_bug_has_the_one_shape_and_tells_nothing(open_client, monkeypatch):
    client = open_client()
    monkeypatch.setattr(client.app.state.dashboard.library, "shards", lambda: 1 / 0)
    answer = client.get("/api/shards")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "ZeroDivision" not in answer.text
    assert answer.json()["code"] in CODES


# ---- verification


def test_a_shard_is_verified_on_request(open_client, folder):
    shutil.rmtree(folder / "target")
    client = open_client()
    change = {"X-Specdec-Tap": "1"}
    answer = client.post("/api/shards/s0/1/verify", headers=change)
    assert (answer.status_code, answer.json()["state"]) == (202, "waiting")
    path = "/api/shards/s0/1/verify"
    wait_until(lambda: client.get(path).json()["state"] not in ("waiting", "running"), timeout_s=60)
    result = client.get(path).json()
    assert result["state"] in ("good", "bad"), result
    assert result["finished_unix_s"] >= result["started_unix_s"]
    assert client.get("/api/shards").json()["shards"][0]["verification"]["state"] == result["state"]
    assert client.get("/shards/s0/1").status_code == 200
    assert client.post("/api/shards/s0/2/verify", headers=change).status_code == 404


def test_a_flipped_byte_is_found(open_client, folder):
    shutil.rmtree(folder / "target")
    path = folder / "s0" / "000001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    client = open_client()
    client.post("/api/shards/s0/1/verify", headers={"X-Specdec-Tap": "1"})
    address = "/api/shards/s0/1/verify"
    wait_until(lambda: client.get(address).json()["state"] not in ("waiting", "running"), timeout_s=60)
    result = client.get(address).json()
    assert (result["state"], result["num_errors"] > 0) == ("bad", True)
    assert "error" in client.get("/shards/s0/1").text


def test_a_verification_that_cannot_run_says_why(open_client):
    client = open_client()  # its target/ has a tokenizer but no head
    client.post("/api/shards/s0/1/verify", headers={"X-Specdec-Tap": "1"})
    address = "/api/shards/s0/1/verify"
    wait_until(lambda: client.get(address).json()["state"] not in ("waiting", "running"), timeout_s=60)
    result = client.get(address).json()
    assert (result["state"], "no config.json" in result["problem"]) == ("failed", True)


# ---- size


def test_a_hundred_thousand_records_are_paged_without_lag(open_client, tmp_path, monkeypatch):
    """Pages come from the index: only the records that are shown are read, and a search stops in time."""
    client = open_client(shards_dir=make_many(tmp_path / "many", 100_000))
    client.get("/records")  # the index is read once
    read, frame = [], ShardFile.record
    monkeypatch.setattr(ShardFile, "record", lambda self, i: read.append(i) or frame(self, i))
    frames = {}
    for path in (
        "/records",
        "/records?offset=99950",
        "/records?sort=longest&offset=50000",
        "/records?gaps_only=true&min_tokens=30",
        "/records?q=req-000001",
        "/shards",
        "/shards/s0/1",
    ):
        read.clear()
        assert client.get(path).status_code == 200
        frames[path] = len(read)
    print(frames)
    assert max(n for path, n in frames.items() if "q=" not in path) <= 100, frames
    assert frames["/records?q=req-000001"] < 100_000, frames  # it stops after a time
    assert "searched" in client.get("/records?q=req-000001").text
    # A search that was stopped goes on where it stopped, and finds what is far down.
    offset, found = 0, []
    while offset is not None and not found:
        page = client.get(
            "/api/records", params={"q": "req-090000", "sort": "newest", "offset": offset}
        ).json()
        found, offset = page["records"], page["next_offset"]
    assert [r["request_id"] for r in found] == ["req-090000"]


def wait_until(condition, timeout_s: float = 15.0) -> None:
    """Poll until the condition holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not become true in time"
        time.sleep(0.05)


def _is_link(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return False
    return True
