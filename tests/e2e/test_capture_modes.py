"""Compiled runs, adapters, replaced weights, tensor and data parallelism, with tiny models on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny

from specdec_tap import open_shards
from specdec_tap.serving import VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

JOBS = Path(__file__).parent.parent / "helpers" / "engine_jobs.py"
LLM = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}  # fmt: skip
TOLERANCE = 1e-4


def make_prompts(sizes: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 250, size).tolist() for size in sizes]


PROMPTS = make_prompts([3, 40, 129, 300])


def make_lora(folder: Path, target: Path, seed: int) -> Path:
    """An adapter of rank 4 on the query and value projections, large enough to change the answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, hidden, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden, 4, generator=generator) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA", "r": 4, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
                "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "tiny",
            }
        )
    )  # fmt: skip
    return folder


def merge_lora(out: Path, target: Path, adapter: Path) -> Path:
    """The model that target and adapter make together, for Hugging Face."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, out)
    weights, lora = load_file(target / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [n for n in lora if n.endswith("lora_A.weight")]:
        key = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        weights[key] = weights[key] + lora[name.replace("lora_A", "lora_B")] @ lora[name]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "target": tiny.make_llama(root / "target", dtype="float32"),
        "other": tiny.make_llama(root / "other", dtype="float32", seed=7),
    }
    for number in (1, 2):
        made[f"lora{number}"] = make_lora(root / f"lora{number}", made["target"], number)
        made[f"merged{number}"] = merge_lora(root / f"merged{number}", made["target"], made[f"lora{number}"])
    return made


class Session:
    """Engines that ran in one process."""

    def __init__(self, root: Path, jobs: list[dict[str, Any]], **env: str) -> None:
        self.root = root
        (root / "jobs.json").write_text(json.dumps(jobs))
        env = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CACHE_ROOT": str(root / "cache"), **env,
        }  # fmt: skip
        command = [sys.executable, str(JOBS), str(root / "jobs.json"), str(root / "out.json")]
        with (root / "log.txt").open("w") as log:
            done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=600)
        self.log = (root / "log.txt").read_text()
        assert done.returncode == 0, self.log[-4000:]
        self.results = json.loads((root / "out.json").read_text())
        for job in jobs:
            if job["tap"]:
                wait_until_closed(Path(job["tap"]["dir"]))

    def outputs(self, name: str) -> list[dict[str, Any]]:
        return self.results[name]["outputs"]


def wait_until_closed(shards: Path) -> None:
    deadline = time.monotonic() + 60
    while list(shards.glob("*/*.open")):
        assert time.monotonic() < deadline, "the writer did not seal"
        time.sleep(0.05)


def make_job(name: str, model: Path, phases: list, shards: Path | None, **llm: Any) -> dict[str, Any]:
    tap = None if shards is None else {"dir": str(shards), "min_free_bytes": 0}
    return {"name": name, "model": str(model), "llm": LLM | llm, "tap": tap, "phases": phases}


def max_error(records: list, model: Path) -> float:
    """Largest relative L2 error of any captured row against Hugging Face in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = 0.0
    for record in records:
        ids = torch.tensor(record.token_ids[:-1].astype(np.int64))[None]
        with torch.inference_mode():
            out = oracle.model(ids, output_hidden_states=True)
        for start, stop in covered(record):
            aux = record.aux_float(start, stop)
            for slot, layer in enumerate((2, 4, 5)):
                worst = max(worst, relative(aux[:, slot], out.hidden_states[layer][0, start:stop].numpy()))
        for start, stop in record.final_span:
            final = out.last_hidden_state[0, start:stop].numpy()
            worst = max(worst, relative(record.final_float(start, stop), final))
    return worst


def covered(record: Any) -> list[tuple[int, int]]:
    edges = [0, *(edge for gap in record.gaps for edge in gap), record.num_rows]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


