"""Compares what vLLM's drafter proposes with what the trainer proposes from the same states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specdec_trainer.export import load_drafter
from specdec_trainer.model import DraftConfig, Eagle3Drafter, init_weights
from specdec_trainer.ttt import propose

from helpers.engine import read_drafts
from specdec_tap.target import Target

STEPS = 3


def random_prompts(count: int, *, vocab: int = 320, shortest: int = 1, longest: int = 90) -> list[list[int]]:
    """Token ids from a fixed seed."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, int(rng.integers(shortest, longest))).tolist() for _ in range(count)]


def random_drafter(config: DraftConfig, *, seed: int = 1) -> Eagle3Drafter:
    """A drafter whose tokens depend on every weight, with a random draft vocabulary."""
    model = Eagle3Drafter(config)
    g = torch.Generator().manual_seed(seed)
    init_weights(model, g)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=g))
            elif name.startswith("lm_head"):
                p.copy_(torch.randn(p.shape, generator=g))
            else:
                p.copy_(1.5 * torch.randn(p.shape, generator=g) * p.shape[1] ** -0.5)
    ids = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
    model.d2t.copy_(ids - torch.arange(len(ids)))
    return model


def agreement(model: Eagle3Drafter, results: Sequence[dict[str, Any]]) -> list[float]:
    """Share of prompts whose draft token k is the same in both, for each k."""
    same = np.zeros((len(results), STEPS))
    for i, result in enumerate(results):
        states = result["states"].view(len(result["tokens"]), len(model.config.aux_layer_ids), -1)
        following = torch.cat((result["tokens"][1:].long(), result["next"].long()))
        same[i] = (propose(model, states, following, steps=STEPS) == result["drafts"][0]).numpy()
    return same.mean(0).tolist()


def check_parity(drafter: Path, target: Target, drafts: Path) -> None:
    """Every draft token of every prompt is the same, and they are not all one token."""
    model = load_drafter(drafter, compute_dtype=torch.float32)
    model.embed_weight = target.embed.torch().float()
    results = read_drafts(drafts)
    assert agreement(model, results) == [1.0] * STEPS
    assert len({int(d) for result in results for d in result["drafts"][0]}) > 10
