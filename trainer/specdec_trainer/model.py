"""The EAGLE-3 draft model: one or a few Llama layers over the target's states and the next token.

The computation follows vLLM's ``Eagle3LlamaForCausalLM`` step by step (which norm feeds which residual,
what is fed back), since a drafter is only as good as what the engine makes of its weights. Parameters are
float32 masters; the products run in ``compute_dtype``. Parameter names are those of the exported checkpoint.

Shapes: n rows, H hidden size, A aux layers, h query heads, kv key heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from .drafter import Chains, Drafter, init_weights
from .layers import LlamaLayer, Qwen3Layer, project
from .mla import KimiK2Layer, LatentShape
from .norm import RMSNorm
from .ttt import propose, unroll

if TYPE_CHECKING:
    from .batch import Batch

__all__ = ["LAYERS", "DraftConfig", "Eagle3Drafter", "init_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Everything that decides the shape and the arithmetic of a draft model."""

    layer: str = "llama"
    """Kind of decoder layer; a name in ``LAYERS``."""
    hidden_size: int
    """Of the drafter; equal to the target's, whose embedding and head it shares."""
    num_layers: int = 1
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """Normalised rope settings (see ``rope.rope_parameters``)."""
    max_position_embeddings: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Layers whose residual stream is the input, ascending, vLLM's convention."""
    norm_before_residual: bool = False
    """The residual starts from the normed state instead of the raw one."""
    norm_before_fc: bool = False
    """One RMS norm over the concatenated aux states."""
    fc_norm: bool = False
    """One RMS norm for each aux state."""
    norm_output: bool = False
    """The next draft step gets the state after the final norm instead of before it."""
    attention_bias: bool = False
    mlp_bias: bool = False
    latent: LatentShape | None = None
    """Sizes of latent attention; only for layer kimik2, whose heads have no other sizes."""
    algorithm: str = "eagle3"
    """A name in ``algorithms.ALGORITHMS``."""
    draft_steps: int = 0
    """Tokens that the weights are made for, where that is part of the shape (Medusa's heads)."""
    mask_token_id: int | None = None
    """Token whose embedding stands for an unknown one (P-EAGLE)."""
    target_layers: int = 0
    """Decoder layers of the target (facts for the model card and the export)."""

    def __post_init__(self) -> None:
        problems = []
        if self.layer not in LAYERS:
            problems.append(f"layer is {self.layer!r}; expected one of {sorted(LAYERS)}")
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads {self.num_heads}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            problems.append(
                f"draft_vocab_size is {self.draft_vocab_size:,} but the target vocabulary has "
                f"{self.vocab_size:,}; "
                f"choose 1 to {self.vocab_size:,}"
            )
        if self.norm_before_fc and self.fc_norm:
            problems.append("norm_before_fc and fc_norm are both set; choose one, the engines apply only one")
        problems += self._layer_problems()
        if self.num_layers < 1:
            problems.append(f"num_layers is {self.num_layers}; expected at least 1")
        if list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            problems.append(f"aux_layer_ids is {list(self.aux_layer_ids)}; expected distinct ascending ids")
        if problems:
            raise ConfigError("; ".join(problems))

    def _layer_problems(self) -> list[str]:
        """What this kind of layer cannot have."""
        if self.layer != "kimik2":
            return []
        problems = [
            f"{name} is set, which vLLM's drafter for layer kimik2 does not have; turn it off"
            for name in ("norm_before_fc", "attention_bias", "mlp_bias")
            if getattr(self, name)
        ]
        if self.latent is None:
            problems.append("layer kimik2 has no latent sizes; set latent")
        return problems


LAYERS: dict[str, type] = {"llama": LlamaLayer, "qwen3": Qwen3Layer, "kimik2": KimiK2Layer}
"""Decoder layers by name."""


class Eagle3Drafter(Drafter):
    """Fuses the target's aux states, reads the next token, predicts the one after it."""

    title = "EAGLE-3"
    method = "eagle3"

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        names = [*(config.get("architectures") or []), config.get("speculators_model_type")]
        return any("eagle3" in str(name).lower() for name in names)

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        if not config.aux_layer_ids:
            raise ConfigError(f"aux_layer_ids is empty; {self.title} reads at least one captured layer")
        super().__init__(config, compute_dtype)
        size, num_aux = config.hidden_size, len(config.aux_layer_ids)
        kind = LAYERS[config.layer]
        rope = kind.rope_for(config)
        self.fc = nn.Linear(num_aux * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(num_aux))
        self.layers = nn.ModuleList(kind(config, i, rope) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def chains(self, batch: Batch, steps: int) -> Chains:
        return unroll(self, batch, steps)

    def propose(self, states: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
        return propose(self, states, tokens, steps=steps, first_position=first_position)

    def combine(self, states: Tensor) -> Tensor:
        """First-step input ``[n, H]`` from aux states ``[n, A, H]``."""
        x = states.to(self.compute_dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x.flatten(1))
        elif self.config.fc_norm:
            x = torch.stack([norm(x[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        if self.input_dropout and self.training:
            x = F.dropout(x, self.input_dropout)
        return project(x.flatten(1), self.fc)

    def feed(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """State and embedding of the next draft step, from the last step's state and the token drafted."""
        return state, self.embed(tokens)

    def finish(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(state for the head, state fed to the next draft step)``, both ``[n, H]``."""
        stream = residual + hidden
        normed = self.norm(stream)
        return normed, normed if self.config.norm_output else stream
