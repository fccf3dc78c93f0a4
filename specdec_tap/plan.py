"""How much disk a capture and how much memory a training run will need, from a config.json alone.

Sizes of tensors are exact: the drafter is built without storage (torch's meta device) and its parameters are
counted. Activations follow from what each layer keeps for its backward pass; tests/unit/trainer/test_plan.py
compares that with what autograd really keeps. Importing this module loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError
from .target import ModelSizes, language_model_config, norm_eps

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ConfigOnly(ModelSizes):
    """What the trainer asks of a target, from its config; it has no tensors."""

    config: Mapping[str, Any]
    text_config: Mapping[str, Any]
    path: Path

    @property
    def norm_eps(self) -> float:
        return norm_eps(self.text_config)


def read_config(path: Path) -> ConfigOnly:
    """Read a model folder, a config.json, or a recipe (YAML with a ``model`` section).

    Raises:
        InputError: It is none of these, or a size is missing.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text()
        if file.suffix in (".yaml", ".yml"):
            import yaml

            loaded = yaml.safe_load(text)
            loaded = loaded.get("model") if isinstance(loaded, dict) else None
        else:
            loaded = json.loads(text)
    except (OSError, ValueError) as err:
        raise InputError(f"cannot read a model's config from {str(file)!r}: {err}") from err
    except Exception as err:  # PyYAML has exceptions of its own; it is imported only here
        raise InputError(f"{str(file)!r} is not valid YAML: {err}") from err
    if not isinstance(loaded, dict):
        raise InputError(
            f"{str(file)!r} holds no model config; expected an object (a recipe's under 'model')"
        )
    return ConfigOnly(loaded, language_model_config(loaded, file), path)


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """vLLM's default, ``(2, N // 2, N - 3)``, sorted and without repeats.

    Example:
        >>> default_aux_layer_ids(61)
        (2, 30, 58)
    """
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def recommended_layer(target: ConfigOnly) -> tuple[str, str]:
    """The drafter layer that fits a target, and why."""
    model_type = target.text_config.get("model_type", "unknown")
    if target.text_config.get("kv_lora_rank"):
        return "kimik2", f"{model_type} has latent attention; 'llama' works beside it too"
    return "llama", f"heads and MLP width of {model_type}, in the layer that every engine knows"


@dataclass(frozen=True)
class CapturePlan:
    """Bytes that a capture writes."""

    aux_layer_ids: tuple[int, ...]
    raw_bytes_per_token: int
    """Aux states and the final state of a response token, as they are."""
    stored_bytes_per_token: float
    """Average over prompt and response tokens, compressed."""
    tokens_per_s: float
    response_share: float
    gb_per_hour: float


