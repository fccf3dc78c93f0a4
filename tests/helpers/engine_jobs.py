"""Runs vLLM engines one after another in one process, with and without the tap, and notes what they did.

``python engine_jobs.py JOBS.json OUT.json``. A job is an object with ``name``, ``model``, ``llm`` (arguments
of ``LLM``), ``tap`` (settings of the tap; null: no tap) and ``phases``. A phase has ``prompts`` (token ids),
``params`` (one object for all, or one each), perhaps also ``lora`` (name, number, folder), ``priority`` (one
number each), ``embeds`` (lengths of prompts that are embeddings) and, done before the prompts,
``reset_prefix_cache`` or ``rpcs`` (calls to the workers: name and arguments). With ``after`` the prompts are
the previous phase's prompts and answers, each with these tokens behind. With ``async`` the engine schedules
asynchronously, which vLLM's CPU platform would turn off. The environment picks the runner. An engine that
cannot be made gives ``error``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines come and go in one process


def run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    gc.freeze()  # an engine's start and end collect garbage ten times: of all modules, half a second each
    for name in [name for name in os.environ if name.startswith("SPECDEC_TAP")]:
        del os.environ[name]
    for name, value in (job["tap"] or {}).items():
        os.environ[f"SPECDEC_TAP_{name.upper()}"] = value if isinstance(value, str) else json.dumps(value)
    try:
        with asynchronous() if job.get("async") else contextlib.nullcontext():
            llm = LLM(job["model"], skip_tokenizer_init=True, disable_log_stats=False, **job["llm"])
    except Exception as err:  # what a refusal says is what the test wants to know
        cleanup_dist_env_and_memory()
        return {"error": f"{type(err).__name__}: {err}", "rss_bytes": rss_bytes()}
    core = llm.llm_engine.engine_core.engine_core
    driver = getattr(core.model_executor, "driver_worker", None)
    proposals = [] if driver is None else watch_drafter(driver.worker.model_runner)
    outputs: list[dict[str, Any]] = []
    last = 0
    growth = []
    for phase in job["phases"]:
        with contextlib.suppress(OSError):  # not every kernel forgets a peak
            Path("/proc/self/clear_refs").write_text("5")
        before = rss_bytes()
        if phase.get("reset_prefix_cache"):
            llm.reset_prefix_cache()
        for name, kwargs in phase.get("rpcs", []):
            llm.collective_rpc(name, kwargs=kwargs)
        if "after" in phase:
            prompts = [
                {"prompt_token_ids": [*o["prompt"], *o["tokens"], *phase["after"]]} for o in outputs[-last:]
            ]
        else:
            prompts = [{"prompt_token_ids": ids} for ids in phase.get("prompts", [])]
        hidden = core.vllm_config.model_config.get_hidden_size()
        prompts += [{"prompt_embeds": torch.randn(length, hidden)} for length in phase.get("embeds", [])]
        last = len(prompts)
        params = phase["params"]
        params = params if isinstance(params, list) else [params] * len(prompts)
        made = [SamplingParams(**{"temperature": 0.0, "detokenize": False} | p) for p in params]
        lora = LoRARequest(*phase["lora"]) if phase.get("lora") else None
        for output in llm.generate(
            prompts, made, use_tqdm=False, lora_request=lora, priority=phase.get("priority")
        ):
            for choice in output.outputs:
                outputs.append(
                    {
                        "id": output.request_id,
                        "prompt": output.prompt_token_ids or [],
                        "tokens": list(choice.token_ids),
                        "finish_reason": choice.finish_reason,
                        "logprobs": choice.cumulative_logprob,
                        "lora": phase["lora"][0] if phase.get("lora") else None,
                    }
                )
        growth.append(peak_bytes() - before)
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    statuses = llm.collective_rpc("specdec_tap_status") if job["tap"] else []
    num_blocks = core.scheduler.kv_cache_config.num_blocks
    core.shutdown()
    result = {
        "outputs": outputs,
        "proposals": proposals,
        "counters": counters,
        "async": core.vllm_config.scheduler_config.async_scheduling,
        "num_cache_blocks": num_blocks,
        "peak_growth_bytes": growth,  # of each phase
        "statuses": statuses,  # of every rank; None where nothing is captured
    }
    del llm, core, driver
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def asynchronous() -> Any:
    """Let an engine that is made meanwhile schedule its next step before the last one's tokens are known."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def keep_asynchronous(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    return mock.patch.object(platform, "check_and_update_config", staticmethod(keep_asynchronous))


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Most resident memory of this process since it was last forgotten."""
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def watch_drafter(runner: Any) -> list[Any]:
    """Record everything that the server's own drafter proposes."""
    proposals: list[Any] = []
    for name in ("drafter", "speculator"):
        drafter = getattr(runner, name, None)
        if drafter is None:
            continue
        propose = drafter.propose

        def recording(*args: Any, propose: Any = propose, **kwargs: Any) -> Any:
            result = propose(*args, **kwargs)
            ids = result[0] if isinstance(result, tuple) else result
            proposals.append(ids.tolist() if hasattr(ids, "tolist") else ids)
            return result

        drafter.propose = recording
    return proposals


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for number, job in enumerate(jobs):
        begin = time.monotonic()
        results[job["name"]] = run(job)
        print(f"--- job {number}: {job['name']} took {time.monotonic() - begin:.1f} s", flush=True)
        Path(sys.argv[2]).write_text(json.dumps(results))
