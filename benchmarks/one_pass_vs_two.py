"""From prompts to a complete feature set: the tap in one pass, against the two-pass ways.

(a) the tap, during generation; (b) generation, then vLLM's own ``extract_hidden_states`` over prompt and
answer; (c) generation, then a Hugging Face forward over both. Every way ends when its features are on the
disk. Each runs in a process of its own; engine starts are left out of the times and given beside them. On a
CPU, vLLM's connector is patched where it asks for pinned memory and CUDA events, and nowhere else.

Chats stand behind a system prompt of ``--system-tokens`` tokens, as they do in production: the tap stores its
blocks once, the other ways once a request. Prefix caching is on in all of them.

    python benchmarks/one_pass_vs_two.py MODEL --requests 96 --max-tokens 128
    python benchmarks/one_pass_vs_two.py MODEL --system-tokens 0   # every prompt alone
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dedupe import system_prompt

from specdec_tap.prompts import iterate_prompts
from specdec_tap.vllm_plugin.runner_common import plan_of

PHASES = ("tap", "generate", "extract", "hf")


def make_llm(args: argparse.Namespace, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        args.model, max_model_len=2048, max_num_seqs=args.concurrency, enforce_eager=args.eager,
        disable_log_stats=True, **more,
    )  # fmt: skip


def prompts_of(args: argparse.Namespace, llm: Any) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    texts = itertools.islice((p["turns"][0] for p in iterate_prompts(args.seed)), args.requests)
    system = []
    if args.system_tokens:
        system = [{"role": "system", "content": system_prompt(tokenizer, args.system_tokens)}]
    chats = ([*system, {"role": "user", "content": text}] for text in texts)
    return [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)[:1024] for c in chats
    ]


def generate(
    args: argparse.Namespace, llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def run_generation(args: argparse.Namespace, folder: Path, tap: bool) -> dict[str, Any]:
    """Ways (a), and the first pass of (b) and (c)."""
    begin = time.perf_counter()
    llm = make_llm(args)
    prompts = prompts_of(args, llm)
    generate(args, llm, [prompts[0][:8]], 4)
    started = time.perf_counter()
    outputs = generate(args, llm, prompts, args.max_tokens)
    generated = time.perf_counter()
    if tap:
        # What the end of the engine does, without the rest of it: the writer seals what it holds.
        model_runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        plan_of(model_runner).tap.close()
        while list((folder / "shards").glob("*/*.open")):
            time.sleep(0.005)
    ended = time.perf_counter()
    sequences = [list(output.prompt_token_ids) + list(output.outputs[0].token_ids) for output in outputs]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    return {"start_s": started - begin, "work_s": ended - started, "generate_s": generated - started}


def run_extract(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The second pass of (b): vLLM computes every prompt + answer again and saves its states."""
    import torch

    sequences = json.loads((folder / "sequences.json").read_text())
    config = json.loads((Path(args.model) / "config.json").read_text())
    layers = config["num_hidden_layers"]
    ids = [2, layers // 2, layers - 3, layers]
    out = folder / "extracted"
    out.mkdir()
    begin = time.perf_counter()
    llm = make_llm(
        args,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(out), "use_synchronization_lock": False},
        },
    )  # fmt: skip
    if not torch.cuda.is_available():
        patch_for_cpu()  # now: the engine's own start puts other stand-ins there

    def extract(prompts: Sequence[Sequence[int]]) -> None:
        generate(args, llm, prompts, 1)
        while len(list(out.glob("*.safetensors"))) < len(prompts):
            llm.llm_engine.step()  # a request is saved in the step after its last one

    extract([sequences[0][:8]])
    for path in out.glob("*.safetensors"):
        path.unlink()
    started = time.perf_counter()
    # The last token is never fed in a serving run, so its state is not needed here either.
    extract([ids[:-1] for ids in sequences])
    return {"start_s": started - begin, "work_s": time.perf_counter() - started}


def patch_for_cpu() -> None:
    """Stand-ins for the CUDA streams and events that the connector orders its copies with."""
    import torch

    class Done:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def record(self, *args: Any) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return True

        def wait_event(self, event: Any) -> None: ...

    empty_like: Callable[..., Any] = torch.empty_like

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return empty_like(*args, **kwargs)

    torch.cuda.Event = torch.cuda.Stream = Done
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.empty_like = pageable


def run_hf(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The second pass of (c): one forward per sequence, features saved as the others save them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    sequences = json.loads((folder / "sequences.json").read_text())
    out = folder / "hf"
    out.mkdir()
    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval().to(device)
    layers = model.config.num_hidden_layers
    started = time.perf_counter()
    with torch.inference_mode():
        for number, ids in enumerate(sequences):
            states = model.model(torch.tensor([ids[:-1]], device=device), output_hidden_states=True)
            wanted = [states.hidden_states[i][0] for i in (2, layers // 2, layers - 3)]
            rows = torch.stack([*wanted, states.last_hidden_state[0]], dim=1).cpu()
            save_file({"hidden_states": rows, "token_ids": torch.tensor(ids)}, out / f"{number}.safetensors")
    return {"start_s": started - begin, "work_s": time.perf_counter() - started}


def run_phase(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if args.phase in ("tap", "generate"):
        result = run_generation(args, folder, args.phase == "tap")
    else:
        result = {"extract": run_extract, "hf": run_hf}[args.phase](args, folder)
    (folder / f"{args.phase}.json").write_text(json.dumps(result))
    return 0


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("--system-tokens", type=int, default=150, help="of the system prompt (150)")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.phase:
        return run_phase(args)
    with tempfile.TemporaryDirectory(prefix="specdec-tap-one-pass-") as name:
        folder = Path(name)
        times = {}
        for phase in PHASES:
            env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SPECDEC_TAP": "off"}
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
            if phase == "tap":
                del env["SPECDEC_TAP"]
                env["SPECDEC_TAP_DIR"] = str(folder / "shards")
            # Both runners of vLLM generate; only the first one has the extraction on a CPU.
            env.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
            command = [sys.executable, __file__, *(argv or sys.argv[1:]), "--phase", phase, "--folder", name]
            with (folder / f"{phase}.log").open("w") as log:
                done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT)
            if done.returncode:
                print((folder / f"{phase}.log").read_text()[-3000:], file=sys.stderr)
                return 1
            times[phase] = json.loads((folder / f"{phase}.json").read_text())
            print(f"{phase}: {times[phase]}", file=sys.stderr, flush=True)
        sequences = json.loads((folder / "sequences.json").read_text())
        one = times["tap"]["work_s"]
        two = {way: times["generate"]["work_s"] + times[way]["work_s"] for way in ("extract", "hf")}
        shards = sum(path.stat().st_size for path in (folder / "shards").glob("*/0*.safetensors"))
        result = {
            "model": Path(args.model).name,
            "requests": len(sequences),
            "tokens": sum(map(len, sequences)),
            "system_tokens": args.system_tokens,
            "time_ratio_extract": round(two["extract"] / one, 3),
            "time_ratio_hf": round(two["hf"] / one, 3),
            "bytes_ratio_extract": round(shards / bytes_in(folder / "extracted"), 3),
            "bytes_ratio_hf": round(shards / bytes_in(folder / "hf"), 3),
            "tap_overhead_ratio": round(one / times["generate"]["work_s"], 3),
            "time_ratio_extract_with_starts": round(
                (two["extract"] + times["generate"]["start_s"] + times["extract"]["start_s"])
                / (one + times["tap"]["start_s"]),
                3,
            ),
            "seconds": {phase: round(t["work_s"], 2) for phase, t in times.items()},
        }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
