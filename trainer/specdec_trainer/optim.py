"""Optimizers, their groups, the learning-rate curve, and the average of weights that is exported."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specdec_tap.errors import ConfigError

from .distributed import is_sharded, like, local
from .kernels import has_bfloat16

_ADJUST = "match_rms_adamw"


class Float32Muon(torch.optim.Muon):
    """torch's Muon, its state and settings, with the Newton-Schulz iterations in float32 instead of bfloat16.

    Source: Jordan et al., Muon (2024); ``torch.optim.Muon``, Nesterov's momentum and ``match_rms_adamw``.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            for p, grad, buffer in zip(params, grads, buffers, strict=True):
                buffer.lerp_(grad, 1 - group["momentum"])
                update = _orthogonal(grad.lerp(buffer, group["momentum"]), group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def _orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Nearest matrix with orthonormal rows or columns, nearly."""
    a, b, c = group["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Optimizers:
    """Muon for matrices of the hidden layers, AdamW for the rest; one learning-rate curve for both."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        lr: float,
        adamw_lr: float,
        weight_decay: float,
        adamw_weight_decay: float,
        momentum: float,
        ns_steps: int,
    ) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ConfigError("no parameter is trainable; unfreeze something")
        # An output head is a table of rows, not a map between hidden spaces: Muon is not meant for it.
        matrices = []
        if name == "muon":
            matrices = [p for n, p in named if p.ndim == 2 and min(p.shape) > 1 and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.parameters = [p for _, p in named]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            kind = torch.optim.Muon if has_bfloat16(matrices[0].device) else Float32Muon
            self.parts.append(
                kind(
                    matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=True,
                    ns_steps=ns_steps, adjust_lr_fn=_ADJUST,
                )
            )  # fmt: skip
        if rest:
            decayed = [p for p in rest if p.ndim == 2]
            plain = [p for p in rest if p.ndim != 2]
            groups = [
                {"params": decayed, "weight_decay": adamw_weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ]
            self.parts.append(
                torch.optim.AdamW(
                    [g for g in groups if g["params"]], lr=lr if name == "adamw" else adamw_lr,
                    betas=(0.9, 0.95), eps=1e-8, fused=True,
                )
            )  # fmt: skip
        self._base = [[g["lr"] for g in part.param_groups] for part in self.parts]

    def step(self, factor: float) -> None:
        """One update with every learning rate scaled by ``factor``."""
        for part, bases in zip(self.parts, self._base, strict=True):
            for group, base in zip(part.param_groups, bases, strict=True):
                group["lr"] = base * factor
            part.step()

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        if len(state) != len(self.parts):
            raise ConfigError(
                "the checkpoint was written with another optimizer; resume with the same --optimizer"
            )
        for part, values in zip(self.parts, state, strict=True):
            part.load_state_dict(values)


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``largest``; returns the norm before (a
    tensor). Every process that holds a share of them must ask."""
    present = [p.grad for p in parameters if p.grad is not None]
    grads = [local(g) for g in present]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    if any(is_sharded(g) for g in present):
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    if largest > 0:
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)
    return norm


def lr_factor(progress: float, *, warmup: float, shape: str, floor: float) -> float:
    """Factor on the learning rate after a share ``progress`` (0 to 1) of the run.

    Args:
        progress: Share of the run that is done.
        warmup: Share of the run spent rising from 0.
        shape: ``cosine``, ``linear`` or ``constant``.
        floor: Factor at the end.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    if shape == "constant":
        return 1.0
    left = 1.0 - (progress - warmup) / max(1e-9, 1.0 - warmup)
    left = min(1.0, max(0.0, left))
    curve = left if shape == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return floor + (1.0 - floor) * curve


class WeightAverage:
    """Exponential moving average of the trained weights; warms up so that early noise is forgotten."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay, self.updates = parameters, decay, 0
        self.shadow = [p.detach().clone() for p in parameters]
        """As sharded as the weights are."""

    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        live = [local(p.detach()) for p in self.parameters]
        torch._foreach_lerp_([local(s) for s in self.shadow], live, 1.0 - decay)

    def swap(self) -> None:
        """Exchange the live weights with the average; call again to exchange back."""
        for p, s in zip(self.parameters, self.shadow, strict=True):
            mine, other = local(p.detach()), local(s)
            live = mine.clone()
            mine.copy_(other)
            other.copy_(live)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        for mine, theirs in zip(self.shadow, state["shadow"], strict=True):
            local(mine).copy_(local(like(theirs, mine)))
