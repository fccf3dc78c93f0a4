"""Attention of a training-time-test step over packed documents, in memory linear in tokens.

At step k the query that continues row ``t`` sees the step-0 keys of its document up to row ``t`` (ordinary
causal attention) and its own keys of steps 1..k, one each: the mask of EAGLE-3. No mask over the pack is
ever built. Queries are worked off in chunks of one document each; the backward pass recomputes a chunk's
probabilities. On a GPU flex attention does the same in fewer kernels (``flex.py``).

Shapes: n queries, r key rows (the pack), h query heads, g = h / kv heads, j own keys, d head size, e value
    size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tiles
from .dtypes import wide
from .kernels import flex_works

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Score entries held at once: 8 MB in float32, near a CPU's caches; 512 MB, so that a GPU is busy."""


def _chunk_rows(entries: int, device: torch.device) -> int:
    """Queries in one chunk when each has ``entries`` scores."""
    return max(16, _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"]) // entries)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries ``[start, stop)`` against key rows ``[key_start, key_stop)``.

    Where shapes cost something (see ``tiles``), rows are padded and keys are more than the document's.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    document: int
    """First key row of the document."""
    bounds: Tensor
    """Last key row that each query sees, int32 ``[rows, 1]``; padding sees the document's first."""

    @property
    def rows(self) -> int:
        """Queries with padding."""
        return self.bounds.shape[0]

    def hidden(self) -> Tensor:
        """Which keys a query must not see, bool ``[rows, keys]``; made when needed, since together they
        would take rows x rows bytes."""
        columns = torch.arange(self.key_start, self.key_stop, dtype=torch.int32, device=self.bounds.device)
        mask = columns > self.bounds
        return mask if self.key_start == self.document else mask | (columns < self.document)


class Layout:
    """Which key rows each query may see; made once and shared by all layers and steps with these queries."""

    def __init__(self, rows: Tensor, starts: Tensor, *, heads: int, keys: int, like: Tensor) -> None:
        """Take the queries; what a kernel needs of them is made when it asks.

        Args:
            rows: Ascending key row of each query, int64 ``[n]``: the last step-0 key that it sees.
            starts: First row of each document, ascending int64; row 0 first.
            heads: Query heads, for the size of a chunk.
            keys: Key rows of the pack.
            like: Of the device and dtype of the queries.
        """
        self.rows, self.starts, self.heads, self.keys = rows, starts, heads, keys
        self._few_shapes = tiles.compiles_shapes(like)

    @functools.cached_property
    def first_keys(self) -> Tensor:
        """First key row of each query's document, int64 ``[n]``."""
        starts = self.starts.to(self.rows.device)
        return starts[torch.searchsorted(starts, self.rows, right=True) - 1]

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """For flex attention."""
        from .flex import make_block_mask

        return make_block_mask(self.rows, self.first_keys, self.keys)

    @functools.cached_property
    def chunks(self) -> list[Chunk]:
        """Queries cut into chunks of one document each."""
        rows, keys, few = self.rows, self.keys, self._few_shapes
        chunks: list[Chunk] = []
        rows_cpu = rows.cpu()
        edges = [*torch.searchsorted(rows_cpu, self.starts.cpu()).tolist(), len(rows)]
        for key_start, first, last in zip(self.starts.tolist(), edges, edges[1:], strict=False):
            at = first
            while at < last:
                widest = int(rows_cpu[last - 1]) - key_start + 1
                size = _chunk_rows(self.heads * widest, rows.device)
                stop = min(last, at + (min(size, tiles.TILE) if few else size))
                key_stop = int(rows_cpu[stop - 1]) + 1
                padded, first_key = stop - at, key_start
                if few:
                    padded = tiles.tail_size(stop - at)
                    width = min(keys, tiles.rounded(key_stop - key_start))
                    first_key = min(key_start, keys - width)
                    key_stop = first_key + width
                bounds = rows[at:stop, None].int()
                bounds = F.pad(bounds, (0, 0, 0, padded - (stop - at)), value=key_start)
                chunks.append(Chunk(at, stop, first_key, key_stop, key_start, bounds))
                at = stop
        return chunks


def attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor | None, own_values: Tensor | None,
    layout: Layout, scale: float,
) -> Tensor:  # fmt: skip
    """Softmax attention over the document's rows and the query's own keys.

    Args:
        q: ``[n, h, d]``.
        keys: ``[r, kv, d]``.
        values: ``[r, kv, e]``.
        own_keys: ``[n, j, kv, d]`` of steps 1..k, or None at step 0.
        own_values: ``[n, j, kv, e]``.
        layout: Of these queries.
        scale: Factor on the scores.

    Returns:
        ``[n, h, e]`` in the dtype of ``q``.
    """
    if q.is_cuda and flex_works(q.device, q.dtype, q.shape[1], values.shape[1], q.shape[2], values.shape[2]):
        from .flex import attend_flex

        return attend_flex(q, keys, values, own_keys, own_values, layout, scale)
    return attend_in_chunks(q, keys, values, own_keys, own_values, layout, scale)


