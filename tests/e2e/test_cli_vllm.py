"""The command line against the real vLLM (CPU build), on tiny random models made on the spot."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from helpers.families import make_unsupported
from helpers.tiny import make_eagle3_drafter, make_llama

from specdec_tap.cli import main
from specdec_tap.serving import VllmServer

pytestmark = pytest.mark.e2e

SERVE_CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
MAX_MODEL_LEN = 512


def write_prompts(path: Path, turns: list[list[str]]) -> Path:
    rows = [{"id": f"p{i}", "category": "ab"[i % 2], "turns": turn} for i, turn in enumerate(turns)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = make_llama(folder / "llama")
    return {"llama": target, "drafter": make_eagle3_drafter(folder / "drafter", target)}


@dataclass
class Tapped:
    server: VllmServer
    shards: Path


@pytest.fixture(scope="module")
def tapped(models, tmp_path_factory) -> Iterator[Tapped]:
    """A server started with configs/serve/smollm2.yaml, its model and folder replaced."""
    folder = tmp_path_factory.mktemp("tapped")
    config = yaml.safe_load((SERVE_CONFIGS / "smollm2.yaml").read_text())
    tap = json.loads(config["additional-config"])
    tap["specdec_tap"]["dir"] = str(folder / "shards")
    config |= {
        "model": str(models["llama"]),
        "max-model-len": MAX_MODEL_LEN,
        "additional-config": json.dumps(tap),
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", str(folder / "serve.yaml")]
    with VllmServer(str(models["llama"]), log_path=folder / "serve.log", arguments=arguments) as server:
        yield Tapped(server, folder / "shards")


def test_conversations_are_replayed_and_captured(tapped, tmp_path, capsys):
    turns = [[f"Question number {i}?", "And then?"] for i in range(12)]
    prompts = write_prompts(tmp_path / "p.jsonl", turns)
    flags = [
        "--url",
        tapped.server.url,
        "--multi-turn",
        "--max-tokens",
        "20",
        "--out",
        str(tmp_path / "a.jsonl"),
    ]
    assert main(["replay", str(prompts), *flags, "--json", str(tmp_path / "r.json")]) == 0
    counts = json.loads((tmp_path / "r.json").read_text())
    assert (counts["requests"], counts["failed"], counts["too_long"]) == (24, 0, 0)
    answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert all(len(answer["answers"]) == 2 and answer["completion_tokens"][0] >= 1 for answer in answers)
    assert "24 requests of 12 conversations answered" in capsys.readouterr().out


def test_a_prompt_longer_than_the_context_is_counted(tapped, tmp_path, capsys):
    """The tokenizer has one token a byte, so 600 letters do not fit into 512 tokens."""
    prompts = write_prompts(tmp_path / "p.jsonl", [["x" * 600], ["short"]])
    flags = ["--url", tapped.server.url, "--max-tokens", "4", "--json", "-"]
    assert main(["replay", str(prompts), *flags]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["too_long"], counts["requests"], counts["failed"]) == (1, 1, 0)


def test_a_server_without_a_drafter_cannot_be_measured(tapped, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "p.jsonl", [["a"]])
    assert main(["eval", "--url", tapped.server.url, "--prompts", str(prompts)]) == 2
    assert "does no speculative decoding" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_vllm_starts(models, tapped, tmp_path, capsys):
    flags = ["--drafter", str(models["drafter"]), "--model", str(models["llama"]), "--log-dir", str(tmp_path)]
    assert main(["eval", *flags, "--port", str(tapped.server.port)]) == 2
    assert f"port {tapped.server.port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_stopping_seals_the_shards_and_leaves_nothing_running(tapped):
    """Runs last: it stops the server of this module."""
    from specdec_tap.cli.demo import wait_until_sealed
    from specdec_tap.shards import open_shards

    port = tapped.server.port
    tapped.server.stop()
    wait_until_sealed(tapped.shards)
    with open_shards(tapped.shards) as store:
        assert len(store) == 25
        assert all(info.sealed for info in store.shards)
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0
    assert main(["shards", "verify", str(tapped.shards)]) == 0


def test_a_drafter_is_served_measured_and_does_not_change_greedy_answers(models, tmp_path, capsys):
    """The drafter is random, so nearly nothing is accepted; counters and answers must still be right."""
    prompts = write_prompts(tmp_path / "p.jsonl", [[f"Tell me about {word}"] for word in "abcdef"])
    flags = ["--drafter", str(models["drafter"]), "--model", str(models["llama"]), "--prompts", str(prompts)]
    flags += ["--max-tokens", "24", "--num-speculative-tokens", "2", "--log-dir", str(tmp_path / "logs")]
    flags += [f"--vllm-args=--enforce-eager --dtype float32 --max-model-len {MAX_MODEL_LEN}"]
    assert main(["eval", *flags, "--json", str(tmp_path / "e.json"), "--plot", str(tmp_path / "e.png")]) == 0
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["num_draft_tokens"] == 2 * found["num_drafts"] > 0
    assert len(found["acceptance_per_position"]) == 2
    assert 1 <= found["acceptance_length"] < 2
    assert found["num_drafts"] == sum(counts["num_drafts"] for counts in found["categories"].values())
    assert (found["identical_answers"], found["compared_answers"]) == (6, 6)
    assert found["baseline_output_tokens_per_s"] > 0
    assert "acceptance length" in capsys.readouterr().out
    assert (tmp_path / "e.png").exists()


def test_a_server_that_vllm_refuses_says_why(models, tmp_path, capsys):
    flags = ["--drafter", str(models["drafter"]), "--model", str(models["llama"]), "--log-dir", str(tmp_path)]
    assert main(["eval", *flags, "--vllm-args=--max-model-len 1000000"]) == 2
    message = capsys.readouterr().err
    assert "ended with exit code 1" in message
    assert "max_model_len" in message


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("llama", 0, "LlamaForCausalLM has the EAGLE-3 interface; 8 layers, hidden size 64, bfloat16"),
        ("gpt2", 1, "GPT2LMHeadModel has no EAGLE-3 interface in vllm"),
    ],
)
def test_the_doctor_asks_vllm_about_the_model(models, tmp_path, capsys, kind, code, message):
    """test_doctor_families.py asks about the others."""
    folder = models["llama"] if kind == "llama" else make_unsupported(tmp_path / kind, kind)
    assert main(["doctor", str(folder), "--json", "-"]) == code
    report = json.loads(capsys.readouterr().out)
    details = {check["name"]: check["detail"] for check in report["checks"]}
    assert message in details["model"]
    if kind == "llama":
        assert details["aux layers"] == "[2, 4, 5] by default (2, N//2, N-3)"
        assert details["runner"] == "model runner V1 on cpu"
        assert report["sizes"]["raw_bytes_per_token"] == 4 * 64 * 2
