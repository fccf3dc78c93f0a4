"""The loss over a large vocabulary without ever holding tokens x vocabulary.

Soft cross-entropy of a draft distribution p against the target's distribution q over the draft vocabulary is

    -sum_v q_v log p_v  =  logsumexp(W h)  -  h . (q W)

so all that the loss needs of q is one vector per token, the centroid ``q W`` of the head's rows under q. It
is computed once per token and serves every TTT step; each step then costs two matrix products over chunks
of rows (``W h`` and, for the gradient, ``p W``) and one softmax. Nothing of size [tokens, vocabulary]
outlives a chunk.

Shapes: n rows, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tiles
from .dtypes import wide
from .kernels import compiled, fused_softmax_works

_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Logits held at once: 4 MB in bfloat16, which stays in a CPU's cache; 256 MB, which fills a GPU."""


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows whose logits are held at once, a multiple of 16."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    rows = max(16, _CHUNK_ELEMENTS[kind] // vocab // 16 * 16)
    return min(rows, tiles.TILE) if kind == "cpu" else rows


def first_choice(logits: Tensor) -> Tensor:
    """``argmax(-1)`` of logits ``[n, V]``, ties to the lowest index.

    On a CPU torch's own argmax takes as long as the matrix product before it, but its maximum is fast:
    so find the block with the largest value first.
    """
    n, vocab = logits.shape
    block = next((b for b in range(1024, 63, -1) if vocab % b == 0), 0)
    if not block or logits.device.type != "cpu" or not n:
        return logits.argmax(-1)
    blocks = logits.view(n, vocab // block, block)
    which = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(n), which].argmax(-1)
    return which * block + inside


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says about each supervised row."""

    centroid: Tensor
    """``q W`` ``[n, H]``; q is the target's distribution renormalised over the draft vocabulary."""
    best: Tensor
    """Draft id of the target's most likely token ``[n]`` int64; -1 where the draft vocabulary lacks it."""


