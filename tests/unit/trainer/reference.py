"""The slow, obvious EAGLE-3: one position, one head, one key at a time, in float32 (or float64), from
weights by name.

It defines what the trainer must compute. It shares no code with the trainer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float, rotary_dim: int | None = None) -> Tensor:
    """Rotate one head ``[d]``: entry i is paired with entry i + rotary_dim / 2."""
    d = rotary_dim or len(x)
    out = list(x)
    for i in range(d // 2):
        angle = position / theta ** (2 * i / d)
        c, s = math.cos(angle), math.sin(angle)
        a, b = x[i], x[i + d // 2]
        out[i], out[i + d // 2] = a * c - b * s, b * c + a * s
    return torch.stack(out)


def rotate_pairs(x: Tensor, position: int, speeds: list[float], scale: float) -> Tensor:
    """Rotate one head ``[d]``: entries 2i and 2i + 1 are a pair, turned by ``position * speeds[i]``."""
    out = []
    for i, speed in enumerate(speeds):
        c, s = scale * math.cos(position * speed), scale * math.sin(position * speed)
        a, b = x[2 * i], x[2 * i + 1]
        out += [a * c - b * s, b * c + a * s]
    return torch.stack(out)


def latent_speeds(d: int, rope: dict) -> tuple[list[float], float, float]:
    """``(radians per position of each pair, factor on cos and sin, factor on the scores)``.

    Yarn (arXiv:2309.00071) with DeepSeek's two mscale settings: slow pairs, which turn less than
    ``beta_slow`` times in the original length, are stretched by ``factor``; fast ones, more than
    ``beta_fast`` times, are left alone; between them the stretch fades linearly over whole pair indices.
    """
    theta = rope["rope_theta"]
    speeds = [theta ** (-2 * i / d) for i in range(d // 2)]
    if rope["rope_type"] == "default":
        return speeds, 1.0, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return d * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(rope["beta_fast"])), 0)
    last = min(math.ceil(pair_that_turns(rope["beta_slow"])), d - 1)
    for i in range(d // 2):
        stretched = min(max((i - first) / (last - first), 0.0), 1.0)
        speeds[i] = speeds[i] * (1 - stretched) + speeds[i] / factor * stretched
    on_score = 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1
    on_rotation = (0.1 * rope["mscale"] * math.log(factor) + 1) / on_score
    return speeds, on_rotation, on_score**2


class Reference:
    """A drafter as a serving engine runs it: a key-value cache, one token at a time."""

    def __init__(self, weights: dict[str, Tensor], config, embed: Tensor) -> None:
        self.w, self.c, self.embed = weights, config, embed

    def combine(self, aux: Tensor) -> Tensor:
        """``aux [A, H]`` of one position."""
        x = aux.reshape(-1)
        if self.c.norm_before_fc:
            x = rms(x, self.w["input_norm.weight"], self.c.rms_norm_eps)
        if self.c.fc_norm:
            parts = [rms(a, self.w[f"fc_norm.{i}.weight"], self.c.rms_norm_eps) for i, a in enumerate(aux)]
            x = torch.cat(parts)
        return self.w["fc.weight"] @ x

    def _head(self, layer: int, name: str, x: Tensor, head: int) -> Tensor:
        d = self.c.head_dim
        weight = self.w[f"layers.{layer}.self_attn.{name}_proj.weight"][head * d : (head + 1) * d]
        out = weight @ x
        if self.c.attention_bias:
            out = out + self.w[f"layers.{layer}.self_attn.{name}_proj.bias"][head * d : (head + 1) * d]
        if self.c.layer == "qwen3" and name in "qk":
            out = rms(out, self.w[f"layers.{layer}.self_attn.{name}_norm.weight"], self.c.rms_norm_eps)
        return out

    def _latent_heads(self, layer: int, x: Tensor, position: int) -> tuple[list, list, list, float]:
        """Queries, keys and values of every head of latent attention, and the factor on the scores."""
        c, shape, eps = self.c, self.c.latent, self.c.rms_norm_eps
        w = {
            n.removeprefix(f"layers.{layer}.self_attn."): v
            for n, v in self.w.items()
            if n.startswith(f"layers.{layer}.self_attn.")
        }
        nope, turned, value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
        speeds, on_rotation, on_score = latent_speeds(turned, c.rope)
        if shape.q_lora_rank is None:
            q = w["q_proj.weight"] @ x
        else:
            q = w["q_b_proj.weight"] @ rms(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"], eps)
        a = w["kv_a_proj_with_mqa.weight"] @ x
        latent, shared = a[: shape.kv_lora_rank], a[shape.kv_lora_rank :]
        kv = w["kv_b_proj.weight"] @ rms(latent, w["kv_a_layernorm.weight"], eps)
        queries, keys, values = [], [], []
        for h in range(c.num_heads):
            mine = q[h * (nope + turned) : (h + 1) * (nope + turned)]
            both = kv[h * (nope + value) : (h + 1) * (nope + value)]
            queries.append(torch.cat([mine[:nope], rotate_pairs(mine[nope:], position, speeds, on_rotation)]))
            keys.append(torch.cat([both[:nope], rotate_pairs(shared, position, speeds, on_rotation)]))
            values.append(both[nope:])
        return queries, keys, values, on_score / math.sqrt(nope + turned)

    def _heads(self, layer: int, x: Tensor, position: int) -> tuple[list, list, list, float]:
        """Queries, keys and values of every head, and the factor on the scores."""
        c = self.c
        if c.latent is not None:
            return self._latent_heads(layer, x, position)
        theta, rotary = c.rope["rope_theta"], int(c.head_dim * c.rope.get("partial_rotary_factor", 1.0))
        return (
            [rotate(self._head(layer, "q", x, h), position, theta, rotary) for h in range(c.num_heads)],
            [rotate(self._head(layer, "k", x, h), position, theta, rotary) for h in range(c.num_kv_heads)],
            [self._head(layer, "v", x, h) for h in range(c.num_kv_heads)],
            1 / math.sqrt(c.head_dim),
        )

    def forward(self, state: Tensor, token: int, position: int, cache: list) -> tuple[Tensor, Tensor]:
        """One token through all layers.

        Returns:
            ``(state for the head, state fed back)``; keys and values are appended to ``cache``.
        """
        c, w, eps = self.c, self.w, self.c.rms_norm_eps
        hidden, residual = state, None
        for layer in range(c.num_layers):
            name = f"layers.{layer}."
            if layer == 0:
                x, residual = self.enter(hidden, self.embed[token])
            else:
                residual = residual + hidden
                x = rms(residual, w[name + "input_layernorm.weight"], eps)
            queries, keys, values, scale = self._heads(layer, x, position)
            cache[layer].append((keys, values))
            outputs = []
            for h, q in enumerate(queries):
                kv = h // (c.num_heads // c.num_kv_heads)
                scores = torch.stack([q @ k[kv] * scale for k, _ in cache[layer]])
                probs = torch.softmax(scores, 0)
                outputs.append(sum(p * v[kv] for p, (_, v) in zip(probs, cache[layer], strict=True)))
            attended = w[name + "self_attn.o_proj.weight"] @ torch.cat(outputs)
            if c.attention_bias:
                attended = attended + w[name + "self_attn.o_proj.bias"]
            residual = residual + attended
            y = rms(residual, w[name + "post_attention_layernorm.weight"], eps)
            gate, up = w[name + "mlp.gate_proj.weight"] @ y, w[name + "mlp.up_proj.weight"] @ y
            if c.mlp_bias:
                gate, up = gate + w[name + "mlp.gate_proj.bias"], up + w[name + "mlp.up_proj.bias"]
            hidden = w[name + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
            if c.mlp_bias:
                hidden = hidden + w[name + "mlp.down_proj.bias"]
        return self.finish(residual + hidden)

    def enter(self, state: Tensor, embed: Tensor) -> tuple[Tensor, Tensor]:
        """``(input of the first attention, residual)``."""
        eps = self.c.rms_norm_eps
        normed = rms(state, self.w["layers.0.hidden_norm.weight"], eps)
        x = torch.cat([rms(embed, self.w["layers.0.input_layernorm.weight"], eps), normed])
        return x, normed if self.c.norm_before_residual else state

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """``(state for the head, state fed back)``."""
        normed = rms(stream, self.w["norm.weight"], self.c.rms_norm_eps)
        return normed, normed if self.c.norm_output else stream

    def follow(self, state: Tensor, token: int) -> tuple[Tensor, int]:
        """``(state, token)`` that the next draft step reads."""
        return state, token

    def chain(self, aux: Tensor, tokens, first_position: int, row: int, steps: int) -> list[Tensor]:
        """States before the head for drafting after ``row`` of one document, tokens forced.

        Args:
            aux: ``[n, A, H]`` of the document.
            tokens: x[t+1] of its rows.
            first_position: Position of row 0.
            row: The chain starts here.
            steps: At most this many; fewer when the document ends.
        """
        cache = [[] for _ in range(self.c.num_layers)]
        for t in range(row + 1):
            normed, state = self.forward(self.combine(aux[t]), int(tokens[t]), first_position + t, cache)
        out = [normed]
        for k in range(1, steps):
            if row + k >= len(tokens):
                break
            state, token = self.follow(state, int(tokens[row + k]))
            normed, state = self.forward(state, token, first_position + row + k, cache)
            out.append(normed)
        return out


class Eagle1Reference(Reference):
    """EAGLE-1: embedding and state are fused into the residual stream, which no norm opens or closes."""

    def combine(self, aux: Tensor) -> Tensor:
        return aux[0]

    def enter(self, state: Tensor, embed: Tensor) -> tuple[Tensor, Tensor]:
        x = self.w["layers.0.fc.weight"] @ torch.cat([embed, state])
        return x, x

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return stream, stream


class ParallelReference(Reference):
    """P-EAGLE: later steps read one learnt state and one fixed token."""

    def follow(self, state: Tensor, token: int) -> tuple[Tensor, int]:
        mask = self.w["mask_hidden"].reshape(len(self.c.aux_layer_ids), -1)
        return self.combine(mask), self.c.mask_token_id


class MedusaReference:
    """Medusa: every head reads the same final state."""

    def __init__(self, weights: dict[str, Tensor], config, embed: Tensor) -> None:
        self.w, self.c = weights, config

    def chain(self, aux: Tensor, tokens, first_position: int, row: int, steps: int) -> list[Tensor]:
        out = []
        for head in range(min(steps, self.c.draft_steps, len(tokens) - row)):
            x = aux[row, 0]
            for layer in range(self.c.num_layers):
                y = self.w[f"blocks.{head}.layers.{layer}.weight"] @ x
                x = x + y * torch.sigmoid(y)
            out.append(x)
        return out


def smooth_l1(x: Tensor, y: Tensor) -> Tensor:
    d = (x - y).abs()
    return torch.where(d < 1, d * d / 2, d - 0.5).mean()


def reference_loss(
    reference: Reference, documents, target_head: Tensor, draft_ids, *, steps: int, decay: float,
    feature_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss of a batch by definition.

    For every supervised row and step whose predicted token is supervised too and whose target argmax is in
    the draft
    vocabulary: cross-entropy between the target's distribution restricted to that vocabulary and the
        drafter's.

    Returns:
        ``(sum over rows and steps of decay**k * weight * loss, correct [steps], count [steps])``.
    """
    head = reference.w["lm_head.weight"]
    total = torch.zeros((), dtype=head.dtype)
    correct, count = torch.zeros(steps), torch.zeros(steps)
    ids = list(range(len(target_head))) if draft_ids is None else [int(i) for i in draft_ids]
    for doc in documents:
        teacher_of = {int(r): i for i, r in enumerate(doc.has_final.nonzero()[0])}
        for row in range(len(doc.tokens)):
            if doc.weight[row] == 0:
                continue
            states = reference.chain(doc.aux.to(head.dtype), doc.tokens, doc.first_position, row, steps)
            for k, state in enumerate(states):
                if row + k >= len(doc.tokens) or doc.weight[row + k] == 0:
                    break  # the predicted token is not supervised: the chain ends
                logits = head @ state
                if row + k in teacher_of:
                    full = target_head @ doc.final[teacher_of[row + k]].to(head.dtype)
                    best = int(full.argmax())
                    q = torch.softmax(full[ids], 0)
                else:
                    best = int(doc.labels[row + k])
                    q = torch.tensor([float(i == best) for i in ids], dtype=head.dtype)
                count[k] += 1
                if best not in ids:
                    continue
                loss = -(q * torch.log_softmax(logits, 0)).sum()
                if feature_weight:
                    loss = loss + feature_weight * smooth_l1(
                        state, doc.final[teacher_of[row + k]].to(head.dtype)
                    )
                total = total + decay**k * float(doc.weight[row]) * loss
                correct[k] += float(ids[int(logits.argmax())] == best)
    return total, correct, count
