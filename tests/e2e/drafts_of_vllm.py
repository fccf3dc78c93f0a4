"""Runs vLLM in this process and writes what its drafter was given and what it proposed.

Usage: python drafts_of_vllm.py < jobs.json. A job is an object with ``model``, ``drafter``, ``out`` (a
safetensors file), ``steps``, ``dtype`` and ``prompts`` (lists of token ids). Engines run one after another.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")


def run(job: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.freeze()  # an engine's start and end collect garbage ten times: of all modules, half a second each
    print(f"drafter {job['drafter']}", flush=True)
    llm = LLM(
        model=job["model"], dtype=job["dtype"], enforce_eager=True, max_model_len=512, max_num_seqs=4, seed=0,
        enable_prefix_caching=False, skip_tokenizer_init=True, disable_log_stats=True,
        speculative_config={
            "method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["steps"],
        },
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    is_v2 = hasattr(runner, "speculator")
    drafter = runner.speculator if is_v2 else runner.drafter
    propose = drafter.propose
    calls: list[dict[str, torch.Tensor]] = []

    def recorded(*args, **kwargs):
        given = given_to_v2(propose, *args, **kwargs) if is_v2 else given_to_v1(kwargs)
        given = {name: value.clone() for name, value in given.items()}
        drafts = propose(*args, **kwargs)
        calls.append({**given, "drafts": drafts.clone()})
        return drafts

    drafter.propose = recorded
    tensors = {}
    params = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    for i, prompt in enumerate(job["prompts"]):
        calls.clear()
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        # The first call follows the prefill: the whole prompt and the first sampled token.
        for name, value in calls[0].items():
            tensors[f"{i}.{name}"] = value.contiguous()
    save_file(tensors, job["out"])
    core.shutdown()
    del llm, core, runner, drafter
    gc.collect()
    cleanup_dist_env_and_memory()


def given_to_v1(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": kwargs["target_token_ids"],
        "aux": kwargs["target_hidden_states"],
        "next": kwargs["next_token_ids"],
    }


def given_to_v2(propose: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The same of the V2 runner, whose tables have a row for each request that it could hold."""
    import torch

    given = inspect.signature(propose).bind(*args, **kwargs).arguments
    batch = given["input_batch"]
    return {
        "tokens": batch.input_ids[: batch.num_tokens],
        "aux": torch.cat(given["aux_hidden_states"], dim=-1)[: batch.num_tokens],
        "next": given["last_sampled"][batch.idx_mapping.long()].flatten(),
    }


if __name__ == "__main__":
    for job in json.load(sys.stdin):
        run(job)