def attend_in_chunks(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor | None, own_values: Tensor | None,
    layout: Layout, scale: float,
) -> Tensor:  # fmt: skip
    """``attend`` in plain matrix products, on any device."""
    return _Attend.apply(q, keys, values, own_keys, own_values, layout, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor | None, own_values: Tensor | None,
        layout: Layout, scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, keys, values, own_keys, own_values)
        ctx.layout, ctx.scale = layout, scale
        n, h, _ = q.shape
        kv, e = values.shape[1:]
        grouped, own = _own_scores(q, own_keys, kv, scale)
        by_head, value_by_head = keys.transpose(0, 1), values.transpose(0, 1)
        out = q.new_empty(n, kv, h // kv, e)
        own_probs = None if own is None else torch.empty_like(own)
        for c in layout.chunks:
            p, own_p = _probabilities(grouped, by_head, own, c)
            if own_p is not None:
                own_probs[c.start : c.stop] = own_p
            part = torch.bmm(p, value_by_head[:, c.key_start : c.key_stop])
            out[c.start : c.stop] = part.view(kv, c.rows, h // kv, e).transpose(0, 1)[: c.stop - c.start]
        if own_probs is not None:
            for i in range(own_probs.shape[-1]):
                out.addcmul_(own_probs[..., i : i + 1].to(q.dtype), own_values[:, i, :, None])
        return out.view(n, h, e)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, keys, values, own_keys, own_values = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        n, h, d = q.shape
        kv, e = values.shape[1:]
        g = h // kv
        grad = grad.view(n, kv, g, e)
        grouped, own = _own_scores(q, own_keys, kv, scale)
        by_head, value_by_head = keys.transpose(0, 1), values.transpose(0, 1)
        grad_q = q.new_empty(n, kv, g, d)
        # Several documents never share a key row, but chunks of one document do: sum those in float32.
        grad_keys = torch.zeros(kv, keys.shape[0], d, dtype=wide(q.dtype), device=q.device)
        grad_values = torch.zeros(kv, keys.shape[0], e, dtype=wide(q.dtype), device=q.device)
        grad_own_keys = None if own is None else torch.empty_like(own_keys)
        grad_own_values = None if own is None else torch.empty_like(own_values)
        for c in layout.chunks:
            size = c.stop - c.start
            rows, cols = slice(c.start, c.stop), slice(c.key_start, c.key_stop)
            p, own_p = _probabilities(grouped, by_head, own, c)
            go = _by_head(grad[rows], c.rows)
            grad_values[:, cols] += torch.bmm(p.transpose(1, 2), go)
            dp = torch.bmm(go, value_by_head[:, cols].transpose(1, 2))
            # Row sums of p * dp over all keys, the query's own included.
            delta = (p * dp).sum(-1, keepdim=True, dtype=wide(q.dtype))
            if own_p is not None:
                own_dp = torch.stack(
                    [(grad[rows] * own_values[rows, i, :, None]).sum(-1, dtype=wide(q.dtype))
                     for i in range(own_p.shape[-1])], -1,
                )  # fmt: skip
                delta += _by_head((own_p * own_dp).sum(-1, keepdim=True), c.rows)
                own_delta = delta.view(kv, c.rows, g, 1).transpose(0, 1)[:size]
                own_ds = (own_p * (own_dp - own_delta) * scale).to(q.dtype)
                own_p = own_p.to(q.dtype)
            ds = (p * (dp - delta.to(q.dtype))).mul_(scale)
            gq = torch.bmm(ds, by_head[:, cols]).view(kv, c.rows, g, d).transpose(0, 1)[:size]
            grad_keys[:, cols] += torch.bmm(ds.transpose(1, 2), _rows(grouped, c))
            if own_p is not None:
                for i in range(own_p.shape[-1]):
                    s = own_ds[..., i : i + 1]
                    gq = gq + s * own_keys[rows, i, :, None]
                    grad_own_keys[rows, i] = (s * q[rows].view(size, kv, g, d)).sum(2)
                    grad_own_values[rows, i] = (own_p[..., i : i + 1] * grad[rows]).sum(2)
            grad_q[rows] = gq
        return (
            grad_q.view(n, h, d),
            grad_keys.transpose(0, 1).to(keys.dtype),
            grad_values.transpose(0, 1).to(values.dtype),
            grad_own_keys,
            grad_own_values,
            None,
            None,
        )


def _own_scores(q: Tensor, own_keys: Tensor | None, kv: int, scale: float) -> tuple[Tensor, Tensor | None]:
    """Queries scaled and grouped by key head ``[n, kv, g, d]``, and scores of own keys ``[n, kv, g, j]``."""
    n, h, d = q.shape
    grouped = q.view(n, kv, h // kv, d)
    own = None
    if own_keys is not None:
        own = torch.stack(
            [
                (grouped * own_keys[:, i, :, None]).sum(-1, dtype=wide(q.dtype))
                for i in range(own_keys.shape[1])
            ],
            -1,
        ).mul_(scale)
    return _Scaled(grouped, scale), own


@dataclass(frozen=True, slots=True)
class _Scaled:
    grouped: Tensor
    scale: float


def _by_head(x: Tensor, rows: int) -> Tensor:
    """``[kv, rows * g, d]`` from ``[size, kv, g, d]``, with zeros for padding."""
    _, kv, g, d = x.shape
    return tiles.pad_rows(x, rows).transpose(0, 1).reshape(kv, rows * g, d)


def _rows(queries: _Scaled, c: Chunk) -> Tensor:
    """``[kv, rows * g, d]`` of one chunk."""
    return _by_head(queries.grouped[c.start : c.stop], c.rows)


_OWN_COLUMNS = 8
"""Room for own keys beside the document's, in multiples: a stride counts as a shape too."""


def _probabilities(
    queries: _Scaled, by_head: Tensor, own: Tensor | None, c: Chunk
) -> tuple[Tensor, Tensor | None]:
    """Probabilities of the chunk's document keys ``[kv, rows * g, keys]`` and own keys ``[size, kv, g,
    j]``."""
    rows = _rows(queries, c)
    kv, size = by_head.shape[0], c.stop - c.start
    g = rows.shape[1] // c.rows
    scores = torch.bmm(rows, by_head[:, c.key_start : c.key_stop].transpose(1, 2)).mul_(queries.scale)
    scores.view(kv, c.rows, g, -1).masked_fill_(c.hidden()[None, :, None, :], float("-inf"))
    if own is None:
        return torch.softmax(scores, -1), None
    j, keys = own.shape[-1], scores.shape[-1]
    both = scores.new_full((*scores.shape[:-1], keys + -(-j // _OWN_COLUMNS) * _OWN_COLUMNS), float("-inf"))
    both[..., :keys] = scores
    both[..., keys : keys + j] = _by_head(own[c.start : c.stop], c.rows)
    p = torch.softmax(both, -1)
    own_p = p[..., keys : keys + j].to(own.dtype).view(kv, c.rows, g, j).transpose(0, 1)[:size]
    return p[..., :keys], own_p
