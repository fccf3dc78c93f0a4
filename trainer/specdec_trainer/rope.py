"""Rotary positions of the drafter, equal to what vLLM computes from the exported config.

Supported ``rope_type``: ``default``, ``linear``, ``llama3``, ``yarn``; with ``partial_rotary_factor``. Others
are refused: a drafter that rotates differently in training and in serving is silently worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec_tap.errors import InputError

SUPPORTED = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a Hugging Face config in one spelling, whichever transformers wrote it.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters``.

    Returns:
        A dict that always has ``rope_type`` and ``rope_theta``.

    Raises:
        InputError: The type is not supported.
    """
    out: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if isinstance(value, Mapping):
            if all(isinstance(v, Mapping) for v in value.values()) and value:
                # One set per attention type (Gemma 3): the drafter attends to everything.
                value = value.get("full_attention", next(iter(value.values())))
            out.update(value)
    if "type" in out:
        out.setdefault("rope_type", out.pop("type"))
    out.setdefault("rope_type", "default")
    theta = out.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    out["rope_theta"] = float(theta)
    if "partial_rotary_factor" not in out and config.get("partial_rotary_factor") not in (None, 1.0):
        out["partial_rotary_factor"] = float(config["partial_rotary_factor"])
    if out["rope_type"] == "mrope" or "mrope_section" in out:
        # Text positions have equal sections, so a text drafter needs only the base.
        out = {"rope_type": "default", "rope_theta": out["rope_theta"]}
    if out["rope_type"] == "longrope":
        raise InputError("rope_type 'longrope' is not supported for drafters; set rope_type to 'default'")
    if out["rope_type"] not in SUPPORTED:
        raise InputError(f"rope_type {out['rope_type']!r} is not supported; expected one of {SUPPORTED}")
    return out


def inverse_frequencies(head_dim: int, params: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Rotation speeds and the factor on cos and sin.

    Args:
        head_dim: Size of one attention head.
        params: What ``rope_parameters`` returned.

    Returns:
        ``(inv_freq [rotary_dim / 2] float32 in radians per position, scale)``.
    """
    rotary_dim = int(head_dim * float(params.get("partial_rotary_factor", 1.0)))
    theta = float(params["rope_theta"])
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / theta**exponents
    kind = params["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = float(params["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(params["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
        turns = original * plain / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns >= low).float()
        return plain * (keep + (1 - keep) / factor), 1.0

    def dim_with(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_with(float(params.get("beta_fast", 32))), dim_with(float(params.get("beta_slow", 1)))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = high if high != low else high + 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_scale(params, factor)


def _yarn_scale(params: Mapping[str, Any], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(float(params["mscale"])) / scale(float(params["mscale_all_dim"]))
    return scale(1.0)


class Rope:
    """cos and sin by position, grown as needed; applied to the first ``rotary_dim`` entries of a head."""

    def __init__(self, head_dim: int, params: Mapping[str, Any], *, interleaved: bool = False) -> None:
        """Prepare the rotation.

        Args:
            head_dim: Size of what is rotated.
            params: What ``rope_parameters`` returned.
            interleaved: Entries 2i and 2i + 1 are a pair (GPT-J style), not i and i + half (NeoX style).
        """
        self.inv_freq, self.scale = inverse_frequencies(head_dim, params)
        self.interleaved = interleaved
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x [n, heads, head_dim]`` to ``positions [n]``."""
        cos, sin = self._rows(positions, x)
        return _Rotate.apply(x, cos, sin, self.interleaved)

    def _rows(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        key = (x.device, x.dtype)
        needed = int(positions.max()) + 1 if positions.numel() else 1
        if key not in self._tables or self._tables[key][0].shape[0] < needed:
            size = 1 << max(10, (needed - 1).bit_length())
            angles = torch.arange(size, dtype=torch.float32)[:, None] * self.inv_freq
            # vLLM keeps its table in the model's dtype, so the rounding is the same.
            self._tables[key] = (
                (angles.cos() * self.scale).to(x.device, x.dtype),
                (angles.sin() * self.scale).to(x.device, x.dtype),
            )
        cos, sin = self._tables[key]
        return cos[positions][:, None, :], sin[positions][:, None, :]


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back (times the same scale)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty_like(x)
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
