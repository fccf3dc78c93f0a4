"""Training-time test: the drafter is unrolled as it will be when serving, all positions at once.

Row ``t`` of a document holds the aux states of position t and token x[t+1]. Index table, for a row that
starts a chain:

    step            0              1                    k
    state in        aux[t]         own state (t, 0)     own state (t, k-1)
    token in        x[t+1]         x[t+2]               x[t+k+1]        (true tokens, never the drafter's own)
    rotary          t              t+1                  t+k
    sees            rows 0..t      rows 0..t + own 1    rows 0..t + own 1..k
    predicts        x[t+2]         x[t+3]               x[t+k+2]
    teacher         final[t+1]     final[t+2]           final[t+k+1]

Only supervised rows start chains. The other rows (the prompt) are seen through their keys and values alone,
so the last layer computes nothing else for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from .attention import Layout, attend
from .batch import Batch
from .drafter import Chains, Step

if TYPE_CHECKING:
    from .model import DraftConfig


class Chained(Protocol):
    """A drafter that continues its own state: what ``unroll`` and ``propose`` ask of it."""

    config: DraftConfig
    layers: nn.ModuleList

    def combine(self, states: Tensor) -> Tensor: ...
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def feed(self, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]: ...
    def finish(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def best(self, hidden: Tensor) -> Tensor: ...


def unroll(model: Chained, batch: Batch, steps: int) -> Chains:
    """Run the drafter ``steps`` times, feeding its own state back.

    Send a bool mask ``[n]`` into the generator to drop chains before the next step.
    """
    heads = model.config.num_heads
    rows = torch.arange(batch.num_supervised, device=batch.rows.device)
    last = len(model.layers) - 1
    # Step 0: every row gives keys and values; the last layer answers only for supervised rows.
    hidden = model.combine(batch.aux)

    def layout_of(queries: Tensor) -> Layout:
        return Layout(queries, batch.starts, heads=heads, keys=batch.num_rows, like=hidden)

    everyone = layout_of(torch.arange(batch.num_rows, device=hidden.device)) if last else None
    layout = layout_of(batch.rows)
    embeds = model.embed(batch.tokens)
    residual = None
    keys, values = [], []
    for i, layer in enumerate(model.layers):
        x, residual = layer.enter(embeds, hidden, residual)
        k, v = layer.key_value(x, batch.positions)
        keys.append(k)
        values.append(v)
        if i == last:
            q = layer.query(x[batch.rows], batch.positions[batch.rows])
            residual = residual[batch.rows]
            attended = attend(q, k, v, None, None, layout, layer.scale)
        else:
            attended = attend(layer.query(x, batch.positions), k, v, None, None, everyone, layer.scale)
        hidden, residual = layer.leave(attended, residual)
    normed, state = model.finish(hidden, residual)
    keep = yield Step(0, rows, normed)

    own_keys: list[list[Tensor]] = [[] for _ in model.layers]
    own_values: list[list[Tensor]] = [[] for _ in model.layers]
    for index in range(1, steps):
        alive = batch.run_left[rows] >= index
        if keep is not None:
            alive &= keep
        if not bool(alive.all()):
            kept = alive.nonzero()[:, 0]
            rows, state = rows[kept], state[kept]
            own_keys = [[k[kept] for k in layer] for layer in own_keys]
            own_values = [[v[kept] for v in layer] for layer in own_values]
            layout = layout_of(batch.rows[rows])
        if not len(rows):
            return
        source = batch.rows[rows]
        positions = batch.positions[source] + index
        hidden, embeds = model.feed(state, batch.tokens[source + index])
        residual = None
        for i, layer in enumerate(model.layers):
            x, residual = layer.enter(embeds, hidden, residual)
            k, v = layer.key_value(x, positions)
            own_keys[i].append(k)
            own_values[i].append(v)
            attended = attend(
                layer.query(x, positions), keys[i], values[i],
                torch.stack(own_keys[i], 1), torch.stack(own_values[i], 1), layout, layer.scale,
            )  # fmt: skip
            hidden, residual = layer.leave(attended, residual)
        normed, state = model.finish(hidden, residual)
        keep = yield Step(index, rows, normed)


@torch.no_grad()
def propose(model: Chained, aux: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
    """Draft greedily after one prefix, as a server does: own tokens, own states.

    Args:
        model: Its embedding must be set.
        aux: Aux states of the prefix ``[n, A, H]``.
        tokens: x[t+1] of its rows ``[n]``; the last one is the token just sampled.
        steps: Tokens to draft.
        first_position: Position of row 0.

    Returns:
        Target ids ``[steps]`` int64.
    """
    n, last = len(tokens), len(model.layers) - 1
    heads = model.config.num_heads
    device = tokens.device
    starts, final_row = torch.zeros(1, dtype=torch.int64), torch.tensor([n - 1], device=device)
    positions = first_position + torch.arange(n, device=device)
    hidden, residual = model.combine(aux), None
    everyone = Layout(torch.arange(n, device=device), starts, heads=heads, keys=n, like=hidden)
    layout = Layout(final_row, starts, heads=heads, keys=n, like=hidden)
    embeds = model.embed(tokens)
    keys, values = [], []
    for i, layer in enumerate(model.layers):
        x, residual = layer.enter(embeds, hidden, residual)
        k, v = layer.key_value(x, positions)
        keys.append(k)
        values.append(v)
        rows = everyone if i < last else layout
        if i == last:
            x, residual = x[-1:], residual[-1:]
        q = layer.query(x, positions if i < last else positions[-1:])
        hidden, residual = layer.leave(attend(q, k, v, None, None, rows, layer.scale), residual)
    out: list[Tensor] = []
    own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in model.layers]
    for index in range(1, steps + 1):
        normed, hidden = model.finish(hidden, residual)
        out.append(model.best(normed))
        if index == steps:
            break
        (hidden, embeds), residual = model.feed(hidden, out[-1]), None
        here = positions[-1:] + index
        for i, layer in enumerate(model.layers):
            x, residual = layer.enter(embeds, hidden, residual)
            k, v = layer.key_value(x, here)
            own[i][0].append(k)
            own[i][1].append(v)
            attended = attend(
                layer.query(x, here), keys[i], values[i],
                torch.stack(own[i][0], 1), torch.stack(own[i][1], 1), layout, layer.scale,
            )  # fmt: skip
            hidden, residual = layer.leave(attended, residual)
    return torch.cat(out)
