"""The model card written beside an exported drafter."""

from __future__ import annotations

import json
from typing import Any

from specdec_tap._version import __version__

from .algorithms import ALGORITHMS
from .checkpoint import LoopState
from .config import TrainConfig
from .data import Survey
from .evaluate import Evaluation


def model_card(
    config: TrainConfig, facts: dict[str, Any], survey: Survey, state: LoopState,
    evaluation: Evaluation | None, target_name: str | None,
) -> str:  # fmt: skip
    """README.md of a drafter: what it is, what it was trained on, what it reaches."""
    target = target_name or "the served model"
    kind = ALGORITHMS[facts["algorithm"]]
    speculative = {
        "method": kind.method,
        "model": "THIS_FOLDER",
        "num_speculative_tokens": facts["draft_steps"] or config.eval_draft_tokens,
        **kind.serving,
    }
    lines = [
        "---",
        f"license: {config.license}"
        if config.license
        else "license: other  # must be chosen: see the licenses of the target and of the traffic",
        *([f"base_model: {target_name}"] if target_name else []),
        f"tags: [speculative-decoding, {facts['algorithm']}]",
        "---",
        "",
        f"# {kind.title} drafter for {target}",
        "",
        f"Trained by specdec-tap {__version__} on hidden states captured while {target} was serving.",
        "",
        "```",
        f"vllm serve TARGET --speculative-config '{json.dumps(speculative)}'",
        "```",
        "",
        "| | |",
        "|---|---|",
        f"| Architecture | {facts['architecture']} |",
        f"| Parameters | {facts['parameters']:,}, {facts['trainable_parameters']:,} trained |",
        f"| Draft vocabulary | {facts['draft_vocab_size']:,} of {facts['vocab_size']:,} |",
        f"| Aux layers (residual stream entering layer) | {facts['aux_layer_ids']} |"
        if kind.reads == "aux"
        else "| Input | final state, after the target's last norm |",
        f"| Training data | {survey.records:,} requests, {survey.supervised:,} supervised tokens |",
        f"| Training | {state.step:,} steps, {state.tokens:,} tokens, {config.ttt_steps} TTT steps |",
    ]
    if evaluation is not None:
        accuracy = " / ".join(f"{a:.3f}" for a in evaluation.accuracy)
        lines += [
            f"| Simulated acceptance length (held-out requests, greedy, {config.eval_draft_tokens} "
            "draft tokens) | "
            f"{evaluation.simulated_acceptance_length:.3f} |",
            f"| The same, sampled as the captured traffic was | {evaluation.sampled_acceptance_length:.3f} |",
            f"| Held-out accuracy by draft token | {accuracy} |",
        ]
    lines += [
        "",
        "Simulated acceptance length is computed from held-out captures. Measure the real one, on "
        "your own traffic, "
        "with `specdec-tap eval`.",
        "",
    ]
    return "\n".join(lines)
