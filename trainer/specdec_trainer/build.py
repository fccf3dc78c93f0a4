"""From a configuration, shards and a target to a drafter ready to train."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import Target

from .algorithms import ALGORITHMS
from .config import TrainConfig
from .drafter import Drafter
from .export import check_embedding, load_drafter
from .kernels import has_bfloat16
from .loss import TeacherHead
from .mla import KIMI_K2, LatentShape
from .model import LAYERS, DraftConfig
from .objective import Eagle3Objective
from .rope import rope_parameters
from .vocab import automatic_size, choose_draft_ids, mappings


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and widths copied from the target, and why."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    reason: str


def draft_shape(target: Target, layer: str = "llama") -> Shape:
    """Choose the drafter's heads and MLP width from the target's config.

    Llama-like targets lend theirs as they are (also where head_dim differs from hidden / heads). Targets
    without ordinary heads (MLA, Mamba) get heads of 128, unless the drafter's layer is latent too.
    """
    text = target.text_config
    hidden = target.hidden_size
    heads, head_dim = text.get("num_attention_heads"), text.get("head_dim")
    model_type = text.get("model_type", "unknown")
    width = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    if layer == "kimik2":
        latent = latent_shape(target)
        if text.get("kv_lora_rank"):
            reason = f"latent attention and MLP width of the {model_type} target"
        else:
            heads = max(1, hidden // 128)
            reason = f"latent attention sized as Kimi-K2's ({model_type} target)"
        return Shape(int(heads), int(heads), latent.qk_head_dim, int(width), reason)
    if text.get("kv_lora_rank") or not isinstance(heads, int):
        head_dim = math.gcd(hidden, 128)
        heads = hidden // head_dim
        kv = math.gcd(heads, 8)
        return Shape(
            heads, kv, head_dim, int(width), f"{model_type} has no ordinary heads: heads of {head_dim}"
        )
    kv = text.get("num_key_value_heads") or heads
    head_dim = int(head_dim or hidden // heads)
    return Shape(heads, int(kv), head_dim, int(width), f"heads and MLP width of the {model_type} target")


_VALUE_ENTRIES = 512
"""Entries of a row's values that tell one copied token from others."""


def key_heads(config: TrainConfig, shape: Shape, hidden_size: int) -> int:
    """Key and value heads of a drafter: the target's, or more where those are too few to copy tokens.

    A drafter has one layer, so its keys and values stay a small part of the engine's cache.
    """
    if config.algorithm != "eagle3" or config.layer != "llama" or config.init == "random":
        return shape.num_kv_heads
    heads = config.num_heads or shape.num_heads
    wanted = min(hidden_size, _VALUE_ENTRIES) / (config.head_dim or shape.head_dim)
    enough = [n for n in range(shape.num_kv_heads, heads) if heads % n == 0 and n >= wanted]
    return enough[0] if enough else heads


