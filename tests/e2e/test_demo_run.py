"""The whole way, small: ``specdec-tap demo`` with a tiny random model, the real vLLM and the real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny import make_llama

from specdec_tap.cli import main

pytestmark = pytest.mark.e2e

NUMBERS = {
    "requests", "tokens", "bytes_per_token", "raw_bytes_per_token", "acceptance_length",
    "acceptance_per_position", "simulated_acceptance_length", "train_tokens_per_s", "output_tokens_per_s",
    "baseline_output_tokens_per_s", "total_s",
}  # fmt: skip


def run_demo(folder: Path, model: Path, *flags: str) -> tuple[int, dict]:
    small = ["--quick", "--requests", "40", "--max-tokens", "24", "--train-minutes", "0.2"]
    flags = (*small, *flags, "--model", str(model), "--workdir", str(folder / "w"))
    code = main(["demo", *flags, "--json", str(folder / "d.json")])
    return code, json.loads((folder / "d.json").read_text())


def test_demo_goes_all_the_way_and_a_second_run_reuses_every_step(tmp_path, capfd):
    model = make_llama(tmp_path / "model", vocab_size=512)
    code, first = run_demo(tmp_path, model)
    out = capfd.readouterr().out
    assert code == 0, out
    assert set(first) >= NUMBERS
    assert (first["requests"], first["records"]) == (40, 40)
    assert first["bytes_per_token"] > 0
    assert len(first["acceptance_per_position"]) == 3
    assert 1 <= first["acceptance_length"] <= 4
    assert first["output_tokens_per_s"] > 0 and first["baseline_output_tokens_per_s"] > 0
    assert first["reused_steps"] == []
    for command in ("SPECDEC_TAP_DIR=", "replay", "shards verify", "train", "eval --drafter"):
        assert command in out
    assert (tmp_path / "w" / "run" / "drafter" / "config.json").exists()

    code, second = run_demo(tmp_path, model)
    assert code == 0
    assert second["reused_steps"] == ["capture", "verify", "train", "measure"]
    assert second["total_s"] < 10
    assert second["acceptance_length"] == first["acceptance_length"]