def answers(outputs: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return sorted(tuple(o["prompt"] + o["tokens"]) for o in outputs)


def sequences(store: Any) -> list[tuple[int, ...]]:
    return sorted(tuple(record.token_ids.tolist()) for record in store)


def test_compiled_runs_answer_the_same_before_with_and_after_the_tap(models, tmp_path):
    """Asking for aux states changes the graph; vLLM's compile cache must not mistake one for the other."""
    phases = [{"prompts": PROMPTS, "params": {"max_tokens": 12}}]

    def job(name: str, shards: Path | None) -> dict[str, Any]:
        return make_job(name, models["target"], phases, shards, enforce_eager=False)

    session = Session(
        tmp_path, [job("without", None), job("with", tmp_path / "shards"), job("again without", None)]
    )
    assert "enforce_eager=False" in session.log
    first = session.outputs("without")
    for name in ("with", "again without"):
        assert [o["tokens"] for o in session.outputs(name)] == [o["tokens"] for o in first]
    store = open_shards(tmp_path / "shards")
    assert store.header.engine["enforce_eager"] == 0
    assert sequences(store) == answers(first)
    assert max_error(list(store), models["target"]) < TOLERANCE


@pytest.fixture(scope="module")
def session(models, tmp_path_factory) -> Session:
    """Adapters, replaced weights and two tensor-parallel ranks, in one process."""
    root = tmp_path_factory.mktemp("modes")
    long = PROMPTS[3]

    def ask(prompts: list[list[int]], **more: Any) -> dict[str, Any]:
        return {"prompts": prompts, "params": {"max_tokens": 6, "ignore_eos": True}, **more}

    first, second = ["one", 1, str(models["lora1"])], ["two", 2, str(models["lora2"])]
    lora = [
        ask([long]),
        ask([long], lora=first),
        ask([long], lora=second),
        ask([long], lora=first),
        ask([long]),
    ]
    reload = {"rpc": "reload_weights", "kwargs": {"weights_path": str(models["other"])}}
    weights = [ask(PROMPTS), ask(PROMPTS, reset_prefix_cache=True, **reload), ask(PROMPTS)]
    return Session(
        root,
        [
            make_job(
                "lora", models["target"], lora, root / "lora", enable_lora=True, max_lora_rank=8, max_loras=2
            ),
            make_job("weights", models["target"], weights, root / "weights"),
            make_job("tp", models["target"], [ask(PROMPTS)], root / "tp", tensor_parallel_size=2),
        ],
    )


def test_adapters_are_named_and_never_share_blocks(session, models):
    store = open_shards(session.root / "lora")
    assert len(store) == 5
    blocks: dict[str | None, set] = {}
    for lora, model in ((None, "target"), ("one", "merged1"), ("two", "merged2")):
        records = [r for r in store if r.meta.lora == lora]
        assert sequences(records) == answers([o for o in session.outputs("lora") if o["lora"] == lora])
        assert max_error(records, models[model]) < TOLERANCE
        assert all(record.gaps == [] for record in records)
        blocks[lora] = {piece.block for record in records for piece in record.meta.pieces}
    assert not blocks[None] & blocks["one"]
    assert not blocks["one"] & blocks["two"]
    for lora in (None, "one"):  # inside one adapter they do share
        first, second = ({p.block for p in r.meta.pieces} for r in store if r.meta.lora == lora)
        assert first & second


def test_other_weights_start_another_stream_under_a_revision_of_their_own(session, models):
    streams = sorted(p.name for p in (session.root / "weights").iterdir() if p.name != "target")
    assert len(streams) == 2
    stores = [open_shards(session.root / "weights", streams=[stream]) for stream in streams]
    stores.sort(key=lambda store: store.header.target.revision is not None)
    assert [store.header.target.revision for store in stores] == [None, "other+reload1"]
    assert [len(store) for store in stores] == [len(PROMPTS), 2 * len(PROMPTS)]
    for store, model in zip(stores, ("target", "other"), strict=True):
        assert max_error(list(store), models[model]) < TOLERANCE


def test_two_tensor_parallel_ranks_write_one_complete_copy(session, models):
    store = open_shards(session.root / "tp")
    assert store.header.engine["tp_size"] == 2
    assert len({p.parent for p in (session.root / "tp").glob("*/0*")}) == 1
    assert sequences(store) == answers(session.outputs("tp"))
    assert max_error(list(store), models["target"]) < TOLERANCE
    assert [status is None for status in session.results["tp"]["statuses"]] == [False, True]


def test_two_data_parallel_ranks_write_a_stream_each(models, tmp_path):
    """A real server, so that requests are spread over both engines."""
    from concurrent.futures import ThreadPoolExecutor

    from openai import OpenAI

    arguments = [
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2",
        "--served-model-name", "tiny", "--data-parallel-size", "2",
    ]  # fmt: skip
    env = {
        "SPECDEC_TAP_DIR": str(tmp_path / "shards"), "SPECDEC_TAP_MIN_FREE_BYTES": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0",
    }  # fmt: skip
    server = VllmServer(str(models["target"]), log_path=tmp_path / "log.txt", arguments=arguments, env=env)
    with server, ThreadPoolExecutor(8) as pool:
        client = OpenAI(base_url=server.url, api_key="-", max_retries=0, timeout=120)
        done = pool.map(
            lambda ids: client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0),
            make_prompts([30] * 16, 3),
        )
        assert all(answer.choices[0].finish_reason for answer in done)
    wait_until_closed(tmp_path / "shards")
    store = open_shards(tmp_path / "shards")
    assert len(store) == 16
    ranks = {json.loads(p.read_text())["engine"]["dp_rank"] for p in tmp_path.glob("shards/*/.status.json")}
    assert ranks == {0, 1}
    assert max_error(list(store), models["target"]) < TOLERANCE
