"""What a server can be told to do, one mode a test, with tiny models on a CPU.

Engines of one runner run one after another in one process (``helpers/engine_jobs.py``); a test looks at what
one of them left, and compares it with Hugging Face's forward in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from helpers.engine import runner_env
from helpers.families import FAMILIES, make_family
from helpers.oracle import answers, final_status, max_error, sequences, wait_until_closed

from specdec_tap import open_shards
from specdec_tap.serving import VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

HELPERS = Path(__file__).parent.parent / "helpers"
JOBS = HELPERS / "engine_jobs.py"
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


def make_medusa(folder: Path, target: Path) -> Path:
    """Three random Medusa heads."""
    from helpers.golden import scramble
    from specdec_trainer.algorithms import ALGORITHMS
    from specdec_trainer.build import draft_config
    from specdec_trainer.config import TrainConfig
    from specdec_trainer.export import export_drafter

    from specdec_tap.target import load_target

    loaded = load_target(target)
    config = TrainConfig(algorithm="medusa", ttt_steps=3)
    model = ALGORITHMS["medusa"](draft_config(config, loaded, (), loaded.vocab_size))
    scramble(model)
    export_drafter(model, folder, target=loaded)
    return folder


def quantize(out: Path, target: Path) -> Path:
    """The target with 8-bit weights, one scale a row, as compressed-tensors stores them."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, out)
    weights = load_file(target / "model.safetensors")
    for name in [n for n in weights if n.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().clamp(-127, 127).to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {**numbers, "strategy": "channel"},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module", params=["v1", "v2"])
def runner(request) -> str:
    """vLLM's model runner; each test sees in the shards that it was this one."""
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "target": tiny.make_llama(root / "target", dtype="float32"),
        "other": tiny.make_llama(root / "other", dtype="float32", seed=7),
    }
    for folder in made.values():  # rotary positions need no table, so only this number bounds them
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    for number in (1, 2):
        made[f"lora{number}"] = make_lora(root / f"lora{number}", made["target"], number)
        made[f"merged{number}"] = merge_lora(root / f"merged{number}", made["target"], made[f"lora{number}"])
    made["medusa"] = make_medusa(root / "medusa", made["target"])
    made["quantized"] = quantize(root / "quantized", made["target"])
    return made


class Session:
    """Engines of one runner that ran in one process."""

    def __init__(self, root: Path, jobs: list[dict[str, Any]], runner: str) -> None:
        self.root, self.runner = root, runner
        self.jobs = {job["name"]: job for job in jobs}
        (root / "jobs.json").write_text(json.dumps(jobs))
        env = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(root / "cache"), **runner_env(runner),
        }  # fmt: skip
        command = [sys.executable, str(JOBS), str(root / "jobs.json"), str(root / "out.json")]
        with (root / "log.txt").open("w") as log:
            done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=840)
        self.log = (root / "log.txt").read_text()
        assert done.returncode == 0, self.log[-4000:]
        self.results = json.loads((root / "out.json").read_text())
        for job in jobs:
            if job["tap"]:
                wait_until_closed(Path(job["tap"]["dir"]))

    def outputs(self, name: str) -> list[dict[str, Any]]:
        assert "outputs" in self.results[name], self.results[name]
        return self.results[name]["outputs"]

    def store(self, name: str) -> Any:
        store = open_shards(self.jobs[name]["tap"]["dir"])
        assert store.header.engine["runner"] == self.runner
        return store

    def status(self, name: str) -> dict[str, Any]:
        """The last word of the one rank that captures."""
        (status,) = filter(None, self.results[name]["statuses"])
        return final_status(Path(self.jobs[name]["tap"]["dir"]) / status["stream"])

    def check(self, name: str, model: Path) -> Any:
        """One complete and right record per answer; returns the store."""
        outputs, store = self.outputs(name), self.store(name)
        assert sequences(store) == answers(outputs)
        assert all(record.gaps == [] for record in store)
        assert max_error(store, model) < TOLERANCE
        return store


def make_job(
    name: str, model: Path, phases: list, shards: Path | None, tap: dict[str, Any] | None = None, **llm: Any
) -> dict[str, Any]:
    settings = None if shards is None else {"dir": str(shards), "min_free_bytes": 0, **(tap or {})}
    return {"name": name, "model": str(model), "llm": LLM | llm, "tap": settings, "phases": phases}


def ask(prompts: list[list[int]] | None = None, **more: Any) -> dict[str, Any]:
    """A phase: six tokens for each prompt, unless ``params`` says otherwise."""
    phase = {} if prompts is None else {"prompts": prompts}
    return {**phase, "params": {"max_tokens": 6, "ignore_eos": True} | more.pop("params", {}), **more}


