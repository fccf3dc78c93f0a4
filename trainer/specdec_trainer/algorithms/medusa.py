"""Medusa: one small residual block for each future token, all reading the target's final state.

Row t reads ``final[t]``, whose token x[t+1] the target has just chosen, and head k predicts x[t+2+k]. The
heads share the target's output rows, which stay frozen, so a head is one or two ``[H, H]`` matrices; they
start at zero, where every head repeats the target's own prediction.

Layout: vLLM's ``MedusaModel`` with ``original_lm_head`` (one ``lm_head`` for all). Its reduced vocabulary
(``token_map``) is left out: vLLM 0.32 refuses every checkpoint that has one.

Source: Medusa (arXiv:2401.10774), Medusa-1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from ..drafter import Chains, Drafter, Step
from ..layers import project
from ..model import DraftConfig


class ResidualBlock(nn.Module):
    """``x + silu(W x)``, once or a few times."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(project(x, layer))
        return x


class MedusaDrafter(Drafter):
    """Heads for the next ``draft_steps`` tokens."""

    title = "Medusa"
    method = "medusa"
    reads = "final"
    needs_context = False
    reducible = False
    fixed_steps = True
    unused = {  # noqa: RUF012  # read only
        "model_type": "llama", "intermediate_size": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-6,
    }  # fmt: skip

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        if config.draft_steps < 1:
            raise ConfigError(f"draft_steps is {config.draft_steps}; Medusa needs at least one head")
        super().__init__(config, compute_dtype)
        self.blocks = nn.ModuleList(
            ResidualBlock(config.hidden_size, config.num_layers) for _ in range(config.draft_steps)
        )

    def start(self, generator: torch.Generator) -> None:
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def chains(self, batch: Any, steps: int) -> Chains:
        states = batch.aux[batch.rows, 0].to(self.compute_dtype)
        rows = torch.arange(batch.num_supervised, device=states.device)
        keep: Tensor | None = None
        for index in range(min(steps, len(self.blocks))):
            alive = batch.run_left[rows] >= index
            if keep is not None:
                alive &= keep
            rows = rows[alive]
            if not len(rows):
                return
            x = F.dropout(states[rows], self.input_dropout, self.training)
            keep = yield Step(index, rows, self.blocks[index](x))

    def propose(self, states: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
        x = states[-1:, 0].to(self.compute_dtype)
        return torch.cat([self.best(block(x)) for block in self.blocks[:steps]])

    def summary(self, reason: str) -> str:
        return f"{self.title}, {self.config.draft_steps} heads of {self.config.num_layers} layer(s)"

    @classmethod
    def activations(cls, draft: DraftConfig, steps: int) -> int:
        return steps * draft.hidden_size * (2 * draft.num_layers + 3)

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        architecture = str((config.get("architectures") or [""])[0])
        return config.get("model_type") == "medusa" or architecture.startswith("Medusa")

    @classmethod
    def engine_config(cls, draft: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
        kept = ("hidden_size", "vocab_size", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")
        return {
            **{name: facts[name] for name in kept if name in facts},
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": draft.draft_steps,
            "num_hidden_layers": draft.num_layers,
            "original_lm_head": True,
            "medusa_fc_bias": False,
        }

    @classmethod
    def parse(cls, config: dict[str, Any]) -> dict[str, Any]:
        if (config.get("truncated_vocab_size") or config["vocab_size"]) != config["vocab_size"]:
            raise ValueError("truncated_vocab_size is below vocab_size, which this trainer does not read")
        return {"draft_steps": int(config["num_heads"])}
