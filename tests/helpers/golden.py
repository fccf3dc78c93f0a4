"""Compares what vLLM's drafter proposes with what the trainer proposes from the same states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specdec_trainer.drafter import Drafter
from specdec_trainer.export import lend_tables, load_drafter
from specdec_trainer.model import DraftConfig, Eagle3Drafter

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
    g = scramble(model, seed=seed)
    ids = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
    model.d2t.copy_(ids - torch.arange(len(ids)))
    return model


def scramble(model: Drafter, *, seed: int = 1) -> torch.Generator:
    """Give every parameter random values of ordinary size; returns the generator for more of them."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=g))
            elif name.startswith("lm_head"):
                p.copy_(torch.randn(p.shape, generator=g))
            else:
                p.copy_(
                    1.5 * torch.randn(p.shape, generator=g) * (p.shape[1] ** -0.5 if p.shape[0] > 1 else 1)
                )
    return g


def agreement(model: Drafter, results: Sequence[dict[str, Any]]) -> list[float]:
    """Share of prompts whose draft token k is the same in both, for each k."""
    same = np.zeros((len(results), STEPS))
    for i, result in enumerate(results):
        states = result["states"].view(len(result["states"]), max(1, len(model.config.aux_layer_ids)), -1)
        # Medusa is given one state and no tokens; its heads need neither tokens nor context.
        tokens, sampled = result.get("tokens"), result.get("next")
        following = torch.zeros(len(states), dtype=torch.long)
        if tokens is not None and sampled is not None:
            following = torch.cat((tokens[1:].long(), sampled.long()))
        same[i] = (model.propose(states, following, steps=STEPS) == result["drafts"][0]).numpy()
    return same.mean(0).tolist()


def check_parity(drafter: Path, target: Target, drafts: Path) -> None:
    """Every draft token of every prompt is the same, and they are not all one token."""
    model = load_drafter(drafter, compute_dtype=torch.float32)
    lend_tables(model, target)
    results = read_drafts(drafts)
    assert agreement(model, results) == [1.0] * STEPS
    assert len({int(d) for result in results for d in result["drafts"][0]}) > 10
