"""Runs vLLM in this process and writes what its drafter was given and what it proposed.

Usage: python drafts_of_vllm.py MODEL DRAFTER OUT.safetensors STEPS DTYPE < prompts.json (lists of token ids)
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")


def main(model: str, drafter: str, out: str, steps: int, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    prompts = json.load(sys.stdin)
    llm = LLM(
        model=model, dtype=dtype, enforce_eager=True, max_model_len=512, max_num_seqs=4, seed=0,
        enable_prefix_caching=False, skip_tokenizer_init=True, disable_log_stats=True,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": steps},
    )  # fmt: skip
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    propose = runner.drafter.propose
    calls: list[dict[str, torch.Tensor]] = []

    def recorded(*args, **kwargs):
        given = {
            "tokens": kwargs["target_token_ids"].clone(),
            "aux": kwargs["target_hidden_states"].clone(),
            "next": kwargs["next_token_ids"].clone(),
        }
        drafts = propose(*args, **kwargs)
        calls.append({**given, "drafts": drafts.clone()})
        return drafts

    runner.drafter.propose = recorded
    tensors = {}
    for i, prompt in enumerate(prompts):
        calls.clear()
        llm.generate({"prompt_token_ids": prompt},
        SamplingParams(max_tokens=2, temperature=0, detokenize=False),
                     use_tqdm=False)  # fmt: skip
        # The first call follows the prefill: the whole prompt and the first sampled token.
        for name, value in calls[0].items():
            tensors[f"{i}.{name}"] = value.contiguous()
    save_file(tensors, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