def latent_shape(target: Target) -> LatentShape:
    """Sizes of latent attention: the target's own, and Kimi-K2's where it has none.

    The query always gets a latent, because vLLM 0.32 cannot load a drafter without one.
    """
    text = target.text_config
    rank = text.get("q_lora_rank") or min(KIMI_K2.q_lora_rank or 0, target.hidden_size)
    if not text.get("kv_lora_rank"):
        return replace(KIMI_K2, q_lora_rank=int(rank))
    try:
        return LatentShape(
            q_lora_rank=int(rank),
            kv_lora_rank=int(text["kv_lora_rank"]),
            qk_nope_head_dim=int(text["qk_nope_head_dim"]),
            qk_rope_head_dim=int(text["qk_rope_head_dim"]),
            v_head_dim=int(text["v_head_dim"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise InputError(
            f"config.json of the target has kv_lora_rank but not all latent sizes: {err!r}"
        ) from err


def fusion_norms(config: TrainConfig) -> tuple[bool, bool]:
    """``(norm_before_fc, fc_norm)`` where the settings leave them open."""
    possible = LAYERS[config.layer].engine.norm_before_fc
    before = config.norm_before_fc
    if before is None:
        before = possible and not config.fc_norm
    each = config.fc_norm
    if each is None:
        each = not possible and config.norm_before_fc is None
    return before, each


NO_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""Of drafters without attention."""


def mask_token(target: Target) -> int:
    """A token that text hardly holds: the target's padding token, or its last one."""
    for config in (target.text_config, target.config):
        value = config.get("pad_token_id")
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < target.vocab_size:
            return value
    return target.vocab_size - 1


def draft_rope(layer: str, target: Target, head_dim: int) -> dict[str, Any]:
    """Rope settings of the drafter: the target's."""
    rope = rope_parameters({**target.text_config, "head_dim": head_dim})
    if layer == "kimik2":
        # vLLM takes attention_factor 1.0 of latent attention for another kind of scaling.
        rope.pop("attention_factor", None)
    return rope


def draft_config(
    config: TrainConfig, target: Target, aux_layer_ids: tuple[int, ...], draft_vocab: int
) -> DraftConfig:
    """Shape and arithmetic of the drafter."""
    shape = draft_shape(target, config.layer)
    text = target.text_config
    kind = ALGORITHMS[config.algorithm]
    fuses = kind.reads == "aux"
    norm_before_fc, fc_norm = fusion_norms(config) if fuses else (False, False)
    mask_token_id = None
    if kind.needs_mask_token:
        mask_token_id = config.mask_token_id if config.mask_token_id is not None else mask_token(target)
    return DraftConfig(
        algorithm=config.algorithm,
        draft_steps=config.ttt_steps if kind.fixed_steps else 0,
        mask_token_id=mask_token_id,
        layer=config.layer,
        hidden_size=target.hidden_size,
        num_layers=config.num_layers,
        intermediate_size=config.intermediate_size or shape.intermediate_size,
        num_heads=config.num_heads or shape.num_heads,
        num_kv_heads=config.num_kv_heads or key_heads(config, shape, target.hidden_size),
        head_dim=config.head_dim or shape.head_dim,
        rms_norm_eps=target.norm_eps,
        rope=draft_rope(config.layer, target, shape.head_dim) if kind.needs_context else dict(NO_ROPE),
        max_position_embeddings=int(text.get("max_position_embeddings") or 32768),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=tuple(aux_layer_ids),
        norm_before_residual=config.norm_before_residual and fuses,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=config.norm_output and fuses,
        attention_bias=config.attention_bias,
        latent=latent_shape(target) if config.layer == "kimik2" else None,
        target_layers=target.num_hidden_layers,
    )


def draft_vocabulary(config: TrainConfig, target: Target, counts: np.ndarray) -> np.ndarray | None:
    """Target ids of the draft vocabulary, or None for all of them."""
    vocab = target.vocab_size
    if not ALGORITHMS[config.algorithm].reducible:
        if config.draft_vocab_size not in (None, vocab):
            raise ConfigError(
                f"draft_vocab_size is {config.draft_vocab_size:,}, but vLLM's drafter for algorithm "
                f"{config.algorithm} proposes from the whole vocabulary; leave it out"
            )
        return None
    size = config.draft_vocab_size
    if size is None:
        size = automatic_size(
            counts, smallest=config.min_draft_vocab_size, largest=config.max_draft_vocab_size
        )
    ids = choose_draft_ids(counts, size, always=end_tokens(target))
    return None if size == vocab else ids


def loss_rows(
    config: TrainConfig, draft_ids: np.ndarray | None, target: Target, counts: np.ndarray
) -> Tensor | None:
    """Draft ids that the training loss is taken over, ascending; None for all of them."""
    mine = counts if draft_ids is None else counts[draft_ids]
    size = config.loss_vocab_size
    if size is None and not ALGORITHMS[config.algorithm].reducible:
        size = automatic_size(
            counts, smallest=config.min_draft_vocab_size, largest=config.max_draft_vocab_size
        )
    if size is None or config.train_lm_head or size >= len(mine):
        return None
    always = end_tokens(target)
    if draft_ids is not None:
        always = np.flatnonzero(np.isin(draft_ids, always)).tolist()
    return torch.from_numpy(choose_draft_ids(mine, size, always=always))


def end_tokens(target: Target) -> list[int]:
    """End-of-sequence ids named by the target's config."""
    out: list[int] = []
    for config in (target.config, target.text_config):
        value = config.get("eos_token_id")
        out += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    return sorted(set(out))


def chosen_layers(config: TrainConfig, captured: tuple[int, ...]) -> tuple[int, ...]:
    """The captured layers that are the drafter's input, ascending."""
    if config.aux_layer_ids is None:
        return captured
    try:
        wanted = tuple(sorted({int(part) for part in config.aux_layer_ids.split(",")}))
    except ValueError:
        raise ConfigError(
            f"aux_layer_ids is {config.aux_layer_ids!r}; expected numbers such as 2,15,27"
        ) from None
    if missing := sorted(set(wanted) - set(captured)):
        raise ConfigError(
            f"aux_layer_ids names layer {missing[0]}, which the shards do not hold; they hold "
            f"{list(captured)}"
        )
    return wanted


def warm_start(
    path: Path, target: Target, aux_layer_ids: tuple[int, ...], algorithm: str = "eagle3"
) -> Drafter:
    """A published drafter to go on with.

    Args:
        path: Its folder.
        algorithm: That it must have.
        target: Of the shards; sizes must agree.
        aux_layer_ids: The drafter's input here. Ids one lower in the drafter's config are SGLang's spelling
            of the same layers; a config without ids means the engines' default for this target.

    Raises:
        InputError: It belongs to another target or other layers, or has an embedding of its own.
    """
    model = load_drafter(path, compute_dtype=torch.float32, target_layers=target.num_hidden_layers)
    theirs = model.config
    if theirs.algorithm != algorithm:
        raise InputError(
            f"{str(path)!r} is a drafter of algorithm {theirs.algorithm}; expected {algorithm} (--algorithm)"
        )
    if (theirs.hidden_size, theirs.vocab_size) != (target.hidden_size, target.vocab_size):
        raise InputError(
            f"{str(path)!r} is a drafter for hidden size {theirs.hidden_size:,} and vocabulary "
            f"{theirs.vocab_size:,}; this target has {target.hidden_size:,} and {target.vocab_size:,}"
        )
    check_embedding(path, target)
    ids = theirs.aux_layer_ids
    if ids != aux_layer_ids and tuple(i + 1 for i in ids) != aux_layer_ids:
        raise InputError(
            f"{str(path)!r} reads layers {list(ids)}, the shards hold {list(aux_layer_ids)}; capture "
            "its layers "
            "(SPECDEC_TAP_AUX_LAYER_IDS), or choose among the captured ones with --aux-layer-ids"
        )
    model.config = replace(theirs, aux_layer_ids=aux_layer_ids, target_layers=target.num_hidden_layers)
    return model


def adopt(model: Drafter, source: Drafter) -> None:
    """Copy a drafter's weights into one of the same shape, head rows by token where vocabularies differ."""
    weights = source.state_dict()
    theirs = torch.full((source.config.vocab_size,), -1, dtype=torch.int64)
    theirs[torch.arange(len(source.d2t)) + source.d2t] = torch.arange(len(source.d2t))
    rows = theirs[torch.arange(len(model.d2t)) + model.d2t]
    head = model.lm_head.weight.detach().clone()
    known = rows >= 0
    head[known] = weights["lm_head.weight"][rows[known]].to(head.dtype)
    model.load_state_dict({**weights, "lm_head.weight": head, "d2t": model.d2t})


def check_layers(aux_layer_ids: tuple[int, ...], target: Target) -> None:
    """Refuse shards whose layers cannot be this target's."""
    if max(aux_layer_ids, default=0) > target.num_hidden_layers:
        raise InputError(
            f"the shards hold states of layer {max(aux_layer_ids)}, but the target in "
            f"{str(target.path)!r} has "
            f"{target.num_hidden_layers} layers; they belong to another model"
        )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Dtype of the matrix products on ``device`` for the setting ``dtype``."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


def build(
    config: TrainConfig,
    draft: DraftConfig,
    target: Target,
    draft_ids: np.ndarray | None,
    device: torch.device,
    source: Drafter | None = None,
    counts: np.ndarray | None = None,
) -> Eagle3Objective:
    """Model, teacher and objective on ``device``.

    Args:
        config: Settings.
        draft: Shape of the drafter.
        target: Tables and head.
        draft_ids: Target ids of the draft vocabulary; None for all.
        device: Where to train.
        source: Drafter whose weights are the start, or None.
        counts: How often each target token was generated; chooses the rows of the loss.
    """
    dtype = compute_dtype(config.dtype, device)
    generator = torch.Generator().manual_seed(config.seed)
    model = ALGORITHMS[draft.algorithm](draft, compute_dtype=dtype)
    model.start(generator)
    head = target.head.torch()[: target.vocab_size]
    bias = None if target.head_bias is None else target.head_bias.torch()[: target.vocab_size]
    ids: Tensor | None = None
    if draft_ids is not None:
        ids = torch.from_numpy(draft_ids)
        model.d2t.copy_(torch.from_numpy(mappings(draft_ids, target.vocab_size)[0]))
    rows = head if ids is None else head[ids]
    if bias is not None and not config.train_lm_head:
        raise ConfigError(
            "the target's output head has a bias, which a drafter's head has not; set train_lm_head to true"
        )
    model.lm_head.weight.data.copy_(rows.float() * target.logit_scale)
    model.lm_head.weight.requires_grad_(config.train_lm_head)
    if config.train_lm_head and not model.own_head:
        raise ConfigError(
            f"train_lm_head is true, but algorithm {draft.algorithm} proposes with the target's own head; "
            "turn it off"
        )
    if hasattr(model, "norm") and (scale := final_norm_scale(target)) is not None:
        # The head expects states of this scale in each channel.
        model.norm.weight.data.copy_(scale)
    if source is not None:
        adopt(model, source)
    if not config.train_lm_head:
        model.lm_head.to(dtype)  # a frozen table needs no float32 master
    for layer in getattr(model, "layers", ()):
        layer.dropout = config.dropout
    model.input_dropout = config.input_dropout
    model.embed_weight = target.embed.torch()[: target.vocab_size]
    model.to(device)
    table = head.to(device, dtype)

    def teacher_over(ids: Tensor | None) -> TeacherHead:
        return TeacherHead(
            table, None if ids is None else ids.to(device),
            bias=None if bias is None else bias.to(device, dtype),
            logit_scale=target.logit_scale, logit_softcap=target.logit_softcap,
            temperature=config.teacher_temperature, hard_weight=config.hard_weight,
        )  # fmt: skip

    feature_weight = model.feature_weight if config.feature_weight is None else config.feature_weight
    rows = None if counts is None else loss_rows(config, draft_ids, target, counts)
    all_ids = torch.arange(target.vocab_size) if ids is None else ids
    return Eagle3Objective(
        model, teacher_over(ids), steps=config.ttt_steps, decay=config.ttt_decay,
        broken_keep=config.broken_keep, noise=config.noise, feature_weight=feature_weight, form=config.loss,
        loss_rows=None if rows is None else rows.to(device),
        loss_teacher=None if rows is None else teacher_over(all_ids[rows]),
    )  # fmt: skip


def plain_copy(model: Drafter, weights: dict[str, Tensor]) -> Drafter:
    """A drafter of the same shape with whole ``weights``, sharing their memory; for files."""
    with torch.device("meta"):
        copy = ALGORITHMS[model.config.algorithm](model.config, compute_dtype=model.compute_dtype)
    copy.load_state_dict(weights, assign=True)
    return copy


def final_norm_scale(target: Target) -> Tensor | None:
    """Factor of each channel in the target's final norm ``[H]``; None where it is not a known RMS norm."""
    if target.norm is None or target.norm_kind not in ("rms", "rms_one_plus"):
        return None
    weight = target.norm.torch().float()
    return weight + 1.0 if target.norm_kind == "rms_one_plus" else weight


def describe(draft: DraftConfig, model: Drafter, shape: Shape) -> dict[str, Any]:
    """Facts for logs and the model card."""
    trainable = sum(p.numel() for _, p in model.trainable())
    return {
        "algorithm": draft.algorithm,
        "architecture": model.summary(shape.reason),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": trainable,
        "trainable": [name for name, _ in model.trainable()],
        "draft_vocab_size": draft.draft_vocab_size,
        "vocab_size": draft.vocab_size,
        "aux_layer_ids": list(draft.aux_layer_ids),
        "draft_steps": draft.draft_steps,
    }
