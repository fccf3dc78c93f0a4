"""An offline vLLM engine with the tap on: ``python -m specdec_tap.vllm_plugin.offline REPLY_FD JOB``.

``specdec-tap extract --backend vllm`` runs it. A line of standard input is a batch of conversations as JSON;
each is sent as a prompt, answers included, and one token is sampled after it and left out. The reply to a
batch is one line: how many requests the tap has dropped or skipped so far, by reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from .tap import GIVEN_SPANS_KEY


def main() -> None:
    """Make the engine, then answer batches until standard input ends."""
    from vllm import LLM, SamplingParams

    replies, job = os.fdopen(int(sys.argv[1]), "w"), json.loads(sys.argv[2])
    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        additional_config={"specdec_tap": job["tap"]},
        disable_log_stats=False,
        **job["engine"],
    )
    for line in sys.stdin:
        batch: list[dict[str, Any]] = json.loads(line)
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                extra_args={GIVEN_SPANS_KEY: ",".join(f"{a}-{b}" for a, b in chat["spans"])},
            )
            for chat in batch
        ]
        run(llm, batch, params)
        replies.write(json.dumps(left_out(llm)) + "\n")
        replies.flush()
    llm.llm_engine.engine_core.shutdown()


def run(llm: Any, batch: list[dict[str, Any]], params: list[Any]) -> None:
    """Send a batch under the conversations' own ids, so that a record can be told from another."""
    engine = llm.llm_engine
    for chat, one in zip(batch, params, strict=True):
        engine.add_request(chat["id"], {"prompt_token_ids": chat["token_ids"]}, one)
    while engine.has_unfinished_requests():
        engine.step()


def left_out(llm: Any) -> Counter[str]:
    """How many requests were dropped or skipped so far, over all ranks, by counter."""
    total: Counter[str] = Counter()
    for status in llm.collective_rpc("specdec_tap_status"):
        for side in ("worker", "writer") if status is not None else ():
            for name, value in status.get(side, {}).items():  # a worker that failed says only why
                if name.startswith(("dropped_", "skipped_")) and value:
                    total[name] += value
    return total


if __name__ == "__main__":
    main()