def test_compiled_runs_answer_the_same_before_with_and_after_the_tap(runner, models, tmp_path):
    """Asking for aux states changes the graph; vLLM's compile cache must not mistake one for the other."""
    phases = [ask(PROMPTS, params={"max_tokens": 12})]

    def job(name: str, shards: Path | None) -> dict[str, Any]:
        return make_job(name, models["target"], phases, shards, enforce_eager=False)

    compiled = Session(
        tmp_path, [job("without", None), job("with", tmp_path / "shards"), job("again without", None)], runner
    )
    assert "enforce_eager=False" in compiled.log
    first = compiled.outputs("without")
    for name in ("with", "again without"):
        assert [o["tokens"] for o in compiled.outputs(name)] == [o["tokens"] for o in first]
    store = compiled.check("with", models["target"])
    assert store.header.engine["enforce_eager"] == 0
    graphs = list((tmp_path / "cache" / "torch_compile_cache").glob("torch_aot_compile/*"))
    assert len(graphs) == 2  # the tap's is not taken for the other, and the last run finds the first one's


def test_memory_beside_one_long_request_is_that_of_its_steps(runner, tmp_path):
    """B41: 4,000 rows of 16 KB. The ring is there before; nothing else grows with the request."""
    wide = tiny.make_llama(tmp_path / "wide", hidden_size=1024, num_layers=6, dtype="float32")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5000}))
    llm = {"max_model_len": 4096, "max_num_seqs": 2, "max_num_batched_tokens": 256}
    phases = [ask(make_prompts([600], 1)), ask(make_prompts([4000], 2))]  # the first takes what stays
    jobs = [
        make_job("without", wide, phases, None, **llm),
        make_job("with", wide, phases, tmp_path / "shards", {"aux_layer_ids": [2, 3, 4]}, **llm),
    ]
    ran = Session(tmp_path, jobs, runner)
    assert sequences(ran.store("with")) == answers(ran.outputs("with"))
    raw = sum(record.num_rows for record in ran.store("with")) * 4 * 1024 * 4
    taken, without = (ran.results[name]["peak_growth_bytes"][1] for name in ("with", "without"))
    assert raw > 65e6
    assert taken - without < 20e6, (taken, without)


