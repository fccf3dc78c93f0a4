"""RMS norm with a backward pass written out: autograd's own takes ten times the forward on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dtypes import wide


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``; statistics in float32, result in the dtype of ``x``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        y = x.to(wide(x.dtype))
        inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + ctx.eps)
        unit = y * inverse
        gw = grad.to(y.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (gw * unit).flatten(0, -2).sum(0)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        gw = gw * weight
        slope = (gw * unit).mean(-1, keepdim=True)
        return gw.addcmul_(unit, slope, value=-1).mul_(inverse).to(x.dtype), grad_weight, None
