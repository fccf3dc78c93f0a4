"""Which dtype sums are taken in."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half-precision inputs, the dtype itself for float32 and float64."""
    return torch.promote_types(dtype, torch.float32)