def plan_capture(
    target: ConfigOnly,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    final_hidden: str = "response",
    tokens_per_s: float = 1000.0,
    response_share: float = 0.6,
    ratio: float = 1.5,
) -> CapturePlan:
    """Size of a capture.

    Args:
        target: The served model.
        aux_layer_ids: None takes vLLM's default.
        dtype: Of the served model.
        final_hidden: Setting of the tap.
        tokens_per_s: Prompt and response tokens that the server computes per second.
        response_share: Share of them that are response tokens, 0 to 1.
        ratio: What the lossless codec gains on bfloat16 states.
    """
    ids = aux_layer_ids or default_aux_layer_ids(target.num_hidden_layers)
    width = target.hidden_size * DTYPE_BYTES.get(dtype, 2)
    share = {"all": 1.0, "none": 0.0, "response": response_share}[final_hidden]
    stored = (len(ids) + share) * width / (ratio if dtype == "bfloat16" else 1.0)
    return CapturePlan(
        tuple(ids), (len(ids) + 1) * width, stored, tokens_per_s, response_share,
        stored * tokens_per_s * 3600 / 1e9,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainerPlan:
    """Memory of one training process; all in bytes but the counts."""

    algorithm: str
    layer: str
    parameters: int
    trainable_parameters: int
    weights: int
    """float32 masters of what is trained."""
    gradients: int
    optimizer: int
    tables: int
    """Embedding, the target's head, and the drafter's rows of it."""
    casts: int
    """Copies of the layers' weights in the dtype of the products, one for each draft step."""
    activations: int
    batch_tokens: int
    ttt_steps: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.tables + self.casts + self.activations

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def plan_training(
    target: ConfigOnly, settings: Any, *, aux_layer_ids: tuple[int, ...] | None = None
) -> TrainerPlan:
    """Memory of a training run.

    Args:
        target: The served model.
        settings: ``specdec_trainer.config.TrainConfig``.
        aux_layer_ids: None takes vLLM's default.

    Raises:
        ConfigError: The settings cannot make a drafter for this target.
    """
    import numpy as np
    import torch
    from specdec_trainer.algorithms import ALGORITHMS
    from specdec_trainer.build import draft_config, draft_vocabulary

    kind = ALGORITHMS[settings.algorithm]
    ids = aux_layer_ids or default_aux_layer_ids(target.num_hidden_layers)
    vocab = target.vocab_size
    chosen = draft_vocabulary(settings, target, np.zeros(vocab, dtype=np.int64))
    size = vocab if chosen is None else len(chosen)
    draft = draft_config(settings, target, ids if kind.reads == "aux" else (), size)
    with torch.device("meta"):
        model = kind(draft)
    trained = [
        (name, p) for name, p in model.named_parameters() if settings.train_lm_head or "lm_head" not in name
    ]
    count = sum(p.numel() for _, p in trained)
    layers = sum(p.numel() for name, p in trained if p.ndim == 2 and name.startswith(("layers.", "blocks.")))
    width = 4 if settings.dtype == "float32" else 2
    matrices = sum(p.numel() for name, p in trained if p.ndim == 2 and "lm_head" not in name)
    moments = 2 * count - (matrices if settings.optimizer == "muon" else 0)
    hidden = target.hidden_size
    head_rows = 0 if settings.train_lm_head else size
    return TrainerPlan(
        algorithm=settings.algorithm,
        layer=draft.layer,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable_parameters=count,
        weights=4 * count,
        gradients=4 * count,
        optimizer=4 * moments,
        tables=width * hidden * (2 * vocab + head_rows + (size if size != vocab else 0)),
        casts=0 if width == 4 else width * layers * (1 if draft.draft_steps else settings.ttt_steps),
        activations=settings.batch_tokens * activation_bytes(draft, settings.ttt_steps, width),
        batch_tokens=settings.batch_tokens,
        ttt_steps=settings.ttt_steps,
    )


def activation_bytes(draft: Any, steps: int, width: int) -> int:
    """Bytes that autograd keeps for one row that starts a chain of ``steps`` draft tokens.

    Args:
        draft: ``specdec_trainer.model.DraftConfig``.
        steps: Draft steps.
        width: Bytes of one number in the dtype of the products.
    """
    from specdec_trainer.algorithms import ALGORITHMS

    hidden, inner, heads = draft.hidden_size, draft.intermediate_size, draft.num_heads
    kind = ALGORITHMS[draft.algorithm]
    if (own_count := kind.activations(draft, steps)) is not None:
        return width * own_count
    latent = draft.latent
    if latent is None:
        key_heads, key, value, extra = draft.num_kv_heads, draft.head_dim, draft.head_dim, 2 * draft.head_dim
    else:
        key_heads, key, value = heads, latent.qk_head_dim, latent.v_head_dim
        extra = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank) + 3 * latent.qk_rope_head_dim
    # Of the first layer: inputs of two norms and of the projections, queries, what attention gives, inputs of
    # the MLP, its gate and its other half, the stream before the last norm, and what the loss needs.
    layer = heads * (key + value) + 2 * inner + extra
    later = (draft.num_layers - 1) * (layer + 5 * hidden)
    own = key_heads * (key + value)
    total = (
        steps * (kind.wide_activations * hidden + layer + later)
        + draft.num_layers * own * steps * (steps - 1) // 2
    )
    num_aux = len(draft.aux_layer_ids)
    first = own * draft.num_layers + 2 * hidden
    first += num_aux * hidden * (2 if draft.norm_before_fc or draft.fc_norm else 1)
    return width * (total + first)


def check_settings(values: Mapping[str, Any]) -> Any:
    """``TrainConfig`` of some settings, as flags or a recipe give them.

    Raises:
        ConfigError: Names every wrong one.
    """
    from specdec_trainer.config import TrainConfig, convert

    try:
        return TrainConfig(**convert(values, "plan"))
    except TypeError as err:
        raise ConfigError(str(err)) from err
