"""``specdec-tap extract``: what vLLM gives for written conversations equals what Hugging Face code gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import make_llama

from specdec_tap.cli import main
from specdec_tap.shards import Record, open_shards

pytestmark = pytest.mark.e2e

MAX_ERROR = 1e-4


# One token a byte; the CPU backend shares prefixes in blocks of 128 tokens.
SYSTEM = "You answer in few words, and you are never rude to anybody. " * 5


def chat(number: int, turns: int) -> dict:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn} of {number}?"})
        messages.append({"role": "assistant", "content": f"Answer {turn}: " + "word " * (number + turn)})
    return {"id": f"chat {number}", "messages": messages}


def records(folder: Path) -> dict[str, Record]:
    """By the conversation's id, ``chat N``: vLLM appends nine characters to a request's id."""
    return {record.meta.request_id[:6]: record for record in open_shards(folder)}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("TRITON_BACKENDS_IN_TREE", "1")


def test_both_backends_write_the_same_shards(tmp_path: Path, capsys) -> None:
    """Prefix caching is on, chunks are small, and the second run has nothing to do."""
    model = make_llama(tmp_path / "model", dtype="float32")
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat(i, 1 + i % 3)) + "\n" for i in range(10)))
    common = ["extract", str(model), str(file), "--max-length", "1000", "--dtype", "float32"]
    engine = {
        "enforce_eager": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "enable_chunked_prefill": True,
    }
    vllm = [*common, "--engine", json.dumps(engine), "--out", str(tmp_path / "vllm"), "--json", "-"]
    assert main(vllm) == 0
    counts = json.loads(capsys.readouterr().out)
    assert main([*common, "--backend", "hf", "--out", str(tmp_path / "hf"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == counts
    ours, truth = records(tmp_path / "vllm"), records(tmp_path / "hf")
    assert set(ours) == set(truth) and len(ours) == 10
    reused = 0
    for name, one in ours.items():
        two = truth[name]
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.spans == two.spans and one.meta.flags == two.meta.flags
        assert one.gaps == [] and one.final_span == two.final_span
        for rows, wanted in (
            (one.aux_float(), two.aux_float()),
            (one.final_float(*one.final_span[0]), two.final_float(*two.final_span[0])),
        ):
            error = np.linalg.norm(rows - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
            assert error.max() < MAX_ERROR
        reused += len({p.block for p in one.meta.pieces} & {p.block for o in ours.values() if o is not one
                                                            for p in o.meta.pieces}) > 0  # fmt: skip
    assert reused >= 8  # the system prompt is stored once
    assert main([*vllm, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == {"done before": 10}
    assert main(["shards", "verify", str(tmp_path / "vllm"), "--reference", str(model)]) == 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, capsys) -> None:
    model = make_llama(tmp_path / "model", num_layers=4)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(chat(0, 1)) + "\n")
    command = [
        "extract",
        str(model),
        str(file),
        "--out",
        str(tmp_path / "s"),
        "--layers",
        "2,9",
        "--max-length",
        "1000",
    ]
    assert main([*command, "--engine", '{"enforce_eager": true}']) == 2
    assert "aux_layer_ids [2, 9]: [9] outside 1 to 4" in capsys.readouterr().err
