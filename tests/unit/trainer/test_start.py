"""Starts that are better than random begin where they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from specdec_trainer import start
from specdec_trainer.config import TrainConfig
from specdec_trainer.run import run
from trainer_fakes import TARGET_CONFIG, learnable_store, make_parts, tiny_target

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import load_target


def uneven_states(rows: int = 400) -> torch.Tensor:
    """Three layers whose sizes differ a lot, with one loud channel."""
    x = torch.randn(rows, 3, 8, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([0.2, 1.0, 5.0])[:, None]
    x[:, :, 2] *= 4
    return x


def test_calibration_gives_every_channel_the_same_size() -> None:
    model = make_parts(dtype=torch.float32, norm_before_fc=True).model
    aux = uneven_states()
    start.calibrate(model, aux)
    sizes = model.input_norm(aux.flatten(1)).square().mean(0).sqrt()
    limited = start.measure(aux).flatten() * 10 < 1
    torch.testing.assert_close(sizes[~limited], torch.ones(int((~limited).sum())), rtol=1e-3, atol=1e-3)
    assert (sizes[limited] < 1).all()


@pytest.mark.parametrize("norm_before_fc", [True, False])
def test_identity_starts_at_the_last_captured_layer(norm_before_fc: bool) -> None:
    model = make_parts(dtype=torch.float32, norm_before_fc=norm_before_fc).model
    aux = uneven_states()
    if norm_before_fc:
        start.calibrate(model, aux)
    model.fc.weight.data.zero_()
    start.start_from_identity(model, aux)
    first = model.combine(aux).detach()
    near = torch.cosine_similarity(first, aux[:, -1], dim=-1)
    assert float(near.min()) > 0.999


def whole_checkpoint(path: Path) -> Path:
    """A target with its last decoder layer."""
    tiny_target(path)
    rng = np.random.default_rng(1)
    c = TARGET_CONFIG
    h, i, q, kv = 16, c["intermediate_size"], 16, 8
    shapes = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i),
        "input_layernorm": (h,), "post_attention_layernorm": (h,),
    }  # fmt: skip
    lent = {
        f"model.layers.7.{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()
    }
    save_file({**load_file(path / "model.safetensors"), **lent}, path / "model.safetensors")
    return path


def test_a_lent_layer_answers_like_the_target_layer(tmp_path: Path) -> None:
    """With the embedding half at zero, the drafter's first layer is the target's layer, rescaled."""
    target = load_target(whole_checkpoint(tmp_path / "m"))
    model = make_parts(
        dtype=torch.float32, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
        vocab_size=40, draft_vocab_size=40, norm_before_residual=True, norm_before_fc=True,
        rms_norm_eps=1e-12,
    ).model  # fmt: skip
    layer = model.layers[0]
    aux = torch.randn(50, 3, 16) * 3
    layer.hidden_norm.weight.data.fill_(1)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.data.zero_()
    start.start_from_layer(model, target, aux)
    raw = aux[:, -1]
    tensors = load_file(target.path / "model.safetensors")
    w = {
        n.removeprefix("model.layers.7."): torch.from_numpy(t) for n, t in tensors.items() if "layers.7" in n
    }
    size = raw.square().mean(-1, keepdim=True).sqrt()
    x, residual = layer.enter(torch.randn(50, 16), raw, None)
    normed = raw / size * w["input_layernorm.weight"]
    # Values of one position that attends to itself alone.
    _, v = layer.key_value(x, torch.zeros(50, dtype=torch.int64))
    torch.testing.assert_close(v[:, 0], normed @ w["self_attn.v_proj.weight"].T, rtol=1e-4, atol=1e-4)
    hidden, out = layer.leave(torch.cat((v, v), 1), residual)
    typical = start._size_of_last(aux)
    attended = torch.cat((v[:, 0], v[:, 0]), -1) @ w["self_attn.o_proj.weight"].T
    stream = raw / size + attended / typical
    torch.testing.assert_close(out, stream, rtol=1e-4, atol=1e-4)
    y = stream / stream.square().mean(-1, keepdim=True).sqrt() * w["post_attention_layernorm.weight"]
    gated = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    torch.testing.assert_close(hidden, gated @ w["mlp.down_proj.weight"].T / typical, rtol=1e-3, atol=1e-3)


def test_lending_needs_the_whole_checkpoint_and_equal_sizes(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")
    store = learnable_store(target)
    common = {"target_path": target, "store": store, "tensorboard": False}
    with pytest.raises(
        InputError, match=r"has no tensor 'model\.layers\.7\.input_layernorm\.weight'; --init layer"
    ):
        run(TrainConfig(init="layer"), Path("shards"), out=tmp_path / "a", **common)
    common["target_path"] = whole_checkpoint(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"the drafter's k_proj has 16 rows, the target's 8"):
        run(TrainConfig(init="layer", num_kv_heads=2), Path("shards"), out=tmp_path / "b", **common)


@pytest.mark.parametrize("init", ["identity", "layer"])
def test_runs_from_these_starts_learn(tmp_path: Path, init: str) -> None:
    target = whole_checkpoint(tmp_path / "m")
    config = TrainConfig(
        init=init, calibrate=True, epochs=2, batch_tokens=90, ttt_steps=2, eval_draft_tokens=2,
        dtype="float32",
        input_dropout=0.1,
    )  # fmt: skip
    result = run(
        config, Path("shards"), out=tmp_path / "run", target_path=target, store=learnable_store(target),
        tensorboard=False,
    )  # fmt: skip
    assert np.isfinite(result.evaluation.mean_loss).all()
