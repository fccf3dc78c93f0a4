"""Better starts than random: scales measured on the data, and weights lent by the target."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import Checkpoint, Target

from .layers import LlamaLayer
from .model import Eagle3Drafter

_LARGEST_SCALE = 10.0


def measure(aux: Tensor) -> Tensor:
    """Root mean square of each channel of some states ``[n, A, H]`` after one norm over all of a row
    ``[A, H]``."""
    x = aux.float()
    x = x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + 1e-6)
    return x.square().mean(0).sqrt()


def calibrate(model: Eagle3Drafter, aux: Tensor) -> None:
    """Set the norm before the fusion so that each channel has about unit size.

    Args:
        model: With ``norm_before_fc``; others are left alone.
        aux: States of a few thousand rows ``[n, A, H]``.
    """
    if not model.config.norm_before_fc:
        return
    scale = (1.0 / measure(aux).clamp(min=1.0 / _LARGEST_SCALE)).flatten()
    model.input_norm.weight.data.copy_(scale.to(model.input_norm.weight))


def start_from_identity(model: Eagle3Drafter, aux: Tensor) -> None:
    """Make the first state the last captured layer's: the head already reads that basis."""
    config = model.config
    size, count = config.hidden_size, len(config.aux_layer_ids)
    block = torch.eye(size)
    if config.norm_before_fc:
        last = model.input_norm.weight.detach().view(count, size)[-1].float().cpu()
        block = torch.diag(1.0 / last)
        block = block / measure(aux)[-1].square().mean().sqrt()
    model.fc.weight.data[:, (count - 1) * size :] += block.to(model.fc.weight)


def start_from_layer(model: Eagle3Drafter, target: Target, aux: Tensor) -> None:
    """Copy the target's last decoder layer into the drafter's first one, beside ``start_from_identity``.

    The drafter's residual stream is the target's divided by its size, so what the layer adds is divided too.

    Raises:
        ConfigError: The drafter's layer is not a Llama layer of the target's sizes.
        InputError: The target's folder lacks the layer's tensors.
    """
    config = model.config
    layer = model.layers[0]
    if not isinstance(layer, LlamaLayer):
        raise ConfigError(f"init is 'layer' but layer is {config.layer!r}; only llama layers can be lent")
    tensors = Checkpoint(target.path)
    prefix = target.embed.name.removesuffix("embed_tokens.weight") + f"layers.{target.num_hidden_layers - 1}."
    size = config.hidden_size

    def lent(name: str) -> Tensor:
        if prefix + name not in tensors:
            raise InputError(
                f"{str(target.path)!r} has no tensor {prefix + name!r}; --init layer needs the "
                "target's whole "
                "checkpoint (--target) of a Llama-like model"
            )
        return tensors.ref(prefix + name).torch().float()

    scale = 1.0 if not config.norm_before_residual and not config.norm_before_fc else _size_of_last(aux)
    before = lent("input_layernorm.weight")
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = lent(f"self_attn.{name}.weight") * before
            mine = getattr(layer.self_attn, name).weight
            if mine.shape != (weight.shape[0], 2 * size):
                raise ConfigError(
                    f"init is 'layer' but the drafter's {name} has {mine.shape[0]} rows, the target's "
                    f"{weight.shape[0]}; leave num_heads, num_kv_heads and head_dim unset"
                )
            mine[:, size:] = weight
        layer.self_attn.o_proj.weight.copy_(lent("self_attn.o_proj.weight") / scale)
        layer.post_attention_layernorm.weight.copy_(lent("post_attention_layernorm.weight"))
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = lent(f"mlp.{name}.weight")
            mine = getattr(layer.mlp, name).weight
            if mine.shape != weight.shape:
                raise ConfigError(
                    "init is 'layer' but intermediate_size differs from the target's; leave it unset"
                )
            mine.copy_(weight / scale if name == "down_proj" else weight)


def _size_of_last(aux: Tensor) -> float:
    """Typical size of the last captured layer's states (median over rows of their root mean square)."""
    return float(np.median(aux[:, -1].float().square().mean(-1).sqrt().numpy()))
