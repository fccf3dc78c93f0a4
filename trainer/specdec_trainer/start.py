"""A start that already copies.

Text repeats itself: in chat answers the newest token has mostly stood before, and what followed it then often
follows again. One EAGLE-3 layer can use that (an induction head: Olsson et al. 2022, arXiv:2209.11895),
because row s holds both ends of the pair: the states of token x[s] and the embedding of x[s+1]. A drafter
with random weights needs far more traffic to find this out than to learn the rest, so it is written down
here, in closed form:

    fc      reads the row's own token x[s] out of the lowest captured layer, and x[s-1] out of all of them
            (ridge regressions on captured rows) into a whitened token space, beside random projections
    keys    the row's own token, queries the newest token, in those entries of a head that the rotation leaves
            nearly alone over a few hundred positions
    values  the embedding of x[s+1]; the output projection turns it into what the head reads as that token

The last norm is scaled so that the drafter is as sure as it is right: with the target's own scale its loss is
20 nats at first, and half of the training goes into unlearning that. Everything stays trainable, and learns
when to copy and when not to. Only captured rows, the embedding and the head are needed.

Shapes: n rows, H hidden size, A aux layers, V draft vocabulary, r entries of the token space, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import Batch
from .drafter import Drafter
from .layers import LlamaLayer
from .model import Eagle3Drafter
from .objective import Eagle3Objective

_MATCH = 16.0
"""Attention score of a row whose own token is the newest one, above the others'."""
_COPIED = 4.0
"""Size of what is copied, beside a residual stream of size 1."""
_SPAN = 300
"""Positions over which a match must be seen."""
_ANGLE = 1.0
"""Largest rotation over them, in radians, of the entries that match."""
_SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.085, 0.06)
"""Of the last norm, tried in turn."""
_FEWEST_ROWS = 256
"""With fewer a start by copying would be made of noise."""
_UNSEEN = 0.1
"""Added to the count of every token, so that tokens that training never saw can be copied too."""
_TOKEN_RIDGE, _STATE_RIDGE, _HEAD_RIDGE = 1e-4, 1e-3, 16.0
"""Ridges, as shares of the mean variance. The head's is large: the more it is whitened, the more its rare
directions outshout the token that is meant."""


def can_copy(model: Drafter) -> bool:
    """Whether ``start_from_copying`` knows this drafter: EAGLE-3 with an ordinary Llama layer."""
    return type(model) is Eagle3Drafter and type(model.layers[0]) is LlamaLayer


def rows_needed(hidden_size: int) -> int:
    """Captured rows that the regressions want."""
    return max(16384, 4 * hidden_size)


@dataclass(frozen=True, slots=True)
class TokenSpace:
    """Tokens as the layer's input holds them, with directions of equal variance."""

    mean: Tensor
    """Of the normed embedding over the traffic ``[H]``."""
    axes: Tensor
    """Principal directions ``[H, H]``, a column each, the largest first."""
    whiten: Tensor
    """``[r, H]``: from a normed embedding without its mean to the token space."""

    @classmethod
    def of(cls, embeds: Tensor, weight: Tensor, size: int) -> TokenSpace:
        """From normed embeddings ``[V, H]`` and their shares of the traffic ``[V]``."""
        mean = weight @ embeds
        centred = embeds - mean
        values, axes = torch.linalg.eigh((centred * weight[:, None]).T @ centred)
        values, axes = values.flip(0), axes.flip(1)
        scale = (values[:size] + 0.02 * values[:size].mean()).rsqrt()
        return cls(mean, axes, (axes[:, :size] * scale).T)

    def __call__(self, embeds: Tensor) -> Tensor:
        """``[n, H]`` to ``[n, r]``."""
        return (embeds - self.mean) @ self.whiten.T


