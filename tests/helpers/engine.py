"""Runs offline vLLM engines, with the tap or without, in one child process, and returns what they said.

A child process because vLLM never gives back all of its memory. One child for several engines because most of
the start of a tiny engine is the import of vLLM: the first costs 10 s, each further one 3 s.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT_S = 480.0
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}


@dataclass(kw_only=True)
class Job:
    """One engine to start, and the prompts to send to it, all at once."""

    model: Path
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    shards: Path | None = None
    """Folder for the tap; None runs without it."""
    tap: Mapping[str, Any] = field(default_factory=dict)
    """More settings of the tap."""
    max_tokens: int = 16
    """Response length in tokens, the same for all; end-of-sequence tokens are ignored."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM`` on top of ``ENGINE``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that vLLM reads when this engine starts."""
    drafts: Path | None = None
    """Safetensors file for what the drafter was given after each prompt and what it proposed; prompts are
    then sent one at a time. ``read_drafts`` reads it."""


@dataclass(kw_only=True)
class Answer:
    """What one engine said."""

    error: str | None = None
    """Type and message of the exception that ended its start; None if it ran."""
    responses: list[list[int]] = field(default_factory=list)
    """Response token ids, in the order of the prompts."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Counters ``vllm:spec_decode_*``; the per-position one is a list."""
    log: str = ""
    """What the child printed, all engines together."""

    @property
    def acceptance_length(self) -> float:
        """Tokens for each step of the target, its own one included."""
        accepted = self.metrics["vllm:spec_decode_num_accepted_tokens"]
        return 1 + (accepted or 0) / self.metrics["vllm:spec_decode_num_drafts"]


def runner_env(runner: str, *folders: Path) -> dict[str, str]:
    """Environment variables that make vLLM use one of its model runners on a CPU.

    Triton's kernels are interpreted, which is slow, for the V2 runner, and in vLLM 0.30 for V1 too: its
    rejection sampler is such a kernel.

    Args:
        runner: ``v1`` or ``v2``.
        folders: More folders for ``PYTHONPATH``.
    """
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"}
    if runner == "v2" or version("vllm").startswith("0.30."):
        env["TRITON_INTERPRET"] = "1"
        folders = (*folders, TESTS / "helpers" / "triton_cpu")
    else:
        env["TRITON_BACKENDS_IN_TREE"] = "1"
    before = os.environ.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *([before] if before else [])])
    return env


def run_engines(
    jobs: Sequence[Job], *, runner: str = "v1", env: Mapping[str, str] | None = None
) -> list[Answer]:
    """Run the jobs one after the other and return their answers in the same order.

    Args:
        jobs: At least one.
        runner: ``v1`` or ``v2`` (with Triton interpreted: slow).
        env: More environment variables.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_TAP")}
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **runner_env(runner, TESTS),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="specdec-tap-engine-") as folder:
        job_file, out_file = Path(folder) / "jobs.json", Path(folder) / "answers.jsonl"
        job_file.write_text(json.dumps([asdict(job) for job in jobs], default=_plain))
        done = subprocess.run(
            [sys.executable, "-m", "helpers.engine", str(job_file), str(out_file)],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=folder,
        )
        lines = out_file.read_text().splitlines() if out_file.is_file() else []
    answers = [Answer(**json.loads(line), log=done.stdout) for line in lines]
    lost = f"the process ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return answers + [Answer(error=lost, log=done.stdout) for _ in jobs[len(answers) :]]


def wait_for_records(shards: Path, count: int, *, timeout_s: float = 60.0) -> Any:
    """Open ``shards`` once the writer, which outlives the engine, has stored ``count`` records."""
    from specdec_tap.errors import SpecdecTapError
    from specdec_tap.shards import open_shards

    deadline = time.monotonic() + timeout_s
    store, problem = None, "no shard yet"
    while time.monotonic() < deadline:
        try:
            store = open_shards(shards)
            problem = f"{len(store)} records"
            if len(store) >= count and not list(shards.glob("*/*.open")):
                return store
        except SpecdecTapError as err:
            problem = str(err)
        time.sleep(0.1)
    raise AssertionError(f"{shards} has {problem} after {timeout_s:.0f} s; expected {count} records, sealed")


def read_drafts(path: Path) -> list[dict[str, Any]]:
    """Read what ``Job.drafts`` wrote: for each prompt ``tokens [T]``, ``states [T, A * H]``, ``next [1]``
    (the token sampled after the prompt) and ``drafts [1, K]``."""
    from safetensors.torch import load_file

    out: dict[int, dict[str, Any]] = {}
    for key, value in load_file(path).items():
        index, _, name = key.partition(".")
        out.setdefault(int(index), {})[name] = value
    return [out[i] for i in sorted(out)]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else int(value)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    gc.freeze()  # an engine's start and end collect garbage ten times: of all modules, half a second each
    options = {**ENGINE, **job["engine"]}
    if job["shards"] is not None:
        tap = {"min_free_bytes": 0, **job["tap"], "dir": job["shards"]}
        options["additional_config"] = {"specdec_tap": tap}
    try:
        llm = LLM(job["model"], **options)
    except Exception as err:  # the tests compare the message, whatever its type
        traceback.print_exc()
        return {"error": f"{type(err).__name__}: {err}"}
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True)
    if job["drafts"] is not None:
        _record_drafts(llm, job, params)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    metrics = {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }
    llm.llm_engine.engine_core.shutdown()
    return {"responses": [list(output.outputs[0].token_ids) for output in outputs], "metrics": metrics}


def _record_drafts(llm: Any, job: dict[str, Any], params: Any) -> None:
    """Send the prompts one at a time and keep the drafter's first call of each: the one after the prefill."""
    from safetensors.torch import save_file

    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    propose = drafter.propose
    given_names = {"target_token_ids": "tokens", "target_hidden_states": "states", "next_token_ids": "next"}
    calls: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = {ours: kwargs[theirs].clone() for theirs, ours in given_names.items() if theirs in kwargs}
        drafts = propose(*args, **kwargs)
        calls.append({**call, "drafts": drafts.clone()})
        return drafts

    drafter.propose = recorded
    tensors = {}
    for i, prompt in enumerate(job["prompts"]):
        calls.clear()
        llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        tensors |= {f"{i}.{name}": value.contiguous() for name, value in calls[0].items()}
    drafter.propose = propose
    llm.reset_prefix_cache()
    save_file(tensors, job["drafts"])


def main() -> None:
    """Run the jobs in the file named first; append one answer a line to the file named second.

    vLLM replaces Triton kernels whenever an engine starts; done twice it would wrap its own wrappers.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    register_once = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(register_once)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        before = dict(os.environ)
        os.environ.update(job["env"])
        answer = _run(job)
        os.environ.clear()
        os.environ.update(before)
        with Path(sys.argv[2]).open("a") as file:
            file.write(json.dumps(answer) + "\n")
        gc.collect()  # drops the tap of this engine, so that its writer seals
        with contextlib.suppress(AssertionError):  # an engine that never got as far as its process groups
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
