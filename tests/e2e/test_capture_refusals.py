"""What cannot be captured is refused at the start, by name, before weights are loaded and the port opens.

Pipeline parallelism is in ``test_capture_modes.py``: it takes several processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import tiny
from helpers.engine import runner_env
from helpers.oracle import wait_until_closed

from specdec_tap import open_shards
from specdec_tap.errors import InputError
from specdec_tap.serving import VllmServer

pytestmark = pytest.mark.e2e

LOADING = "Loading weights took"
JOBS = Path(__file__).parent.parent / "helpers" / "engine_jobs.py"
LLM = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}


def make_foreign(folder: Path, kind: str) -> Path:
    """A model of a class without the EAGLE-3 interface."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 320, "n_positions": 512},
        "opt": {
            "num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 128, "num_attention_heads": 2,
            "vocab_size": 320, "word_embed_proj_dim": 64, "max_position_embeddings": 512,
        },
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes[kind])).save_pretrained(folder)
    tiny.make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.matrix)])
def refused(request, tmp_path_factory) -> dict[str, Any]:
    """Try every engine of one runner in one process; a mapping of name to what happened."""
    root = tmp_path_factory.mktemp(f"refusals-{request.param}")
    llama = tiny.make_llama(root / "llama", dtype="float32")
    (root / "file").write_text("")
    taken = root / "taken" / "target"
    taken.mkdir(parents=True)
    (taken / "config.json").write_text("{}")

    def job(name: str, model: Path = llama, tap: dict | None = None, serve: bool = False, **llm: Any) -> dict:
        settings = {"dir": str(root / "shards" / name), "min_free_bytes": 0} | (tap or {})
        phases = [{"prompts": [[5, 6, 7]], "params": {"max_tokens": 2}}] if serve else []
        return {"name": name, "model": str(model), "llm": LLM | llm, "tap": settings, "phases": phases}

    gpt2 = make_foreign(root / "gpt2", "gpt2")
    extract = {
        "speculative_config": {
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(root / "extracted")},
        },
    }  # fmt: skip
    jobs = [
        job("nothing wrong", serve=True),
        job("extract_hidden_states", **extract),
        job("gpt2", gpt2),
        job("opt", make_foreign(root / "opt", "opt")),
        job("pooling", runner="pooling", convert="embed"),
        job("layer 9 of 8", tap={"aux_layer_ids": [2, 9]}),
        job("layer 0", tap={"aux_layer_ids": [0, 4]}),
        job("unwritable", tap={"dir": str(root / "file" / "shards")}),
        job("another target", tap={"dir": str(root / "taken")}),
        job("unknown setting", tap={"samplerate": 1}),
        job("fast prefill", kv_sharing_fast_prefill=True),
        job("ring too small", tap={"ring_bytes": "64KiB"}),
        job("not strict", gpt2, tap={"strict": False}, serve=True),
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **runner_env(request.param)}
    command = [sys.executable, str(JOBS), str(root / "jobs.json"), str(root / "out.json")]
    with (root / "log.txt").open("w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, (root / "log.txt").read_text()[-4000:]
    results = json.loads((root / "out.json").read_text())
    results["log"] = (root / "log.txt").read_text()
    results["root"] = root
    results["names"] = [one["name"] for one in jobs]
    wait_until_closed(root / "shards" / "nothing wrong")
    header = open_shards(root / "shards" / "nothing wrong").header
    assert header.engine["runner"] == request.param
    return results


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gpt2", ["GPT2LMHeadModel has no EAGLE-3 interface in vllm", "SPECDEC_TAP_DIR", "strict"]),
        ("opt", ["OPTForCausalLM has no EAGLE-3 interface"]),
        ("pooling", ["the model is served for pooling"]),
        ("layer 9 of 8", ["aux_layer_ids [2, 9]: [9] outside 1 to 8"]),
        ("layer 0", ["aux_layer_ids [0, 4]: [0] outside 1 to 8"]),
        ("unwritable", ["dir is ", "file/shards' but no file can be written there (Not a directory)"]),
        ("another target", ["which holds shards of another target", "choose another folder for this model"]),
        ("unknown setting", ["SPECDEC_TAP_SAMPLERATE", "did you mean SPECDEC_TAP_SAMPLE_RATE?"]),
        ("fast prefill", ["--kv-sharing-fast-prefill skips layers for prompt tokens"]),
        ("extract_hidden_states", ["uses extract_hidden_states, which the tap replaces; remove it"]),
        ("ring too small", ["ring_bytes is 65,536 but one step of"]),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(refused, name, parts):
    error = refused[name]["error"]
    for part in parts:
        assert part in error
    assert not list((refused["root"] / "shards" / name).glob("*/*.open"))


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("model_config", "is_encoder_decoder", True, "the model is an encoder-decoder"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size is 2"),
        ("parallel_config", "decode_context_parallel_size", 4, "decode_context_parallel_size is 4"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size is 2 on the V1 runner"),
    ],
)
def test_what_no_cpu_engine_can_be_asked_for_is_refused_by_name(part, name, value, reason):
    from specdec_tap.vllm_plugin.attach import why_not

    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        speculative_config=None,
    )
    setattr(getattr(config, part), name, value)
    assert reason in why_not(config, "v1")


BEFORE_LOADING = (
    "gpt2", "opt", "pooling", "layer 9 of 8", "layer 0", "unwritable", "another target", "unknown setting",
    "fast prefill", "extract_hidden_states",
)  # fmt: skip
"""All but a ring that is too small: how large it must be depends on the layers, and these on the model."""


def test_refusals_come_before_any_weight_is_loaded(refused):
    """B53: a refusal after loading would hold the memory of the weights, and cost minutes."""
    sections = refused["log"].split("--- job ")[:-1]
    loaded = {name for name, text in zip(refused["names"], sections, strict=True) if LOADING in text}
    assert "nothing wrong" in loaded
    assert not loaded & set(BEFORE_LOADING)


def test_unless_strict_the_server_serves_without_capture_and_says_so(refused):
    assert len(refused["not strict"]["outputs"][0]["tokens"]) == 2
    assert "capture is off for this server: GPT2LMHeadModel has no EAGLE-3" in refused["log"]
    assert not list((refused["root"] / "shards" / "not strict").glob("*"))


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"SPECDEC_TAP_SAMPLERATE": "1"}, "did you mean SPECDEC_TAP_SAMPLE_RATE?"),
        ({"SPECDEC_TAP_AUX_LAYER_IDS": "2,99"}, "[99] outside 1 to 8"),
    ],
)
def test_vllm_serve_ends_before_its_port_opens(tmp_path, env, part):
    model = tiny.make_llama(tmp_path / "llama")
    arguments = ["--enforce-eager", "--max-model-len", "256"]
    env = {"SPECDEC_TAP_DIR": str(tmp_path / "shards"), "SPECDEC_TAP_MIN_FREE_BYTES": "0", **env}
    server = VllmServer(str(model), log_path=tmp_path / "log.txt", arguments=arguments, env=env)
    server.start()
    opened = []
    try:
        with pytest.raises(InputError, match=r"ended with exit code [1-9]"):
            server.wait_until_ready(lambda _: opened.append(server.is_healthy()))
    finally:
        server.stop()
    assert not any(opened)
    log = server.log_path.read_text()
    assert part in log
    assert LOADING not in log
    assert started_with(env["SPECDEC_TAP_DIR"]) == []


def started_with(value: str) -> list[int]:
    """Processes that run with this value in their environment, whoever is their parent by now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if value.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
