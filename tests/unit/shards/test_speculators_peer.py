"""speculators' own reader takes our export, and its trainer trains on it.

Needs a Python that has speculators 0.9: name it with SPECULATORS_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import make_llama

from specdec_tap.cli import main
from specdec_tap.shards import open_shards

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

STEP = Path(__file__).parents[2] / "helpers" / "speculators_step.py"


@pytest.fixture(scope="module")
def peer() -> str:
    python = os.environ.get("SPECULATORS_PYTHON")
    if not python:
        pytest.skip(
            "set SPECULATORS_PYTHON to a Python that has speculators 0.9 (pip install speculators==0.9.0)"
        )
    done = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('speculators'))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"SPECULATORS_PYTHON {python!r} cannot import speculators: {done.stderr[-200:]}")
    return python


def test_its_reader_accepts_our_export_and_its_trainer_trains_on_it(peer: str, tmp_path: Path) -> None:
    """Rows that it takes for supervised must get the target's own distribution from its norm and head."""
    model = make_llama(tmp_path / "model", hidden_size=64, tied=False)
    chats = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "word " * 6}],
        }
        for i in range(12)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    shards, out = tmp_path / "shards", tmp_path / "out"
    assert (
        main(["extract", str(model), str(tmp_path / "c.jsonl"), "--backend", "hf", "--out", str(shards)]) == 0
    )
    assert main(["shards", "export", str(shards), str(out), "--to", "speculators", "--no-stitch"]) == 0
    done = subprocess.run(
        [peer, str(STEP), str(out), str(model), str(tmp_path / "facts.json")],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    with open_shards(shards) as store:
        record = store[0]
        assert facts["rows"] == len(store)
        assert facts["first_tokens"] == record.token_ids[:-1].tolist()
        response = next(s for s in record.spans if s.kind == "response")
        assert facts["supervised"] == response.stop - 1 - response.start
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.inference_mode():
            logits = loaded(torch.from_numpy(record.token_ids.astype(np.int64))[None]).logits[0]
        # Its row of supervised token t holds the state of position t, whose head gives token t + 1.
        wanted = logits[response.start : response.stop - 1].argmax(-1).tolist()
    agree = np.mean(np.array(facts["teacher"]) == np.array(wanted))
    assert agree > 0.9, (facts["teacher"], wanted)  # bfloat16 states against a float32 forward
    assert all(np.isfinite(facts["losses"])) and facts["losses"][-1] < facts["losses"][0]
    assert any(name.startswith("fc") for name in facts["moved"])
