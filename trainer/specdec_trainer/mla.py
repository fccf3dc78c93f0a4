"""The ``kimik2`` drafter layer: DeepSeek-V3's latent attention with a dense MLP.

Serving keeps one latent vector a token; in training the latent is expanded to ordinary heads, which gives
the same numbers. Rotary pairs are interleaved (entries 2i and 2i + 1), and yarn scales both the rotation
(``mscale`` over ``mscale_all_dim``) and the softmax (``mscale_all_dim`` squared).

Source: the arithmetic of vLLM's ``DeepseekV2MLAAttention`` and ``DeepseekScalingRotaryEmbedding``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from .layers import EngineNames, Layer, project
from .norm import RMSNorm
from .rope import Rope

if TYPE_CHECKING:
    from .model import DraftConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Sizes of latent attention; names as in DeepSeek and Kimi configs."""

    q_lora_rank: int | None
    """Width of the query's latent; None projects queries directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Part of a query or key head that is not rotated."""
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


KIMI_K2 = LatentShape(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
"""Of Kimi-K2, K2.5 and DeepSeek-V3."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1``: corrects magnitudes for a context stretched by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def latent_rope(rope: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Rotation settings of latent attention and the factor on its scores.

    Args:
        rope: What ``rope.rope_parameters`` returned.

    Returns:
        ``(settings for Rope, factor)``; the factor multiplies ``qk_head_dim ** -0.5``.

    Raises:
        ConfigError: vLLM would take this rope for yarn.
    """
    kind = rope["rope_type"]
    if kind == "default":
        return dict(rope), 1.0
    if kind != "yarn":
        raise ConfigError(
            f"rope_type is {kind!r}, and vLLM rotates latent attention with 'yarn' or 'default' only; train "
            "a llama drafter for this target"
        )
    factor = float(rope["factor"])
    all_dim = yarn_mscale(factor, float(rope.get("mscale_all_dim", 0.0)))
    ratio = yarn_mscale(factor, float(rope.get("mscale", 1.0))) / all_dim
    return {**rope, "attention_factor": ratio, "truncate": True}, all_dim**2


class LatentAttention(nn.Module):
    """Projections of one latent attention block."""

    def __init__(self, config: DraftConfig, shape: LatentShape, input_size: int) -> None:
        super().__init__()
        heads, eps = config.num_heads, config.rms_norm_eps
        if shape.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, heads * shape.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, shape.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(shape.q_lora_rank, heads * shape.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            input_size, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * shape.v_head_dim, config.hidden_size, bias=False)


class KimiK2Layer(Layer):
    """Latent attention with a dense MLP; the first layer reads the embedding beside the state."""

    engine = EngineNames("kimi_k2", "Eagle3DeepseekV3ForCausalLM", norm_before_fc=False)

    def __init__(self, config: DraftConfig, index: int, rope: Rope) -> None:
        super().__init__(config, index)
        assert config.latent is not None, "DraftConfig checks this"
        self.shape = config.latent
        self.self_attn = LatentAttention(config, self.shape, self.input_size)
        self.num_heads = self.num_kv_heads = config.num_heads
        self.scale = self.shape.qk_head_dim**-0.5 * latent_rope(config.rope)[1]
        self.rope = rope

    @staticmethod
    def rope_for(config: DraftConfig) -> Rope:
        """Rotation of the rotated part of query and key heads."""
        assert config.latent is not None, "DraftConfig checks this"
        return Rope(config.latent.qk_rope_head_dim, latent_rope(config.rope)[0], interleaved=True)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        attention, shape = self.self_attn, self.shape
        if shape.q_lora_rank is None:
            q = project(x, attention.q_proj)
        else:
            q = project(attention.q_a_layernorm(project(x, attention.q_a_proj)), attention.q_b_proj)
        q = q.unflatten(-1, (self.num_heads, shape.qk_head_dim))
        plain, rotated = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
        return torch.cat((plain, self.rope.apply(rotated, positions)), -1)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention, shape = self.self_attn, self.shape
        latent, rotated = project(x, attention.kv_a_proj_with_mqa).split(
            (shape.kv_lora_rank, shape.qk_rope_head_dim), -1
        )
        expanded = project(attention.kv_a_layernorm(latent), attention.kv_b_proj)
        plain, values = expanded.unflatten(-1, (self.num_heads, -1)).split(
            (shape.qk_nope_head_dim, shape.v_head_dim), -1
        )
        # All heads share one rotated key.
        shared = self.rope.apply(rotated[:, None, :], positions).expand(-1, self.num_heads, -1)
        return torch.cat((plain, shared), -1), values
