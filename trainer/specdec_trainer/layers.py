"""Decoder layers of a drafter. Which exist is ``LAYERS``; another one is a class with this interface.

Shapes: n rows, H hidden size, h query heads, kv key heads, d size of a query or key head, e of a value head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import tiles
from .norm import RMSNorm
from .rope import Rope

if TYPE_CHECKING:
    from .model import DraftConfig


class DraftLayer(Protocol):
    """What a decoder layer must offer; attention itself is the caller's, so any step layout can use it."""

    num_kv_heads: int
    scale: float
    engine: ClassVar[EngineNames]

    def enter(self, embeds: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(input of the projections, residual)``."""

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries ``[n, h, d]``."""

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys ``[n, kv, d]`` and values ``[n, kv, e]``."""

    def leave(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)`` after output projection and MLP; their sum is the residual stream."""


@dataclass(frozen=True, slots=True)
class EngineNames:
    """What vLLM calls a drafter made of these layers."""

    model_type: str
    architecture: str
    norm_before_fc: bool = True
    """Whether vLLM's class for them has the norm over the concatenated aux states."""


class Layer(nn.Module):
    """What all layers share: two norms before attention in the first one, and the residual stream."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.first = index == 0
        self.input_size = 2 * size if self.first else size
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        if self.first:
            self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual
        self.dropout = 0.0

    def enter(self, embeds: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.first:
            assert residual is not None, "layers after the first continue a residual stream"
            residual = residual + hidden
            return self.input_layernorm(residual), residual
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), -1)
        return x, normed if self.norm_before_residual else hidden

    def leave(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self._drop(project(attended.flatten(1), self.self_attn.o_proj))
        return self._drop(self.mlp(self.post_attention_layernorm(residual))), residual

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Attention(nn.Module):
    """Projections of one attention block."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        h, kv, d, bias = config.num_heads, config.num_kv_heads, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_size, h * d, bias=bias)
        self.k_proj = nn.Linear(input_size, kv * d, bias=bias)
        self.v_proj = nn.Linear(input_size, kv * d, bias=bias)
        self.o_proj = nn.Linear(h * d, config.hidden_size, bias=bias)


class LlamaLayer(Layer):
    """Llama decoder layer; the first one reads the embedding beside the state."""

    engine = EngineNames("llama", "LlamaForCausalLMEagle3")

    def __init__(self, config: DraftConfig, index: int, rope: Rope) -> None:
        super().__init__(config, index)
        self.self_attn = Attention(config, self.input_size)
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.rope = rope

    @staticmethod
    def rope_for(config: DraftConfig) -> Rope:
        """Rotation of query and key heads; shared by all layers of a drafter."""
        return Rope(config.head_dim, config.rope)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        q = project(x, self.self_attn.q_proj).unflatten(-1, (self.num_heads, self.head_dim))
        return self.rope.apply(self.norm_query(q), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = project(x, self.self_attn.k_proj).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = project(x, self.self_attn.v_proj).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.rope.apply(self.norm_key(k), positions), v

    def norm_query(self, q: Tensor) -> Tensor:
        """What happens to queries before they are rotated."""
        return q

    def norm_key(self, k: Tensor) -> Tensor:
        """What happens to keys before they are rotated."""
        return k


class Qwen3Layer(LlamaLayer):
    """Llama's layer with an RMS norm on every query and key head."""

    engine = EngineNames("qwen3", "Eagle3Qwen3ForCausalLM")

    def __init__(self, config: DraftConfig, index: int, rope: Rope) -> None:
        super().__init__(config, index, rope)
        self.self_attn.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.self_attn.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def norm_query(self, q: Tensor) -> Tensor:
        return self.self_attn.q_norm(q)

    def norm_key(self, k: Tensor) -> Tensor:
        return self.self_attn.k_norm(k)


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj), project(x, self.up_proj)
        y = _GatedDown.apply(gate, up, self.down_proj.weight)
        return y if self.down_proj.bias is None else y + self.down_proj.bias.to(y.dtype)


def project(x: Tensor, linear: nn.Linear) -> Tensor:
    """``linear(x)`` in the dtype of ``x``; the float32 master is cast on the way."""
    return tiles.linear(x, linear.weight, linear.bias)


class _GatedDown(torch.autograd.Function):
    """``(silu(gate) * up) @ weight.T``; keeps gate and up, and makes their product again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return tiles.times(F.silu(gate).mul_(up), weight.to(gate.dtype).T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        grad = grad.contiguous()
        s = torch.sigmoid(gate)
        act = gate * s
        grad_weight = tiles.inner(grad, act * up).to(weight.dtype) if ctx.needs_input_grad[2] else None
        grad = tiles.times(grad, weight.to(gate.dtype))
        grad_up = grad * act
        # d silu = s + act * (1 - s)
        slope = act.neg_().mul_(s).add_(gate.mul(s)).add_(s)
        return slope.mul_(grad).mul_(up), grad_up, grad_weight
