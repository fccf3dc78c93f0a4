"""Attention of a training-time-test step on a GPU: torch's flex attention plus the query's own keys.

Flex attention (Dong et al. 2024, arXiv:2412.05496) answers over the document's keys and gives the logarithm
of its normaliser; a query's own keys, one for each earlier step, are few and are merged in afterwards:

    out = a * flex + sum_i b_i * own_value_i,    (a, b) = softmax([lse, own scores])

Which keys a query sees is a range, so the block mask is made from two numbers a query, not from a mask.

Shapes as in ``attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .dtypes import wide
from .kernels import compiled

if TYPE_CHECKING:
    from .attention import Layout

BLOCK = 128


def attend_flex(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor | None, own_values: Tensor | None,
    layout: Layout, scale: float,
) -> Tensor:  # fmt: skip
    """As ``attention.attend``."""
    n, h, _ = q.shape
    kv, e = values.shape[1:]
    function = compiled(flex_attention) if q.is_cuda else flex_attention
    out, aux = function(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), block_mask=layout.block_mask, scale=scale,
        enable_gqa=h != kv, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    out = out[0].transpose(0, 1)
    if own_keys is None or own_values is None:
        return out
    grouped = q.view(n, kv, h // kv, -1)
    own = torch.einsum("nkgd,njkd->nkgj", grouped, own_keys).to(wide(q.dtype)) * scale
    lse = aux.lse[0].T.reshape(n, kv, h // kv, 1).to(own.dtype)
    share = torch.softmax(torch.cat((lse, own), -1), -1).to(q.dtype)
    merged = share[..., :1] * out.reshape(n, kv, h // kv, e)
    merged = merged + torch.einsum("nkgj,njke->nkge", share[..., 1:], own_values)
    return merged.reshape(n, h, e)


def make_block_mask(last: Tensor, first: Tensor, keys: int) -> BlockMask:
    """Which blocks of keys each block of queries sees; query i sees the keys ``first[i] .. last[i]``.

    Args:
        last: Last key of each query, int64 ``[n]``.
        first: First key of each query, int64 ``[n]``.
        keys: Keys in all.
    """
    n = len(last)
    blocks = -(-n // BLOCK)
    padding = blocks * BLOCK - n

    def by_block(x: Tensor) -> Tensor:
        return torch.cat((x, x[-1:].expand(padding))).view(blocks, BLOCK)

    lows, highs = by_block(first), by_block(last)
    begin = torch.arange(0, keys, BLOCK, device=last.device)
    end = (begin + BLOCK).clamp(max=keys) - 1
    seen = (begin <= highs.amax(1)[:, None]) & (end >= lows.amin(1)[:, None])
    whole = (begin >= lows.amax(1)[:, None]) & (end <= highs.amin(1)[:, None]) & (end - begin == BLOCK - 1)
    if padding:
        whole[-1] = False

    def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(~mask, dim=1, stable=True)
        return mask.sum(1)[None, None].int(), order[None, None].int()

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= last[query]) & (key >= first[query])

    return BlockMask.from_kv_blocks(
        *listed(seen & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(n, keys)
    )
