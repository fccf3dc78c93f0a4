"""The EAGLE-3 draft model: one or a few Llama layers over the target's states and the next token.

The computation follows vLLM's ``Eagle3LlamaForCausalLM`` step by step (which norm feeds which residual,
what is fed back), since a drafter is only as good as what the engine makes of its weights. Parameters are
float32 masters; the products run in ``compute_dtype``. Parameter names are those of the exported checkpoint.

Shapes: n rows, H hidden size, A aux layers, h query heads, kv key heads, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from .norm import RMSNorm
from .rope import Rope


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
    qk_norm: bool = False
    """Qwen3-style norms on query and key heads."""
    attention_bias: bool = False
    mlp_bias: bool = False
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
        if self.num_layers < 1:
            problems.append(f"num_layers is {self.num_layers}; expected at least 1")
        if self.qk_norm and self.norm_output:
            problems.append(
                "qk_norm with norm_output is not supported by vLLM's Qwen3 drafter; set one of them off"
            )
        if not self.aux_layer_ids or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            problems.append(f"aux_layer_ids is {list(self.aux_layer_ids)}; expected distinct ascending ids")
        if problems:
            raise ConfigError("; ".join(problems))


class DraftLayer(Protocol):
    """What a decoder layer must offer; attention itself is the caller's, so any step layout can use it."""

    num_kv_heads: int
    scale: float

    def enter(self, embeds: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(input of the projections, residual)``."""

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries ``[n, h, d]``."""

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys ``[n, kv, d]`` and values ``[n, kv, e]``."""

    def leave(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(hidden, residual)`` after output projection and MLP; their sum is the residual stream."""


class Attention(nn.Module):
    """Projections of one attention block."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        h, kv, d, bias = config.num_heads, config.num_kv_heads, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_size, h * d, bias=bias)
        self.k_proj = nn.Linear(input_size, kv * d, bias=bias)
        self.v_proj = nn.Linear(input_size, kv * d, bias=bias)
        self.o_proj = nn.Linear(h * d, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.rms_norm_eps)
            self.k_norm = RMSNorm(d, config.rms_norm_eps)


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return project(_SwiGLU.apply(project(x, self.gate_proj), project(x, self.up_proj)), self.down_proj)


class LlamaLayer(nn.Module):
    """Llama decoder layer; the first one reads the embedding beside the state."""

    def __init__(self, config: DraftConfig, index: int, rope: Rope) -> None:
        super().__init__()
        size = config.hidden_size
        self.first = index == 0
        self.self_attn = Attention(config, 2 * size if self.first else size)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        if self.first:
            self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual
        self.qk_norm = config.qk_norm
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.rope = rope
        self.dropout = 0.0

    def enter(self, embeds: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.first:
            assert residual is not None, "layers after the first continue a residual stream"
            residual = residual + hidden
            return self.input_layernorm(residual), residual
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), -1)
        return x, normed if self.norm_before_residual else hidden

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        q = project(x, self.self_attn.q_proj).unflatten(-1, (self.num_heads, self.head_dim))
        return self.rope.apply(self.self_attn.q_norm(q) if self.qk_norm else q, positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = project(x, self.self_attn.k_proj).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = project(x, self.self_attn.v_proj).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return self.rope.apply(self.self_attn.k_norm(k) if self.qk_norm else k, positions), v

    def leave(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self._drop(project(attended.flatten(1), self.self_attn.o_proj))
        return self._drop(self.mlp(self.post_attention_layernorm(residual))), residual

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


LAYERS: dict[str, type] = {"llama": LlamaLayer}
"""Decoder layers by name; another drafter layer is one class here and one entry in ``export.py``."""


class Eagle3Drafter(nn.Module):
    """Fuses the target's aux states, reads the next token, predicts the one after it."""

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        size, num_aux = config.hidden_size, len(config.aux_layer_ids)
        rope = Rope(config.head_dim, config.rope)
        self.fc = nn.Linear(num_aux * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(num_aux))
        self.layers = nn.ModuleList(LAYERS[config.layer](config, i, rope) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_weight", torch.empty(0), persistent=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def reduced_vocab(self) -> bool:
        """The drafter proposes from a part of the target's vocabulary."""
        return self.config.draft_vocab_size != self.config.vocab_size

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embedding rows ``[n, H]`` of target ids; the table is the target's and is not trained."""
        return F.embedding(token_ids, self.embed_weight).to(self.compute_dtype)

    def combine(self, aux: Tensor) -> Tensor:
        """First-step input ``[n, H]`` from aux states ``[n, A, H]``."""
        x = aux.to(self.compute_dtype)
        if self.config.norm_before_fc:
            return project(self.input_norm(x.flatten(1)), self.fc)
        if self.config.fc_norm:
            x = torch.stack([norm(x[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        return project(x.flatten(1), self.fc)

    def finish(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(state for the head, state fed to the next draft step)``, both ``[n, H]``."""
        stream = residual + hidden
        normed = self.norm(stream)
        return normed, normed if self.config.norm_output else stream

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that the optimizer changes."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]


def project(x: Tensor, linear: nn.Linear) -> Tensor:
    """``linear(x)`` in the dtype of ``x``; the float32 master is cast on the way."""
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    return F.linear(x, linear.weight.to(x.dtype), bias)


def init_weights(model: Eagle3Drafter, generator: torch.Generator, *, std: float = 0.02) -> None:
    """Random start: projections that write to the residual stream begin at zero scale of the input.

    ``fc`` starts as the mean of the aux states plus noise, so the first state is close to the target's own.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif not name.startswith("lm_head"):
                p.normal_(0.0, std, generator=generator)


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` that keeps only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        act = gate * s
        grad_up = grad * act
        # d silu = s + act * (1 - s)
        slope = act.neg_().mul_(s).add_(gate.mul(s)).add_(s)
        return slope.mul_(grad).mul_(up), grad_up