@torch.no_grad()
def start_from_copying(
    model: Eagle3Drafter, sample: Iterable[tuple[Tensor, Tensor]], counts: Tensor, *, seed: int = 0
) -> float | None:
    """Write the weights described above into a drafter whose tables are in place.

    Args:
        model: One for which ``can_copy`` holds; other weights are left as they are.
        sample: Documents as ``(aux states [n, A, H], own token and the one before [n, 2])``; ``rows_needed``
            rows are enough, fewer work less well.
        counts: How often each draft token was generated ``[V]``.
        seed: Of the random directions.

    Returns:
        Share of the variance of the own token that the drafter's first state holds, 0 to 1; None, and nothing
        is changed, when the sample has too few rows.
    """
    config, layer = model.config, model.layers[0]
    size, device = config.hidden_size, model.fc.weight.device
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def tokens_of(ids: Tensor) -> Tensor:
        return layer.input_layernorm(model.embed_weight[ids].float())

    weight = counts.to(device).float() + _UNSEEN
    weight = weight / weight.sum()
    embeds = tokens_of(model.target_ids(torch.arange(config.draft_vocab_size, device=device)))
    space = TokenSpace.of(embeds, weight, max(1, size // 3))

    # The fusion: the own token in the first entries, then the one before, random directions in the rest.
    documents = [(_before_fusion(model, aux.to(device)), ids.to(device)) for aux, ids in sample]
    if sum(len(rows) for rows, _ in documents) < _FEWEST_ROWS:
        return None
    states = torch.cat([rows for rows, _ in documents])
    ids = torch.cat([ids for _, ids in documents])
    del documents
    own = space(tokens_of(ids[:, 0]))
    before = space(tokens_of(ids[:, 1]))[:, : max(1, size // 6)]
    reader = _ridge(states[:, :size], own, _STATE_RIDGE)
    read = states[:, :size] @ reader.T
    held = 1.0 - float((read - own).square().sum() / own.square().sum())
    wanted, taken = own.shape[1], own.shape[1] + before.shape[1]
    fusion = torch.zeros_like(model.fc.weight, dtype=torch.float32)
    fusion[:wanted, :size] = _unit(reader, read)
    reader = _ridge(states, before, _STATE_RIDGE)
    fusion[wanted:taken] = _unit(reader, states @ reader.T)
    spread = states.std(0).clamp(min=1e-4)
    fusion[taken:] = random(size - taken, states.shape[1]) / spread / math.sqrt(states.shape[1])
    turn = torch.linalg.qr(random(size, size))[0]  # so that no channel of the residual stream is a token axis
    model.fc.weight.copy_(turn @ fusion)

    # Queries and keys: each key head compares tokens along its own random directions.
    entered = layer.hidden_norm(states @ model.fc.weight.float().T)
    decode = _ridge(entered, own, _STATE_RIDGE)
    still = _still_entries(layer)
    groups, kv, d = layer.num_heads // layer.num_kv_heads, layer.num_kv_heads, layer.head_dim
    queries = layer.self_attn.q_proj.weight.view(kv, groups, d, 2 * size)
    keys = layer.self_attn.k_proj.weight.view(kv, d, 2 * size)
    for head in range(kv):
        directions = random(len(still), wanted)
        match = (own @ directions.T).square().sum(-1).mean()
        gain = (_MATCH / layer.scale / match).sqrt()
        keys[head, still] = 0.0
        keys[head, still, size:] = gain * (directions @ decode)
        queries[head][:, still] = 0.0
        queries[head][:, still, :size] = gain * (directions @ space.whiten)

    # Values: the main directions of the embedding, dealt out to the heads; then back to what the head reads.
    count = min(size, kv * d)
    basis = space.axes[:, :count].T
    reads = _what_head_reads(model, weight)
    root = weight.sqrt()[:, None]
    back = _ridge(root * (embeds @ basis.T), root * reads, _TOKEN_RIDGE)
    back *= _COPIED / (weight @ reads.square().mean(-1)).sqrt() / groups
    values = layer.self_attn.v_proj.weight.view(kv, d, 2 * size)
    output = layer.self_attn.o_proj.weight.view(size, kv, groups, d)
    for head in range(kv):
        mine = torch.arange(head, count, kv, device=device)
        values[head] = 0.0
        values[head, : len(mine), :size] = basis[mine]
        output[:, head, :, : len(mine)] = back[:, mine][:, None]
    return held


@torch.no_grad()
def scale_last_norm(objective: Eagle3Objective, batches: Sequence[Batch]) -> float:
    """Scale the drafter's last norm for the smallest loss on some batches; returns the factor."""
    model = objective.model
    training = model.training
    model.eval()
    target_scale = model.norm.weight.detach().clone()
    losses = dict.fromkeys(_SCALES, 0.0)
    for batch in batches:
        for factor in _SCALES:
            model.norm.weight.copy_(target_scale * factor)
            losses[factor] += float(objective.matches(batch, objective.steps)[1].loss.sum())
            # What the target says is the same for every factor.
            batch = replace(batch, greedy=batch.notes["greedy"], centroid=batch.notes.get("centroid"))
    best = min(_SCALES, key=losses.__getitem__)
    model.norm.weight.copy_(target_scale * best)
    model.train(training)
    return best


def _before_fusion(model: Eagle3Drafter, aux: Tensor) -> Tensor:
    """Input of ``fc`` in float32 ``[n, A * H]`` from ``[n, A, H]``."""
    x = aux.float()
    if model.config.norm_before_fc:
        return model.input_norm(x.flatten(1))
    if model.config.fc_norm:
        x = torch.stack([norm(x[:, i]) for i, norm in enumerate(model.fc_norm)], 1)
    return x.flatten(1)


def _what_head_reads(model: Eagle3Drafter, weight: Tensor) -> Tensor:
    """For each draft token the direction of the residual stream that raises its logit above others ``[V,
    H]``."""
    rows = model.lm_head.weight.float() * model.norm.weight
    rows = rows - weight @ rows
    spread = (rows * weight[:, None]).T @ rows
    spread.diagonal().add_(_HEAD_RIDGE * spread.diagonal().mean())
    return torch.linalg.solve(spread, rows.T).T


def _still_entries(layer: LlamaLayer) -> Tensor:
    """Entries of a head that turn little over ``_SPAN`` positions, a quarter of them at least."""
    speed = layer.rope.inv_freq
    half = len(speed)
    slow = torch.nonzero(speed * _SPAN <= _ANGLE).flatten()
    unturned = torch.arange(2 * half, layer.head_dim)
    if 2 * len(slow) + len(unturned) < layer.head_dim // 4:
        slow = torch.arange(half - max(1, half // 4), half)
    return torch.cat((slow, slow + half, unturned))


def _unit(reader: Tensor, read: Tensor) -> Tensor:
    """``reader [b, a]`` with rows scaled so that what they read ``[n, b]`` has unit variance."""
    return reader / read.std(0).clamp(min=1e-6)[:, None]


def _ridge(x: Tensor, y: Tensor, share: float) -> Tensor:
    """``M [b, a]`` that minimises ``|x M' - y|`` for ``x [n, a]``, ``y [n, b]``, with a small norm."""
    gram = x.T @ x
    gram.diagonal().add_(share * gram.diagonal().mean() + 1e-12)
    return torch.linalg.solve(gram, x.T @ y).T