class TeacherHead:
    """Turns final states of the target into ``Teacher`` values."""

    def __init__(
        self,
        weight: Tensor,
        draft_ids: Tensor | None,
        *,
        bias: Tensor | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        temperature: float = 1.0,
        hard_weight: float = 0.0,
    ) -> None:
        """Keep the head's rows.

        Args:
            weight: Output head of the target ``[target vocab, H]`` in the dtype of the matrix products.
            draft_ids: Target ids of the draft vocabulary, ascending ``[V]``; None for all.
            bias: Of the head, or None.
            logit_scale: Factor that the target applies to its logits.
            logit_softcap: Cap that the target applies to its logits, or None.
            temperature: Of q; below 1 moves it towards the target's greedy choice.
            hard_weight: Share of q replaced by the target's greedy choice, 0 to 1.
        """
        self.weight, self.bias = weight, bias
        self.draft_ids = draft_ids
        self.rows = weight if draft_ids is None else weight[draft_ids].contiguous()
        self.row_bias = bias if bias is None or draft_ids is None else bias[draft_ids]
        self.to_draft = torch.full((weight.shape[0],), -1, dtype=torch.int64, device=weight.device)
        ids = torch.arange(weight.shape[0], device=weight.device) if draft_ids is None else draft_ids
        self.to_draft[ids] = torch.arange(len(ids), device=weight.device)
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap
        self.temperature, self.hard_weight = temperature, hard_weight

    def greedy(self, final: Tensor) -> Tensor:
        """The target's most likely token over its whole vocabulary ``[n]`` int64, from final states ``[n,
        H]``."""
        out = []
        for part in final.split(chunk_rows(self.weight.shape[0], final.device)):
            # Scale and cap are monotone: they do not move the maximum.
            logits = F.linear(tiles.pad_tail(part), self.weight, self.bias)
            out.append(first_choice(logits)[: len(part)])
        return torch.cat(out) if out else torch.zeros(0, dtype=torch.int64, device=final.device)

    def __call__(
        self, final: Tensor, greedy: Tensor, head: Tensor, centroid: Tensor | None = None
    ) -> Teacher:
        """Teacher values of some rows.

        Args:
            final: Post-norm final states ``[n, H]`` in the dtype of the matrix products.
            greedy: What ``greedy(final)`` returned.
            head: Rows of the draft head ``[V, H]`` that the centroid is taken over; differentiable.
            centroid: What an earlier call with the same head gave, to be used again.
        """
        best = self.to_draft[greedy]
        if centroid is not None:
            return Teacher(centroid, best)
        centroid = _Centroid.apply(final, head, self)
        if self.hard_weight:
            known = best >= 0
            hard = head[best.clamp(min=0)].to(centroid.dtype)
            mixed = torch.lerp(centroid, hard, self.hard_weight)
            centroid = torch.where(known[:, None], mixed, centroid)
        return Teacher(centroid, best)

    def distribution(self, final: Tensor) -> Tensor:
        """q of a few rows ``[n, V]`` in the dtype of ``final``."""
        logits = F.linear(final, self.rows, self.row_bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return torch.softmax(logits, -1)


class _Centroid(torch.autograd.Function):
    """``softmax(teacher logits) @ head`` and its gradient for ``head``, in chunks of rows."""

    @staticmethod
    def forward(ctx: Any, final: Tensor, head: Tensor, teacher: TeacherHead) -> Tensor:
        ctx.save_for_backward(final)
        ctx.teacher, ctx.head_shape, ctx.head_dtype = teacher, head.shape, head.dtype
        rows = head.to(final.dtype)
        centroid = torch.empty(len(final), head.shape[1], dtype=final.dtype, device=final.device)
        at = 0
        for part in final.split(chunk_rows(head.shape[0], final.device)):
            q = teacher.distribution(tiles.pad_tail(part))
            stop = at + len(part)
            centroid[at:stop] = torch.mm(q, rows)[: len(part)]
            at = stop
        return centroid

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return None, None, None
        (final,) = ctx.saved_tensors
        out = torch.zeros(ctx.head_shape, dtype=wide(final.dtype), device=final.device)
        size = chunk_rows(ctx.head_shape[0], final.device)
        for part, g in zip(final.split(size), grad.split(size), strict=True):
            q = ctx.teacher.distribution(tiles.pad_tail(part))
            out += q.T @ tiles.pad_tail(g.to(part.dtype))
        return None, out.to(ctx.head_dtype), None


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, centroid: Tensor, best: Tensor, weight: Tensor, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the cross-entropy of each row against its teacher.

    Args:
        hidden: Draft states before the head ``[n, H]``.
        head: Draft head ``[V, H]``.
        centroid: Of the teacher ``[n, H]``.
        best: Draft id of the target's greedy token ``[n]``, -1 for none.
        weight: Of each row ``[n]`` float32; rows of weight 0 add nothing.
        logit_scale: Factor on the draft logits.

    Returns:
        ``(sum of weight * loss, loss of each row [n] detached, whether the draft's greedy token is the
        target's [n] bool)``.
    """
    total, correct, log_z = _WeightedLogSumExp.apply(hidden, head, weight, best, logit_scale)
    weighted, overlap = _WeightedOverlap.apply(hidden, centroid, weight, logit_scale)
    return total - weighted, log_z - overlap, correct


def overlap_loss(
    hidden: Tensor, head: Tensor, teacher: TeacherHead, final: Tensor, label: Tensor, best: Tensor,
    weight: Tensor, form: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weighted sum of a loss made of the overlap ``sum_v min(p_v, q_v)`` of draft and target.

    The overlap is the probability that a sampled draft token is accepted (Leviathan et al. 2023,
    arXiv:2211.17192). Unlike the cross-entropy it needs the target's whole distribution at every step.

    Args:
        hidden: Draft states before the head ``[n, H]``.
        head: Draft head ``[V, H]``.
        teacher: Over the same draft vocabulary.
        final: Final states of the target ``[n, H]``.
        label: Draft id that stands for the whole distribution where it is not -1 ``[n]`` int64.
        best: Draft id of the target's greedy token ``[n]``, -1 for none.
        weight: Of each row ``[n]`` float32; rows of weight 0 add nothing.
        form: ``tv``: total variation, 1 - overlap; ``lk``: -log overlap.

    Returns:
        As ``soft_cross_entropy``.
    """
    return _Overlap.apply(hidden, head, teacher, final, label, best, weight, form)


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: TeacherHead, final: Tensor, label: Tensor,
        best: Tensor, weight: Tensor, form: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows = head.to(hidden.dtype)
        dtype = wide(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide(head.dtype)) if ctx.needs_input_grad[1] else None
        losses = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        step = chunk_rows(head.shape[0], hidden.device)
        for at in range(0, len(hidden), step):
            stop = min(len(hidden), at + step)
            size = stop - at
            part = tiles.pad_tail(hidden[at:stop])
            p, _, reached = softmax_parts(part @ rows.T, tiles.pad_rows(best[at:stop], len(part)))
            correct[at:stop] = reached[:size]
            q = teacher.distribution(tiles.pad_tail(final[at:stop]))[:size]
            alone = (label[at:stop] >= 0).nonzero()[:, 0]
            q[alone] = 0.0
            q[alone, label[at:stop][alone]] = 1.0
            p = p[:size]
            overlap = torch.minimum(p, q).sum(-1, dtype=dtype).clamp(min=1e-6)
            losses[at:stop] = 1.0 - overlap if form == "tv" else -overlap.log()
            if grad_hidden is None and grad_head is None:
                continue
            # d overlap / d p is 1 where p < q; through the softmax that is p * (1[p < q] - its mean under p).
            below = torch.where(p < q, p, 0.0)
            slope = below - p * below.sum(-1, keepdim=True, dtype=dtype).to(p.dtype)
            factor = weight[at:stop].to(dtype) if form == "tv" else weight[at:stop] / overlap
            slope = slope.mul_(-factor[:, None].to(p.dtype))
            if grad_hidden is not None:
                grad_hidden[at:stop] = torch.mm(tiles.pad_tail(slope), rows)[:size]
            if grad_head is not None:
                grad_head += slope.T @ hidden[at:stop]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(losses, correct)
        return (weight * losses).sum(), losses, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None, None, None, None


def softmax_parts(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the loss needs of some rows' logits.

    Args:
        logits: ``[n, V]``.
        target: Draft id that is compared ``[n]``, -1 for none.

    Returns:
        ``(softmax [n, V], logarithm of its normaliser [n], whether the target is the largest [n] bool)``.
    """
    top = logits.amax(-1)
    reached = (logits.gather(1, target.clamp(min=0)[:, None])[:, 0] >= top) & (target >= 0)
    p = torch.softmax(logits, -1)
    # The largest probability gives the normaliser without a second pass over the logits.
    dtype = wide(logits.dtype)
    return p, top.to(dtype) - p.amax(-1).to(dtype).log(), reached


_OVERLAP_ROWS = 2048
"""Rows that are held in float32 at once."""


class _WeightedOverlap(torch.autograd.Function):
    """``sum_i weight_i * scale * hidden_i . centroid_i`` and each product; keeps no wide copies."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, centroid: Tensor, weight: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, centroid, weight)
        ctx.scale = scale
        dtype = wide(hidden.dtype)
        overlap = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        for at in range(0, len(hidden), _OVERLAP_ROWS):
            part = slice(at, at + _OVERLAP_ROWS)
            overlap[part] = (hidden[part].to(dtype) * centroid[part].to(dtype)).sum(-1)
        overlap *= scale
        ctx.mark_non_differentiable(overlap)
        return (weight * overlap).sum(), overlap

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, centroid, weight = ctx.saved_tensors
        # Rounded as in _WeightedLogSumExp, whose gradient this one all but cancels.
        factor, grad = (weight * ctx.scale)[:, None].to(hidden.dtype), grad.to(hidden.dtype)
        grad_hidden = centroid * factor * grad if ctx.needs_input_grad[0] else None
        grad_centroid = hidden * factor * grad if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_centroid, None, None


class _WeightedLogSumExp(torch.autograd.Function):
    """``sum_i weight_i * logsumexp(scale * head @ hidden_i)``; the gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, weight: Tensor, best: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = head.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide(head.dtype)) if ctx.needs_input_grad[1] else None
        log_z = torch.empty(len(hidden), dtype=wide(hidden.dtype), device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        step = chunk_rows(head.shape[0], hidden.device)
        for at in range(0, len(hidden), step):
            stop = min(len(hidden), at + step)
            size = stop - at
            part = tiles.pad_tail(hidden[at:stop])
            logits = part @ rows.T
            if scale != 1.0:
                logits = logits * scale
            target = tiles.pad_rows(best[at:stop], len(part))
            parts = softmax_parts
            if fused_softmax_works(logits.device, logits.dtype):
                parts = compiled(softmax_parts)
            p, rows_log_z, reached = parts(logits, target)
            log_z[at:stop], correct[at:stop] = rows_log_z[:size], reached[:size]
            if grad_hidden is not None:
                grad_hidden[at:stop] = torch.mm(p, rows)[:size]
            if grad_head is not None:
                scaled = hidden[at:stop] * (weight[at:stop, None] * scale).to(part.dtype)
                grad_head += p.T @ tiles.pad_tail(scaled)
        if grad_hidden is not None:
            grad_hidden.mul_((weight[:, None] * scale).to(hidden.dtype))
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(correct, log_z)
        return (weight * log_z).sum(), correct, log_z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None
