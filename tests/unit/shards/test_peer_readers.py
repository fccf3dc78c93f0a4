"""Model-Optimizer's and SpecForge's own datasets take our exports.

Each needs a Python that has the tool, named by MODELOPT_PYTHON (nvidia-modelopt 0.47) or SPECFORGE_PYTHON
(specforge 0.2); a PYTHONPATH that adds it to this one does, too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import make_llama

from specdec_tap.cli import main
from specdec_tap.shards import open_shards

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

READER = Path(__file__).parents[2] / "helpers" / "peer_readers.py"
CHAT = (
    '{"id": "c", "messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "word"}]}'
)


@pytest.mark.parametrize(
    ("tool", "format"), [("modelopt", "modelopt"), ("modelopt", "modelopt-vllm"), ("specforge", "specforge")]
)
def test_its_own_dataset_reads_what_we_exported(tool: str, format: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    python = os.environ.get(f"{tool.upper()}_PYTHON")
    if not python:
        pytest.skip(f"set {tool.upper()}_PYTHON to a Python that has {tool}")
    model = make_llama(tmp_path / "model", hidden_size=64, tied=False)
    (tmp_path / "c.jsonl").write_text(f"{CHAT}\n")
    shards, out, found = tmp_path / "shards", tmp_path / "out", tmp_path / "found.safetensors"
    flags = ["--backend", "hf", "--out", str(shards), "--final-hidden", "all"]
    assert main(["extract", str(model), str(tmp_path / "c.jsonl"), *flags]) == 0
    assert main(["shards", "export", str(shards), str(out), "--to", format]) == 0
    done = subprocess.run(
        [python, str(READER), tool, str(out), str(found)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    given = load_file(found)
    with open_shards(shards) as store:
        record = store[0]
        rows = record.num_tokens - 1  # the last token has no state
        assert given["input_ids"].tolist() == record.token_ids[:rows].tolist()
        aux = record.aux_float(0, rows)
        assert np.array_equal(given["aux"].float().numpy(), aux.reshape(rows, -1))
        response = next(s for s in record.spans if s.kind == "response")
        first, last = response.start, min(response.stop, rows)
        mask = given["loss_mask"].numpy().nonzero()[0]
        assert first - 1 <= mask[0] <= first and mask[-1] <= last - 1
        final = record.final_float(0, rows)
    if tool == "modelopt":
        assert bool(given["prenorm"]) == (format == "modelopt-vllm")
        assert given["labels"][:-1].tolist() == given["input_ids"][1:].tolist()
    states = given["final"].float().numpy()
    if format == "modelopt-vllm":  # its norm gives back what our shards hold
        from specdec_tap.target import load_target

        eps = load_target(model).text_config.get("rms_norm_eps", 1e-6)
        weight = load_file(model / "model.safetensors")["model.norm.weight"].float().numpy()
        states = states / np.sqrt((states**2).mean(-1, keepdims=True) + eps) * weight
    assert np.allclose(states, final, rtol=2e-2, atol=2e-2)
