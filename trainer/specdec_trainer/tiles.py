"""Matrix products in few shapes.

oneDNN, which runs bfloat16 products on a CPU, compiles a kernel for every shape it meets: 1 to 3 ms and half
a megabyte that is never given back. Packed batches never have the same number of rows twice, so a run would
spend a fifth of its time on compiling and gigabytes on kernels. Here rows are worked off in tiles of one size
and what is left is padded to one of a few. Other devices and dtypes have no such cost and are left alone.

Shapes: n rows, a and b channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 256
"""Rows of one product."""


def compiles_shapes(x: Tensor) -> bool:
    """Whether products of this tensor are compiled for each shape."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def tail_size(n: int) -> int:
    """Rows to which the ``n`` rows of a last tile are padded: a power of two."""
    return max(16, 1 << (n - 1).bit_length())


def rounded(n: int) -> int:
    """``n`` rounded up to one of two sizes an octave: 64, 96, 128, 192, 256, 384 and so on."""
    if n <= 64:
        return 64
    octave = 1 << (n - 1).bit_length()
    return octave * 3 // 4 if n <= octave * 3 // 4 else octave


def pad_rows(x: Tensor, n: int) -> Tensor:
    """``x`` with zero rows up to ``n``; itself where it has them."""
    missing = n - x.shape[0]
    return x if missing <= 0 else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing))


def pad_tail(x: Tensor) -> Tensor:
    """``x`` with zero rows up to one of a few sizes, where shapes cost something."""
    n = x.shape[0]
    return pad_rows(x, tail_size(n)) if n and n < TILE and compiles_shapes(x) else x


def times(x: Tensor, w: Tensor) -> Tensor:
    """``x [n, a] @ w [a, b]``."""
    n = x.shape[0]
    if not compiles_shapes(x) or not n:
        return x @ w
    whole = n // TILE * TILE
    out = x.new_empty(n, w.shape[1])
    for at in range(0, whole, TILE):
        torch.mm(x[at : at + TILE], w, out=out[at : at + TILE])
    if whole < n:
        left = n - whole
        out[whole:] = torch.mm(pad_rows(x[whole:], tail_size(left)), w)[:left]
    return out


def inner(x: Tensor, y: Tensor) -> Tensor:
    """``x [n, a].T @ y [n, b]``."""
    if compiles_shapes(x):
        n = max(TILE, -(-x.shape[0] // TILE) * TILE) if x.shape[0] > TILE else tail_size(x.shape[0])
        x, y = pad_rows(x, n), pad_rows(y, n)
    return x.T @ y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # The cast weight is made again in the backward pass: kept, there would be one for every draft step.
        ctx.save_for_backward(x, weight)
        return times(x, weight.to(x.dtype).T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = times(grad, weight.to(x.dtype)) if ctx.needs_input_grad[0] else None
        grad_weight = inner(grad, x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [n, a] @ weight [b, a].T + bias`` in the dtype of ``x``; the weight is a float32 master."""
    y = _Linear.apply(x, weight)
    return y if bias is None else y + bias.to(x.dtype)
