"""``specdec-tap replay`` against a real HTTP server on loopback."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from specdec_tap.cli import main
from specdec_tap.replay import BadLine, check_prompt_file, iterate_conversations, read_lines


def write_prompts(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def conversation(name: str, *turns: str) -> dict:
    return {"id": name, "turns": list(turns or [f"question {name}"])}


def replay(path: Path, stand_in, *flags: str) -> int:
    return main(["replay", str(path), "--url", stand_in.url, *flags])


def read_answers(path: Path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_every_conversation_is_answered(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(f"c{i}") for i in range(20)])
    assert replay(prompts, stand_in, "--out", str(tmp_path / "a.jsonl")) == 0
    answers = read_answers(tmp_path / "a.jsonl")
    assert {row["answers"][0] for row in answers.values()} == {f"echo: question c{i}" for i in range(20)}
    assert "20 requests of 20 conversations answered" in capsys.readouterr().out
    assert (tmp_path / "a.jsonl").stat().st_mode & 0o777 == 0o600


def test_model_and_sampling_reach_the_server(tmp_path, stand_in):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    extra = '{"vllm_xargs": {"specdec_tap": 0}}'
    assert replay(prompts, stand_in, "--max-tokens", "7", "--extra-body", extra) == 0
    body = stand_in.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("stand-in", 7, 0.0)
    assert body["vllm_xargs"] == {"specdec_tap": 0}


def test_multi_turn_sends_the_models_own_answers_back(tmp_path, stand_in):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a", "one", "two")])
    assert replay(prompts, stand_in, "--multi-turn") == 0
    assert [m["content"] for m in stand_in.bodies[1]["messages"]] == ["one", "echo: one", "two"]


def test_only_the_first_turn_is_sent_by_default(tmp_path, stand_in):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a", "one", "two")])
    assert replay(prompts, stand_in) == 0
    assert len(stand_in.bodies) == 1


def test_concurrency_is_bounded_and_used(tmp_path, stand_in):
    stand_in.delay_s = 0.05
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(f"c{i}") for i in range(24)])
    assert replay(prompts, stand_in, "--concurrency", "4") == 0
    assert stand_in.most_under_way == 4


def test_rate_spaces_the_requests(tmp_path, stand_in):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(f"c{i}") for i in range(6)])
    begun = time.monotonic()
    assert replay(prompts, stand_in, "--rate", "20") == 0
    assert time.monotonic() - begun >= 5 / 20


def test_server_errors_are_retried(tmp_path, stand_in, capsys):
    stand_in.failures = [503, 429]
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    assert replay(prompts, stand_in, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["retries"] == 2


def test_a_request_that_keeps_failing_is_counted_and_exits_1(tmp_path, stand_in, capsys):
    stand_in.failures = [500, 500]
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a"), conversation("b")])
    flags = ("--retries", "1", "--concurrency", "1", "--out", str(tmp_path / "a.jsonl"))
    assert replay(prompts, stand_in, *flags) == 1
    assert "1 failed" in capsys.readouterr().out
    assert {k: v["outcome"] for k, v in read_answers(tmp_path / "a.jsonl").items()} == {
        "a": "failed",
        "b": "done",
    }


def test_a_prompt_longer_than_the_context_is_counted_and_passed_over(tmp_path, stand_in, capsys):
    rows = [conversation("long", "word " * 80), conversation("short")]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    assert replay(prompts, stand_in, "--json", str(tmp_path / "r.json")) == 0
    assert "1 longer than the model's context" in capsys.readouterr().out
    counts = json.loads((tmp_path / "r.json").read_text())
    assert (counts["too_long"], counts["requests"], counts["failed"]) == (1, 1, 0)


def test_resume_sends_only_what_is_missing(tmp_path, stand_in):
    out = tmp_path / "a.jsonl"
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(f"c{i}") for i in range(6)])
    assert replay(prompts, stand_in, "--out", str(out), "--limit", "4") == 0
    assert replay(prompts, stand_in, "--out", str(out), "--resume") == 0
    assert len(stand_in.bodies) == 6
    assert sorted(read_answers(out)) == [f"c{i}" for i in range(6)]


def test_resume_cuts_off_a_half_written_line_and_tries_failures_again(tmp_path, stand_in):
    """A run killed inside a write left half a line; appending to it would have spoilt the next answer too."""
    out = tmp_path / "a.jsonl"
    done = {"id": "a", "outcome": "done"}
    failed = {"id": "b", "outcome": "failed"}
    out.write_text(json.dumps(done) + "\n" + json.dumps(failed) + "\n" + '{"id": "c", "outc')
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(name) for name in "abc"])
    assert replay(prompts, stand_in, "--out", str(out), "--resume") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows[:2]] == ["a", "b"]
    assert sorted(row["id"] for row in rows[2:]) == ["b", "c"]


def test_an_existing_answer_file_is_never_overwritten(tmp_path, stand_in, capsys):
    (tmp_path / "a.jsonl").write_text("precious\n")
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    assert replay(prompts, stand_in, "--out", str(tmp_path / "a.jsonl")) == 2
    assert "exists; add --resume" in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list; expected an object"),
        ('{"turns": ["x"]}', "'id' is missing"),
        ('{"id": true, "turns": ["x"]}', "'id' is missing or is no string"),
        ('{"id": "a"}', "'turns' is missing"),
        ('{"id": "a", "turns": []}', "'turns' is missing or is no list"),
        ('{"id": "a", "turns": ["x", 3]}', "'turns' holds an entry that is no text"),
        ('{"id": "a", "turns": ["  "]}', "'turns' holds an entry that is no text"),
        ('{"id": "a", "turns": ["\\ud800"]}', "'id' or 'turns' holds half of a surrogate pair"),
        ('{"id": "a", "turns": ["x"], "category": 1}', "'category' is no string"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named_by_number_and_reason(tmp_path, stand_in, capsys, line, reason):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("ok"), "", line])
    assert replay(prompts, stand_in) == 2
    message = capsys.readouterr().err
    assert "1 line is no conversation; nothing was sent" in message
    assert f"line 3: {reason}" in message
    assert not stand_in.bodies


def test_bad_utf8_and_repeated_ids_are_broken_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    good = json.dumps(conversation("a")).encode()
    path.write_bytes(good + b"\n\xff\xfe\n" + good + b"\n")
    bad = [item for item in read_lines(path) if isinstance(item, BadLine)]
    assert [item.line for item in bad] == [2, 3]
    assert "used by an earlier line" in bad[1].reason


def test_a_line_without_end_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_tap.replay.MAX_LINE_BYTES", 100)
    path = write_prompts(tmp_path / "p.jsonl", ["x" * 1000, conversation("a")])
    found = check_prompt_file(path)
    assert (found.num_bad_lines, found.num_conversations) == (1, 1)
    assert found.bad_lines[0].reason == "longer than 100 bytes"


def test_many_broken_lines_show_the_first_five(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", ["{"] * 12)
    assert replay(prompts, stand_in) == 2
    message = capsys.readouterr().err
    assert "12 lines are no conversation" in message
    assert "line 5:" in message
    assert "line 6:" not in message
    assert "and 7 more" in message


def test_broken_lines_can_be_passed_over(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", ["{", conversation("a")])
    assert replay(prompts, stand_in, "--skip-bad-lines") == 0
    assert "1 bad lines passed over" in capsys.readouterr().out


def test_limit_stops_reading(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", [conversation("a"), conversation("b"), "{"])
    assert [c.id for c in iterate_conversations(path, limit=2)] == ["a", "b"]


def test_no_server_is_one_clear_message(tmp_path, unused_url, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    assert main(["replay", str(prompts), "--url", unused_url]) == 2
    message = capsys.readouterr().err
    assert f"no server answers at {unused_url}" in message
    assert "vllm serve MODEL" in message


def test_a_model_that_is_not_served_is_named_with_what_is(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    assert replay(prompts, stand_in, "--model", "other") == 2
    assert "model 'other' is not served" in (message := capsys.readouterr().err)
    assert "it offers 'stand-in'" in message


def test_a_server_that_is_no_openai_api_is_said_to_be_none(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    url = stand_in.url.replace("/v1", "/nothing")
    assert main(["replay", str(prompts), "--url", url]) == 2
    assert "/nothing/models answers 404; expected an address ending in /v1" in capsys.readouterr().err


def test_a_server_lost_on_the_way_stops_the_replay(tmp_path, stand_in, monkeypatch, capsys):
    """The rest of a long file is not tried against a dead server, and the answers so far are kept."""
    import specdec_tap.replay as engine

    prompts = write_prompts(tmp_path / "p.jsonl", [conversation(f"c{i}") for i in range(500)])
    found = engine.AnswerFile.append

    def append_then_lose_the_server(self, answer):
        found(self, answer)
        stand_in.failures = [503] * 10_000

    monkeypatch.setattr(engine.AnswerFile, "append", append_then_lose_the_server)
    monkeypatch.setattr(engine, "MAX_BACKOFF_S", 0.01)
    out = tmp_path / "a.jsonl"
    flags = ("--out", str(out), "--concurrency", "2", "--retries", "1")
    assert replay(prompts, stand_in, *flags) == 2
    message = capsys.readouterr().err
    assert "stopped answering after" in message
    assert "made to fail with 503" in message
    assert 1 <= len(out.read_text().splitlines()) < 20


def test_unusable_flags_are_refused(tmp_path, stand_in, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [conversation("a")])
    assert replay(prompts, stand_in, "--resume") == 2
    assert "--resume needs --out" in capsys.readouterr().err
    assert replay(prompts, stand_in, "--json", str(tmp_path / "no" / "r.json")) == 2
    assert "folder that does not exist" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        replay(prompts, stand_in, "--concurrency", "0")
    assert exit_info.value.code == 2


def test_an_empty_file_is_an_error(tmp_path, stand_in, capsys):
    assert replay(write_prompts(tmp_path / "p.jsonl", []), stand_in) == 2
    assert "holds no conversation" in capsys.readouterr().err
