"""What multi-turn traffic costs on the disk, against one raw file per request.

Two workloads go through an offline vLLM engine with the tap and prefix caching on: two-turn chats behind a
system prompt of 400 tokens, and chats of six turns. Each turn is a request with all earlier turns in its
prompt, as OpenAI clients send it. A raw file per request keeps every aux layer and a final state of every
position; a trainable token is one of an answer, and both ways have the same ones. ``bytes_fraction`` is bytes
per trainable token in the shards, divided by the same in raw files.

    python benchmarks/dedupe.py --model MODEL_DIR
    python benchmarks/dedupe.py --model MODEL_DIR --prompts mt_bench.jsonl --conversations 80

The last line of the output is one JSON object; the exit code is 1 if a fraction is above 0.25.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from specdec_tap.replay import iterate_conversations
from specdec_tap.shards import open_shards
from specdec_tap.shards.index import summarise

LIMIT = 0.25
SYSTEM_TOKENS = 400
FOLLOW_UPS = (
    "Can you give an example?",
    "Say that again in one sentence.",
    "What would somebody say who disagrees?",
    "Turn your last answer into a short list.",
    "Which part of it matters most, and why?",
)
RULES = (
    "You are the assistant of a small library.", "Answer in the language of the question.",
    "Be friendly, and never longer than needed.", "If you do not know something, say so.",
    "Name the source of a number when you give one.", "Do not talk about yourself unless you are asked.",
    "Prefer examples to definitions.", "Write plain text; use a list only where order matters.",
    "Refuse to help with anything that hurts people, and say why in one sentence.",
    "When a question is unclear, answer the most likely reading and say which one you took.",
)  # fmt: skip


def system_prompt(tokenizer: Any, num_tokens: int) -> str:
    """House rules, numbered, cut to a number of tokens."""
    text = " ".join(f"{i}. {rule}" for i, rule in enumerate(itertools.islice(itertools.cycle(RULES), 60), 1))
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:num_tokens])


def read_turns(path: Path, count: int, num_turns: int) -> list[list[str]]:
    """The first conversations of a prompt file, with follow-ups where they have too few turns."""
    chats = []
    for conversation in itertools.islice(iterate_conversations(path), count):
        turns = [*conversation.turns, *FOLLOW_UPS][:num_turns]
        chats.append(turns)
    return chats


def talk(llm: Any, chats: Sequence[Sequence[str]], system: str | None, max_tokens: int) -> None:
    """Hold the conversations, all at once, turn by turn, with the model's own answers."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    start = [] if system is None else [{"role": "system", "content": system}]
    messages: list[list[dict[str, str]]] = [list(start) for _ in chats]
    for turn in range(len(chats[0])):
        for message, chat in zip(messages, chats, strict=True):
            message.append({"role": "user", "content": chat[turn]})
        outputs = llm.chat(messages, params, use_tqdm=False)
        for message, output in zip(messages, outputs, strict=True):
            message.append({"role": "assistant", "content": output.outputs[0].text})


def measure(folder: Path) -> dict[str, Any]:
    with open_shards(folder) as store:
        s = summarise(store)
    trainable = s["response_tokens"]
    raw = s["raw_bytes_per_token"] * s["num_tokens"]
    return {
        "requests": s["num_records"],
        "trainable_tokens": trainable,
        "bytes_per_trainable_token": round(s["file_bytes"] / trainable),
        "raw_bytes_per_trainable_token": round(raw / trainable),
        "rows_shared_fraction": round(s["rows_shared_fraction"], 3),
        "gap_rows": s["gap_rows"],
        "compression_ratio": round(s["compression_ratio"], 3),
        "bytes_fraction": round(s["file_bytes"] / raw, 4),
    }


def run(args: argparse.Namespace, prompts: Path, folder: Path) -> dict[str, Any]:
    """One engine and one folder of shards for each workload."""
    from vllm import LLM

    results = {}
    for name, num_turns in (("two_turns", 2), ("six_turns", 6)):
        shards = folder / name
        begun = time.perf_counter()
        llm = LLM(
            args.model,
            max_model_len=args.max_model_len,
            max_num_seqs=args.concurrency,
            enforce_eager=args.eager,
            enable_prefix_caching=True,
            additional_config={"specdec_tap": {"dir": str(shards), "min_free_bytes": 0}},
        )
        system = system_prompt(llm.get_tokenizer(), SYSTEM_TOKENS) if num_turns == 2 else None
        # Chats that begin alike share a prefix only by chance, as in a server.
        talk(llm, read_turns(prompts, args.conversations, num_turns), system, args.max_tokens)
        llm.llm_engine.engine_core.shutdown()
        del llm
        deadline = time.monotonic() + 120
        while list(shards.glob("*/*.open")) and time.monotonic() < deadline:
            time.sleep(0.1)
        results[name] = {**measure(shards), "seconds": round(time.perf_counter() - begun, 1)}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="chat model: a folder or a hub name")
    parser.add_argument(
        "--prompts", type=Path, help="jsonl with 'id' and 'turns' (default: the built-in set)"
    )
    parser.add_argument("--conversations", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="no compilation, for short runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specdec-tap-dedupe-") as folder:
        built_in = resources.files("specdec_tap") / "data" / "eval_prompts.jsonl"
        with resources.as_file(built_in) as path:
            results = run(args, args.prompts or path, Path(folder))
    worst = max(result["bytes_fraction"] for result in results.values())
    print(json.dumps({"bytes_fraction": worst, "limit": LIMIT, "model": Path(args.model).name, **results}))
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