@pytest.fixture(scope="module")
def session(runner, models, tmp_path_factory) -> Session:
    """All engines with one rank, in one process."""
    root = tmp_path_factory.mktemp(f"modes-{runner}")
    long = PROMPTS[3]
    target = models["target"]
    first, second = ["one", 1, str(models["lora1"])], ["two", 2, str(models["lora2"])]
    lora = [
        ask([long]), ask([long], lora=first), ask([long], lora=second), ask([long], lora=first), ask([long])
    ]  # fmt: skip
    reload = ["reload_weights", {"weights_path": str(models["other"])}]
    sleep = [["sleep", {"level": 2}], ["wake_up", {}], reload]  # as a trainer of weights would
    weights = [ask(PROMPTS), ask(PROMPTS, reset_prefix_cache=True, rpcs=sleep), ask(PROMPTS)]
    system = make_prompts([200], 11)[0]
    pair = [system + tail for tail in make_prompts([30, 50], 12)]
    refused, kept = make_prompts([150], 13)[0], make_prompts([5], 14)[0]
    turns = [
        ask([long]), ask(after=[7, 8, 9]), ask(after=make_prompts([40], 15)[0]), ask(pair),
        ask([refused], params={"extra_args": {"specdec_tap": 0}}), ask([refused + kept]),
    ]  # fmt: skip
    wanted = {"extra_args": {"specdec_tap": 1}}
    filters = [
        ask(make_prompts([10, 40, 100], 16), params=wanted), ask(make_prompts([40], 17)),
    ]  # fmt: skip
    crowd = [int(x) for x in np.geomspace(1, 3000, 64)]
    evicting = [ask([long]), *(ask([p]) for p in make_prompts([300] * 4, 19)), ask([long])]
    tight = {"num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 128}
    jobs = [
        make_job("lora", target, lora, root / "lora", enable_lora=True, max_lora_rank=8, max_loras=2),
        make_job("weights", target, weights, root / "weights"),
        make_job("turns", target, turns, root / "turns"),
        make_job("restart", target, [ask([long])], root / "turns"),
        make_job(
            "filters", target, filters, root / "filters",
            {"consent": "opt_in", "min_tokens": 30, "max_tokens": 90, "response_window": [2, 5]},
        ),
        make_job(
            "evicting", target, evicting, root / "evicting",
            num_gpu_blocks_override=14, block_size=32, max_model_len=384,
        ),
        make_job(
            "priority", target,
            [ask(make_prompts([40] * 8, 20), params={"max_tokens": 60}, priority=list(range(8, 0, -1)))],
            root / "priority", scheduling_policy="priority", **tight,
        ),
        make_job(
            "medusa", target, [ask(PROMPTS, params={"max_tokens": 20})], root / "medusa",
            speculative_config={
                "method": "medusa", "model": str(models["medusa"]), "num_speculative_tokens": 3
            },
        ),
        make_job("embeds", target, [ask(embeds=[5, 30]), ask(PROMPTS)], root / "embeds",
                 enable_prompt_embeds=True),
        make_job("quantized", models["quantized"], [ask(PROMPTS)], root / "quantized", dtype="bfloat16"),
        make_job(
            "crowd", target, [ask(make_prompts(crowd, 21), params={"max_tokens": 8})], root / "crowd",
            max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=1024,
        ),
    ]  # fmt: skip
    return Session(root, jobs, runner)


def test_adapters_are_named_and_never_share_blocks(session, models):
    store = session.store("lora")
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
    """The engine slept and woke in between, which a CPU has nothing to do for."""
    streams = sorted(p.name for p in (session.root / "weights").iterdir() if p.name != "target")
    assert len(streams) == 2
    stores = [open_shards(session.root / "weights", streams=[stream]) for stream in streams]
    assert {store.header.engine["runner"] for store in stores} == {session.runner}
    stores.sort(key=lambda store: store.header.target.revision is not None)
    assert [store.header.target.revision for store in stores] == [None, "other+reload1"]
    assert [len(store) for store in stores] == [len(PROMPTS), 2 * len(PROMPTS)]
    for store, model in zip(stores, ("target", "other"), strict=True):
        assert max_error(list(store), models[model]) < TOLERANCE


def test_turns_and_shared_prompts_are_stored_once_and_unknown_prefixes_are_gaps(session, models):
    """A conversation of three turns, two requests at once with one system prompt, and a prompt whose first
    request had opted out; then the server starts again over the same folder."""
    store = session.store("turns")
    streams = {record.id.split("/")[0] for record in store}
    assert len(streams) == 2
    assert max_error(store, models["target"]) < TOLERANCE
    outputs = session.outputs("turns")
    told = [o for i, o in enumerate(outputs) if i != 5]  # all but the one that opted out
    assert sequences(store) == answers([*told, *session.outputs("restart")])
    by_tokens = {tuple(record.token_ids.tolist()): record for record in store}
    gapped = by_tokens[answers(outputs[6:7])[0]]
    assert gapped.gaps == [(0, 128)]  # whole cache blocks, of 128 tokens here, whose rows were not captured
    assert all(record.gaps == [] for record in store if record.id != gapped.id)
    status = session.status("turns")
    assert status["worker"]["skipped_consent"] == 1
    assert status["writer"]["gap_rows"] == 128
    # Turn two and three have their history from before, and of the pair one has the prompt of the other.
    assert status["writer"]["rows_reused"] >= 256 + 256 + 128
    alone = session.status("restart")["writer"]
    assert alone["rows_reused"] == alone["gap_rows"] == 0


def test_only_what_the_settings_ask_for_is_kept(session, models):
    """Opt-in, sequences of 30 to 90 tokens, final states of response positions 2 to 4."""
    (record,) = session.store("filters")
    kept = session.outputs("filters")[1]
    # The state at a response token's position belongs to the token after it.
    assert record.token_ids.tolist() == kept["prompt"] + kept["tokens"][:5]
    assert max_error([record], models["target"]) < TOLERANCE
    assert record.final_span == [(41, 44)]
    assert record.gaps == []
    status = session.status("filters")
    assert status["worker"]["skipped_consent"] == 1
    assert status["writer"]["skipped_length"] == 2


def test_rows_outlive_their_eviction_from_the_engines_cache(session, models):
    session.check("evicting", models["target"])
    assert session.status("evicting")["worker"]["rows"] >= 6 * 300  # computed again, nothing was cached
    assert session.status("evicting")["writer"]["gap_rows"] == 0


def test_a_crowd_of_all_lengths_is_captured_whole(session, models):
    """64 requests at once with prompts of 1 to 3,000 tokens, prefill chunks and decode steps mixed."""
    store = session.check("crowd", models["target"])
    lengths = sorted(record.spans[0].stop for record in store)
    assert lengths[0] == 1
    assert lengths[-1] == 3000


def test_priority_scheduling_preempts_and_loses_nothing(session, models):
    session.check("priority", models["target"])
    assert session.results["priority"]["counters"]["vllm:num_preemptions"] > 0


def test_a_medusa_drafter_may_be_at_work(session, models):
    if session.runner == "v2":  # vLLM's own words
        refusal = "Model Runner V2 does not yet support: speculative method 'medusa'"
        assert refusal in session.results["medusa"]["error"]
        return
    session.check("medusa", models["target"])
    assert session.results["medusa"]["counters"]["vllm:spec_decode_num_drafts"] > 20


def test_prompts_that_are_no_tokens_are_skipped_and_counted(session, models):
    """Embeddings here; multimodal prompts take the same way out (``tests/unit/capture/test_tap.py``)."""
    outputs = session.outputs("embeds")
    assert [len(o["tokens"]) for o in outputs] == [6] * 6
    assert sequences(session.store("embeds")) == answers(outputs[2:])
    assert session.status("embeds")["worker"]["skipped_unsupported"] == 2


def test_a_quantized_target_is_recorded_as_such_and_explains_its_tokens(session, models):
    import torch
    from safetensors.torch import load_file

    store = session.store("quantized")
    assert store.header.target.quantization == "compressed-tensors"
    assert sequences(store) == answers(session.outputs("quantized"))
    head = load_file(models["quantized"] / "model.safetensors")["model.embed_tokens.weight"].float()
    for record in store:
        prompt = record.spans[0].stop
        logits = torch.from_numpy(record.final_float(prompt - 1, record.num_rows)) @ head.T
        chosen = torch.from_numpy(record.token_ids[prompt:].astype(np.int64))
        best = logits.max(-1).values
        assert (best - logits.gather(1, chosen[:, None])[:, 0] < 0.02 * best.abs()).all()


@pytest.fixture(scope="module")
def ranks(runner, models, tmp_path_factory) -> Session:
    """Engines of two ranks; each in worker processes of its own."""
    root = tmp_path_factory.mktemp(f"ranks-{runner}")
    prompts = PROMPTS if runner == "v1" else PROMPTS[:3]
    jobs = [
        make_job("tp", models["target"], [ask(prompts)], root / "tp", tensor_parallel_size=2),
        make_job("pp", models["target"], [ask(prompts)], root / "pp", pipeline_parallel_size=2),
    ]
    if runner == "v2":
        jobs += [
            make_job(
                "deepseek", make_family("deepseek-v3", root / "deepseek"), [], root / "deepseek-shards",
                pipeline_parallel_size=2, **FAMILIES["deepseek-v3"].engine,
            ),
            make_job(
                "mixture", make_family("qwen3-moe", root / "mixture"), [ask(PROMPTS[:2])],
                root / "mixture-shards", {"strict": False}, pipeline_parallel_size=2,
            ),
        ]  # fmt: skip
    return Session(root, jobs, runner)


def test_two_tensor_parallel_ranks_write_one_complete_copy(ranks, models):
    store = ranks.check("tp", models["target"])
    assert store.header.engine["tp_size"] == 2
    assert len({p.parent for p in (ranks.root / "tp").glob("*/0*")}) == 1
    assert [status is None for status in ranks.results["tp"]["statuses"]] == [False, True]


def test_two_pipeline_stages_write_one_complete_copy_or_are_refused(ranks, models):
    if ranks.runner == "v1":
        assert "error" in ranks.results["pp"]
        assert "pipeline_parallel_size is 2 on the V1 runner, which does not relay aux" in ranks.log
        assert not list((ranks.root / "pp").glob("*/0*"))
        return
    store = ranks.check("pp", models["target"])
    assert store.header.engine["pp_size"] == 2
    assert [status is None for status in ranks.results["pp"]["statuses"]] == [True, False]


def test_models_that_relay_no_aux_states_are_refused_by_name_or_served_without_capture(ranks):
    if ranks.runner == "v1":
        pytest.skip("every pipeline is refused there; vLLM's own V1 runner cannot serve one on a CPU either")
    reason = "does not relay aux hidden states between pipeline stages, and pipeline_parallel_size is 2"
    assert "error" in ranks.results["deepseek"]
    assert f"UnsupportedVllmError: DeepseekV3ForCausalLM {reason}" in ranks.log
    assert [len(o["tokens"]) for o in ranks.outputs("mixture")] == [6, 6]
    assert ranks.results["mixture"]["statuses"] == [None, None]
    assert f"capture is off for this server: Qwen3MoeForCausalLM {reason}" in ranks.log
    for name in ("deepseek", "mixture"):
        assert not list((ranks.root / f"{name}-shards").iterdir())


def test_two_data_parallel_ranks_write_a_stream_each(runner, models, tmp_path):
    """A real server, so that requests are spread over both engines."""
    from concurrent.futures import ThreadPoolExecutor

    from openai import OpenAI

    arguments = [
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2",
        "--served-model-name", "tiny", "--data-parallel-size", "2",
    ]  # fmt: skip
    env = {
        "SPECDEC_TAP_DIR": str(tmp_path / "shards"), "SPECDEC_TAP_MIN_FREE_BYTES": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", **runner_env(runner),
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
    engines = [json.loads(p.read_text())["engine"] for p in tmp_path.glob("shards/*/.status.json")]
    assert {(engine["dp_rank"], engine["runner"]) for engine in engines} == {(0, runner), (1, runner)}
    assert max_error(list(store), models["target"]) < TOLERANCE
