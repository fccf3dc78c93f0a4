"""What is captured equals a float32 Hugging Face forward, on both runners, whatever the engine does.

The engines of one runner run one after another in one process (``helpers/engine_jobs.py``); every test then
looks at what one of them left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from helpers.engine import runner_env
from helpers.oracle import final_status, wait_until_closed

from specdec_tap import open_shards
from specdec_tap.capture.status import StatusReader
from specdec_tap.shards.reader import ShardStore
from specdec_tap.shards.verify import verify_shards

pytestmark = pytest.mark.e2e

HELPERS = Path(__file__).parent.parent / "helpers"
TOLERANCE = 1e-4
NUM_LAYERS = 8
FEW = (10, 20, 30)
"""Tokens that some requests are confined to, so that even a random drafter of these is often right."""
LLM = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}  # fmt: skip


@dataclass
class Ran:
    """One job's results and shards."""

    result: dict[str, Any]
    shards: Path

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return self.result["outputs"]

    @property
    def status(self) -> dict[str, Any]:
        """Of the one rank that captures."""
        (status,) = filter(None, self.result["statuses"])
        return status

    @property
    def final(self) -> dict[str, Any]:
        """The same rank's, once its writer has sealed all."""
        return final_status(self.shards / self.status["stream"])

    @property
    def store(self) -> ShardStore:
        return open_shards(self.shards)

    def counter(self, name: str) -> float:
        return self.result["counters"][name]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A float32 target with norm weights far from 1, drafters (the tap's layers; others), and a near twin."""
    import torch
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("models")
    target = tiny.make_llama(root / "target", dtype="float32", num_layers=NUM_LAYERS)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        if "norm" in name:
            weight.uniform_(0.3, 2.0, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    same = tiny.make_eagle3_drafter(root / "same", target)
    other = tiny.make_eagle3_drafter(root / "other", target)
    config = json.loads((other / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 6]
    (other / "config.json").write_text(json.dumps(config))
    twin = tiny.make_llama(root / "twin", dtype="float32", num_layers=NUM_LAYERS)
    for name, weight in weights.items():  # nearly the target, so that it guesses right now and then
        if "norm" not in name:
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    few = tiny.make_eagle3_drafter(root / "few", target, tokens=FEW)
    return {"target": target, "same": same, "other": other, "twin": twin, "few": few}


def make_prompts(sizes: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 250, size).tolist() for size in sizes]


def make_jobs(models: dict[str, Path], root: Path) -> list[dict[str, Any]]:
    boundaries = make_prompts([127, 128, 129, 255, 256, 257, 1, 2])
    # Each of the prompts (5 to 900 tokens) carries a marker of its own; all are sent at once, and all again.
    texts = make_prompts(list(range(2, 900, 23)), 1)
    marked = [[251 + i % 7, 300 - i, 251 + i // 7, *ids] for i, ids in enumerate(texts)]
    repeated = make_prompts([600], 2)[0]
    loop = [ids * 12 for ids in make_prompts([7, 9], 3)]
    phases = {
        "boundaries": [
            {"prompts": boundaries, "params": {"max_tokens": 1}},
            {"prompts": boundaries, "params": {"max_tokens": 20}, "reset_prefix_cache": True},
        ],
        "alone": [{"prompts": [ids], "params": {"max_tokens": 1}} for ids in boundaries],
        "marked": [{"prompts": marked, "params": {"max_tokens": 2}}] * 2,
        "hits": [
            {"prompts": [repeated], "params": {"max_tokens": 3}},
            {"prompts": [repeated], "params": {"max_tokens": 4}},
            {"prompts": [repeated + make_prompts([40], 4)[0], repeated[:513]], "params": {"max_tokens": 5}},
        ],
        "options": [
            {
                "prompts": boundaries[:5],
                "params": [
                    {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 8},
                    {"stop_token_ids": list(range(5, 120)), "max_tokens": 40},
                    {"stop_token_ids": list(range(5, 120)), "max_tokens": 40, "min_tokens": 6},
                    {"ignore_eos": True, "max_tokens": 15},
                    {"max_tokens": 3, "prompt_logprobs": 0},
                ],
            },
        ],
        # Without a seed: vLLM 0.32 on a CPU dies of a seeded request whose prompt takes several steps.
        "sampled": [{"prompts": boundaries[:4], "params": {"n": 3, "temperature": 1.0, "max_tokens": 12}}],
        "long": [{"prompts": [boundaries[6]], "params": {"max_tokens": 300, "ignore_eos": True}}],
        "drafts": [{"prompts": [*loop, *boundaries[:3]], "params": {"max_tokens": 24, "ignore_eos": True}}],
        # Answers repeat themselves, so that n-grams guess right now and then too.
        "few": [
            {
                "prompts": boundaries[:3],
                "params": {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": list(FEW)},
            },
        ],
        "crowd": [
            {"prompts": make_prompts([40] * 8, 6), "params": {"max_tokens": 60, "ignore_eos": True}},
        ],
    }  # fmt: skip

    def job(
        name: str, *phase_names: str, tap: bool = True, is_async: bool = False, **llm: Any
    ) -> dict[str, Any]:
        return {
            "name": name,
            "async": is_async,
            "model": str(models["target"]),
            "llm": LLM | llm,
            "tap": {"dir": str(root / name), "min_free_bytes": 0} if tap else None,
            "phases": [phase for name in phase_names for phase in phases[name]],
        }

    def drafter(method: str, **more: Any) -> dict[str, Any]:
        return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}}

    eagle = drafter("eagle3", model=str(models["other"]))
    small = {"num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 128}
    twin = drafter("draft_model", model=str(models["twin"]))
    plain = ("boundaries", "hits", "options", "drafts")
    return [
        job("plain", *plain),
        job("off", *plain, tap=False),
        # Each prompt by itself and in one step, where "plain" mixes and cuts them.
        job("alone", "alone", max_num_batched_tokens=1024),
        job("many", "marked", "long"),
        # In float32, vLLM 0.30 draws random tokens with a function that Triton's interpreter does not have.
        job("choices", "options", "sampled", use_fp64_gumbel=True),
        job("async", *plain, is_async=True),
        job("async-twin", "drafts", is_async=True, **twin),
        job("eagle-same", "drafts", **drafter("eagle3", model=str(models["same"]))),
        job("eagle-other", "drafts", **eagle),
        job("eagle-other-off", "drafts", tap=False, **eagle),
        job("few", "few"),
        job("eagle-few", "few", **drafter("eagle3", model=str(models["few"]))),
        job("twin", "drafts", **twin),
        job("crowd", "crowd", **small),
        # Last: no other engine starts in a process where vLLM 0.32 compiled its n-gram search.
        job("ngram", "few", **drafter("ngram", prompt_lookup_max=3, prompt_lookup_min=1)),
    ]


@pytest.fixture(scope="session", params=["v1", "v2"])
def ran(request, models, tmp_path_factory) -> dict[str, Ran]:
    """Run one runner's engines; a mapping of job name to what it left."""
    root = tmp_path_factory.mktemp(f"capture-{request.param}")
    jobs = make_jobs(models, root)
    (root / "jobs.json").write_text(json.dumps(jobs))
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **runner_env(request.param)}
    command = [
        sys.executable,
        str(HELPERS / "engine_jobs.py"),
        str(root / "jobs.json"),
        str(root / "out.json"),
    ]
    with (root / "log.txt").open("w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=840)
    assert done.returncode == 0, (root / "log.txt").read_text()[-4000:]
    results = json.loads((root / "out.json").read_text())
    out = {name: Ran(result, root / name) for name, result in results.items()}
    for name, one in out.items():
        one.result["meant_runner"] = request.param
        if any(one.result.get("statuses", [])):
            wait_until_closed(root / name)
    return out


class Oracle:
    """Hugging Face in float32; ``states(ids)`` gives rows of every aux layer and the final state."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], dict[str, np.ndarray]] = {}

    def states(self, token_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"2": [T-1, H], ..., "final": ..., "pre_norm": ...}`` for the rows that are fed."""
        key = tuple(token_ids.tolist())
        if key not in self._known:
            captured = {}
            hook = self._model.model.norm.register_forward_pre_hook(
                lambda module, args: captured.update(pre_norm=args[0])
            )
            with self._torch.inference_mode():
                ids = self._torch.tensor(key[:-1], dtype=self._torch.int64)[None]
                out = self._model.model(ids, output_hidden_states=True)
            hook.remove()
            states = {str(i): h[0].numpy() for i, h in enumerate(out.hidden_states[:-1])}
            states["final"] = out.last_hidden_state[0].numpy()
            states["pre_norm"] = captured["pre_norm"][0].numpy()
            self._known[key] = states
        return self._known[key]


@pytest.fixture(scope="session")
def oracle(models) -> Oracle:
    return Oracle(models["target"])


def errors(record: Any, layers: tuple[int, ...], oracle: Oracle, fault: str | None = None) -> np.ndarray:
    """Relative L2 error of every captured row, aux layers and final; ``fault`` spoils the comparison."""
    ids = record.token_ids
    if fault == "shifted token":
        ids = np.concatenate([ids[1:], ids[:1]])
    want = oracle.states(ids)
    out = []
    aux = record.aux_float()
    for slot, layer in enumerate(layers):
        out.append(relative(aux[:, slot], want[str(layer + (fault == "layer off by one"))]))
    for start, stop in record.final_span:
        final = want["pre_norm" if fault == "missing norm" else "final"]
        out.append(relative(record.final_float(start, stop), final[start:stop]))
    return np.concatenate(out)


def relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def check(ran: Ran, oracle: Oracle) -> None:
    """One record per answer, each complete, every row right, counters that say so."""
    store = ran.store
    assert store.header.engine["runner"] == ran.result["meant_runner"]
    assert store.header.aux_layer_ids == (2, 4, 5)
    assert not store.skipped
    got = sorted(tuple(record.token_ids.tolist()) for record in store)
    assert got == sorted(tuple(o["prompt"] + o["tokens"]) for o in ran.outputs)
    for record in store:
        prompt = record.spans[0].stop
        assert record.gaps == []
        # Prompts that another request computed as a prompt have no final states; responses always do.
        covered = {p for start, stop in record.final_span for p in range(start, stop)}
        assert covered >= set(range(prompt - 1, record.num_rows))
        assert errors(record, store.header.aux_layer_ids, oracle).max() < TOLERANCE
    status = ran.status
    assert status["worker"]["requests_started"] == len(ran.outputs)
    assert status["worker"]["hook_errors"] == 0


@pytest.mark.parametrize("job", ["plain", "many", "choices", "async"])
def test_every_row_equals_an_unbroken_float32_forward(ran, oracle, job):
    check(ran[job], oracle)
    assert ran[job].result["async"] is (job == "async")


def test_verify_allows_what_batches_change_and_not_a_neighbouring_layer(ran, models):
    """B22: a row depends a little on what is computed beside it; less than "equal" means, and that less than
    one layer changes."""
    alone = {record.token_ids[:-1].tobytes(): record for record in ran["alone"].store}
    spread = [
        relative(record.aux_float(), alone[record.token_ids[:-1].tobytes()].aux_float()).max()
        for record in ran["plain"].store
        if record.token_ids[:-1].tobytes() in alone
    ]
    assert len(spread) >= 7
    report = verify_shards(ran["plain"].shards, reference=models["target"], content_rows=0)
    assert not report.findings
    states = report.content["reference"]["states"]
    assert len(states) == 4
    for found in states.values():
        assert 10 * max(spread) < found["allowed"] < found["nearest_other_error"] / 10


@pytest.mark.parametrize("fault", ["layer off by one", "shifted token", "missing norm"])
def test_a_planted_fault_fails_the_same_check(ran, oracle, fault):
    store = ran["plain"].store
    for record in store:
        if record.num_rows > 1:
            assert errors(record, store.header.aux_layer_ids, oracle, fault).max() > 100 * TOLERANCE


def test_greedy_answers_are_the_same_with_and_without_the_tap(ran):
    on, off = ran["plain"], ran["off"]
    assert on.outputs == off.outputs
    assert len(on.outputs) > 15


def test_the_tap_takes_nothing_of_the_engines_cache(ran):
    """B43: its states lie beside the KV cache, which a plugin could cost most of its room."""
    on, off = ran["plain"].result["num_cache_blocks"], ran["off"].result["num_cache_blocks"]
    assert on == off > 100


def test_asynchronous_scheduling_changes_no_answer_and_its_overrun_steps_leave_no_row(ran):
    """The next step is scheduled before it is known that a request has ended."""
    on, off = ran["async"], ran["plain"]
    assert on.outputs == off.outputs
    assert on.status["worker"]["rows"] > off.status["worker"]["rows"]
    needed = sum(len(o["prompt"] + o["tokens"]) - 1 for o in on.outputs)
    for writer in (on.final["writer"], off.final["writer"]):
        assert writer["rows_stored"] + writer["rows_reused"] == needed


def test_every_finish_reason_is_the_engines(ran):
    for job in ("plain", "choices", "async"):
        want = sorted((len(o["prompt"] + o["tokens"]), o["finish_reason"]) for o in ran[job].outputs)
        assert sorted((r.num_tokens, r.meta.finish_reason) for r in ran[job].store) == want


def test_prefix_hits_are_not_stored_twice(ran):
    """The phases `hits` send one prompt of 600 tokens four times, cut or longer; their rows are shared."""
    records = [r for r in ran["plain"].store if r.num_tokens > 512]
    assert len(records) == 4
    assert len({r.token_ids[:512].tobytes() for r in records}) == 1
    assert len({r.meta.pieces[0].block for r in records}) == 1
    assert ran["plain"].final["writer"]["gap_rows"] == 0


def test_the_reported_dedupe_ratio_is_that_of_the_stored_rows(ran):
    """Counted once more from the records: rows that they use, and rows that lie in the shards for them."""
    used, stored = 0, set()
    for record in ran["plain"].store:
        for piece in record.meta.pieces:
            rows = range(piece.row_start, piece.row_stop)
            used += len(rows)
            stored |= {(piece.block, row) for row in rows}
    (status,) = StatusReader(ran["plain"].shards).read()
    assert status.to_json()["dedupe_fraction"] == pytest.approx(1 - len(stored) / used)
    assert status.to_json()["dedupe_fraction"] > 0.2


def test_preempted_requests_are_whole(ran, oracle):
    assert ran["crowd"].counter("vllm:num_preemptions") > 0
    check(ran["crowd"], oracle)


@pytest.mark.parametrize("job", ["ngram", "eagle-same", "eagle-other", "eagle-few", "twin", "async-twin"])
def test_a_drafter_may_be_at_work(ran, oracle, job):
    refusal = re.search(
        "Model Runner V2 does not yet support: speculative method.*'", ran[job].result.get("error", "")
    )
    if refusal:
        pytest.skip(f"vLLM: {refusal[0]}")
    check(ran[job], oracle)
    assert ran[job].result["async"] is (job == "async-twin")
    alone = ran["few" if job in ("ngram", "eagle-few") else "plain"].outputs[-len(ran[job].outputs) :]
    assert [o["tokens"] for o in ran[job].outputs] == [o["tokens"] for o in alone]
    if job not in ("eagle-same", "eagle-other"):  # those are random: nothing of theirs is accepted
        assert ran[job].counter("vllm:spec_decode_num_accepted_tokens") > 20
    drafted = ran[job].counter("vllm:spec_decode_num_draft_tokens")
    assert drafted > ran[job].counter("vllm:spec_decode_num_accepted_tokens")  # some were rejected


def test_the_drafter_proposes_what_it_would_without_the_tap(ran):
    on, off = ran["eagle-other"], ran["eagle-other-off"]
    assert len(on.result["proposals"]) > 20
    assert on.result["proposals"] == off.result["proposals"]
    assert on.outputs == off.outputs
    for name in ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"):
        assert on.counter(name) == off.counter(name)
