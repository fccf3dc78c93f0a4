"""Compiled kernels for GPUs, each tried beside the plain code before it is used.

On CUDA attention is torch's flex attention and the softmax of the loss is one fused kernel; ``torch.compile``
writes both in Triton. They are compiled on the machine that trains, so they can fail there: the first use
compares them with the plain code on a small case, and what raises or disagrees is left out with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("specdec_trainer")


def agree(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> bool:
    """Whether tensors are equal to within a share of the largest value of each."""
    return all(
        float((g.float() - w.float()).abs().max()) <= tolerance * max(1e-6, float(w.float().abs().max()))
        for g, w in zip(got, want, strict=True)
    )


def usable(what: str, compare: Callable[[], bool]) -> bool:
    """Run a comparison once; a kernel that raises or disagrees is named and not used."""
    try:
        if compare():
            return True
        reason = "its values differ from the plain code's"
    except Exception as err:  # whatever a compiler, a driver or a missing tool raises
        reason = f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
    logger.warning("%s is not used, training is slower and as correct without it: %s", what, reason)
    return False


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one fused kernel for any number of rows."""
    return torch.compile(function, dynamic=True)


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are worth using on ``device``.

    A CPU without AVX-512 (or Arm's bfloat16 instructions) multiplies them one by one, 20 to 90 times slower
    than float32.
    """
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def fused_softmax_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled ``loss.softmax_parts`` may be used on a device."""
    from .loss import softmax_parts

    def compare() -> bool:
        generator = torch.Generator().manual_seed(0)
        logits = (torch.randn(48, 96, generator=generator) * 4).to(device, dtype)
        target = torch.randint(0, 96, (48,), generator=generator).to(device)
        want = softmax_parts(logits, target)
        return agree(compiled(softmax_parts)(logits, target), want, 2e-2)

    return device.type == "cuda" and usable("the fused softmax of the loss", compare)


@functools.cache
def flex_works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, e: int) -> bool:
    """Whether flex attention may be used for heads of these sizes on a device."""
    from .attention import Layout, attend_in_chunks
    from .flex import attend_flex

    def compare() -> bool:
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(3, 200, device=device)
        n, r = len(rows), 200

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

        inputs = [some(n, heads, d), some(r, kv_heads, d), some(r, kv_heads, e), some(n, 2, kv_heads, d),
                  some(n, 2, kv_heads, e)]  # fmt: skip
        layout = Layout(rows, torch.tensor([0, 70]), heads=heads, keys=r, like=inputs[0])
        results = []
        for attend in (attend_flex, attend_in_chunks):
            out = attend(*inputs, layout, d**-0.5)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
        return agree(results[0], results[1], 5e-2)

    return device.type == "cuda" and usable("flex attention", compare)
