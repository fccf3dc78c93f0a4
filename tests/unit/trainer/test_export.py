"""Exported folders: names, shapes, facts, and what the check refuses."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_trainer import build
from specdec_trainer.config import TrainConfig
from specdec_trainer.export import check_drafter, export_drafter, load_drafter
from specdec_trainer.mla import LatentShape
from specdec_trainer.run import run
from trainer_fakes import TARGET_CONFIG, learnable_store, make_parts, tiny_target

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import load_target

NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


def exported(tmp_path: Path, format: str = "vllm", **changes):
    parts = make_parts(dtype=torch.float32, **changes)
    out = tmp_path / format
    export_drafter(parts.model, out, format=format, target_name="org/model")
    return (
        parts.model,
        out,
        json.loads((out / "config.json").read_text()),
        load_file(out / "model.safetensors"),
    )


def edit(out: Path, change) -> list[str]:
    """Change the tensors of a folder in place; returns what the check says."""
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return check_drafter(out)


def test_vllm_layout(tmp_path: Path) -> None:
    """B95, B97, B100, B103, B106, B107: names, ids in both places, widths, head always, no bias."""
    _, out, config, tensors = exported(tmp_path, draft_vocab_size=11, **NORMS)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["num_aux_hidden_states"] == 3
    assert (config["vocab_size"], config["draft_vocab_size"]) == (23, 11)
    assert tensors["fc.weight"].shape == (8, 24)
    assert tensors["lm_head.weight"].shape == (11, 8)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (16, 16)
    assert "embed_tokens.weight" not in tensors
    assert not [n for n in tensors if n.endswith("bias")]
    assert {config[n] for n in NORMS} == {True}
    assert config["eagle_config"]["norm_before_fc"] is True
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o600
    assert check_drafter(out) == []


def test_maps_are_in_the_file_when_the_vocabulary_is_reduced(tmp_path: Path) -> None:
    """B63, B64, B65."""
    model, _, _, tensors = exported(tmp_path, draft_vocab_size=11)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(11) + tensors["d2t"], tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(tensors["d2t"], model.d2t)
    _, _, config, whole = exported(tmp_path)
    assert "d2t" not in whole
    assert config["draft_vocab_size"] == config["vocab_size"]


def test_second_layer_reads_hidden_size(tmp_path: Path) -> None:
    """B54."""
    *_, tensors = exported(tmp_path, num_layers=2)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (16, 8)
    assert "layers.1.hidden_norm.weight" not in tensors


def test_sglang_layout(tmp_path: Path) -> None:
    """B104: midlayer names, both maps always, ids that mean outputs of layers."""
    _, out, config, tensors = exported(tmp_path, "sglang", draft_vocab_size=11)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert set(tensors) == {
        "d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
        "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    }  # fmt: skip
    assert check_drafter(out) == []


def test_speculators_layout(tmp_path: Path) -> None:
    _, _, config, tensors = exported(tmp_path, "speculators", draft_vocab_size=11, **NORMS)
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert config["transformer_layer_config"]["vocab_size"] == 23
    assert config["norm_before_residual"] is True
    assert "layers.0.hidden_norm.weight" in tensors
    with pytest.raises(ConfigError, match=r"the speculators format names its target; pass --target-name"):
        export_drafter(make_parts(dtype=torch.float32).model, tmp_path / "x", format="speculators")


def test_trtllm_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no norm_before_residual, norm_before_fc, norm_output"):
        exported(tmp_path, "trtllm", **NORMS)
    _, out, config, tensors = exported(tmp_path, "trtllm", draft_vocab_size=11)
    # Outputs of layers, as SGLang counts.
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert "midlayer.hidden_norm.weight" in tensors
    assert check_drafter(out) == []


def test_kimik2_is_written_for_vllm_and_for_no_other(tmp_path: Path) -> None:
    """vLLM's speculators reader knows llama and qwen3 only."""
    latent = LatentShape(q_lora_rank=5, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=8, v_head_dim=5)
    changes = {"layer": "kimik2", "num_kv_heads": 4, "latent": latent, "fc_norm": True}
    _, out, config, tensors = exported(tmp_path, **changes)
    assert config["architectures"] == ["Eagle3DeepseekV3ForCausalLM"]
    assert config["model_type"] == "kimi_k2"
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in tensors
    assert check_drafter(out) == []
    for format in ("speculators", "sglang", "trtllm"):
        with pytest.raises(
            ConfigError, match=rf"layer kimik2 cannot be expressed in the {format} format; export for vllm"
        ):
            exported(tmp_path, format, **changes)
        assert not (tmp_path / format).exists()


@pytest.mark.parametrize("format", ["vllm", "sglang", "trtllm", "speculators"])
@pytest.mark.parametrize("changes", [
    {}, {"draft_vocab_size": 11, **NORMS}, {"fc_norm": True}, {"attention_bias": True, "mlp_bias": True},
    {"rope": {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
])  # fmt: skip
def test_a_folder_read_back_is_the_same_drafter(tmp_path: Path, format: str, changes: dict) -> None:
    """B73, B96: every fact that changes the arithmetic survives the round trip."""
    lacking = [
        n for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if changes.get(n)
    ]
    if format == "trtllm" and lacking:
        with pytest.raises(ConfigError, match=f"has no {', '.join(lacking)}"):
            exported(tmp_path, format, **changes)
        return
    model, out, _, _ = exported(tmp_path, format, **changes)
    loaded = load_drafter(out, compute_dtype=torch.float32)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        want = tensor if tensor.dtype == torch.int64 else tensor.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], want), name


def test_config_loads_in_transformers(tmp_path: Path) -> None:
    """B109: types are what strict validation expects, and nothing is null."""
    transformers = pytest.importorskip("transformers")
    _, out, config, _ = exported(tmp_path, draft_vocab_size=11)
    assert None not in config.values()
    loaded = transformers.AutoConfig.from_pretrained(out)
    assert loaded.rope_parameters["rope_theta"] == 1000.0
    assert (loaded.draft_vocab_size, loaded.num_hidden_layers, loaded.head_dim) == (11, 1, 4)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("d2t"), r"d2t is missing though draft_vocab_size 11 differs from vocab_size 23"),
    (lambda t: t.pop("lm_head.weight"), r"tensor lm_head\.weight is missing"),
    (lambda t: t.update({"d2t": 3 * torch.arange(11)}), r"d2t points outside the target vocabulary"),
    (lambda t: t["t2d"].logical_not_(), r"t2d does not name exactly the tokens"),
    (lambda t: t.update({"fc.bias": torch.zeros(8)}), r"unexpected tensors: fc\.bias"),
    (lambda t: t.update({"fc.weight": torch.zeros(8, 32)}),
     r"fc\.weight has shape \[8, 32\]; expected \[8, 24\]"),
    (lambda t: t["norm.weight"].fill_(float("nan")), r"norm\.weight holds values that are not finite"),
    (lambda t: t.update({"d2t": t["d2t"].int()}), r"d2t is torch\.int32"),
])  # fmt: skip
def test_planted_faults_are_named(tmp_path: Path, change, message: str) -> None:
    """B63, B64, B95, B100, B107."""
    import re

    _, out, _, _ = exported(tmp_path, draft_vocab_size=11)
    (problem,) = edit(out, change)
    assert re.search(message, problem)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_drafter(out)


def test_stored_embedding_must_be_the_targets(tmp_path: Path) -> None:
    """B93: one bit off makes the engine keep a private copy; the check says so."""
    target = load_target(tiny_target(tmp_path / "m"))
    config = TrainConfig(num_layers=1)
    draft = build.draft_config(config, target, (1, 2, 3), 40)
    model = build.build(config, draft, target, None, torch.device("cpu")).model
    export_drafter(model, tmp_path / "d", target=target)
    path = tmp_path / "d" / "model.safetensors"
    for bump, problems in ((0, 0), (1, 1)):
        embed = target.embed.torch().clone()
        embed.view(torch.int32)[3, 4] += bump
        save_file({**load_file(path), "embed_tokens.weight": embed}, path)
        found = check_drafter(tmp_path / "d", target=target)
        assert len(found) == problems
    assert "embed_tokens.weight differs from the target's" in found[0]


def test_foreign_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match=r"exists and holds no drafter; choose another folder"):
        exported(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vllm"]


@pytest.mark.parametrize("config", [
    {"model_type": "mistral"}, {"model_type": "phi3", "head_dim": None}, {"model_type": "gemma2",
    "head_dim": 32},
    {"model_type": "unheard_of"},
])  # fmt: skip
def test_shape_is_copied_from_the_target_with_a_reason(tmp_path: Path, config: dict) -> None:
    """B92: head_dim that differs from hidden / heads, key heads, eps and theta follow the target."""
    values = {k: v for k, v in {**TARGET_CONFIG, **config}.items() if v is not None}
    target = load_target(tiny_target(tmp_path / "m", values))
    shape = build.draft_shape(target)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 1, values.get("head_dim", 8))
    assert config["model_type"] in shape.reason
    draft = build.draft_config(TrainConfig(), target, (1, 2, 3), 40)
    assert (draft.rms_norm_eps, draft.rope["rope_theta"]) == (1e-5, 10000.0)


def test_target_without_ordinary_heads_gets_heads_of_its_own(tmp_path: Path) -> None:
    config = {**TARGET_CONFIG, "hidden_size": 512, "model_type": "kimi_k2", "kv_lora_rank": 64}
    shape = build.draft_shape(load_target(tiny_target(tmp_path / "m", config)))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 128)


def test_scaled_logits_are_folded_into_the_head(tmp_path: Path) -> None:
    """B72: a target that scales its logits teaches, and starts, a drafter without that factor."""
    target = load_target(
        tiny_target(tmp_path / "m", {**TARGET_CONFIG, "model_type": "granite", "logits_scaling": 4.0})
    )
    config = TrainConfig(dtype="float32", teacher_temperature=1.0)
    objective = build.build(
        config, build.draft_config(config, target, (1, 2, 3), 40), target, None, torch.device("cpu")
    )
    state = torch.randn(5, 16)
    logits = state @ target.head.torch().T / 4.0
    torch.testing.assert_close(state @ objective.model.lm_head.weight.T, logits)
    torch.testing.assert_close(objective.teacher.distribution(state), logits.softmax(-1))


SMALL = {"epochs": 1, "batch_tokens": 90, "ttt_steps": 2, "dtype": "float32", "lr": 1e-9, "adamw_lr": 1e-9}


@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators"])
def test_warm_start_from_every_layout(tmp_path: Path, format: str) -> None:
    """A published drafter is the start: with no learning rate it comes out as it went in."""
    target = tiny_target(tmp_path / "m")
    store = learnable_store(target)
    first = run(
        TrainConfig(**{**SMALL, "lr": 1e-2, "draft_vocab_size": 30}), Path("shards"), out=tmp_path / "first",
        target_path=target, target_name="org/model", store=store, format=format, tensorboard=False,
    )  # fmt: skip
    again = run(
        TrainConfig(**SMALL, init_from=first.drafter), Path("shards"), out=tmp_path / "again",
        target_path=target, store=store, tensorboard=False,
    )  # fmt: skip
    old, new = load_drafter(first.drafter), load_drafter(again.drafter)
    assert new.config.draft_vocab_size == 30
    for name, tensor in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], tensor, rtol=1e-2, atol=1e-4)


def test_warm_start_with_another_vocabulary_keeps_rows_by_token(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")
    store = learnable_store(target)
    common = {"target_path": target, "store": store, "tensorboard": False}
    settings = {**SMALL, "lr": 1e-2, "draft_vocab_size": 20, "train_lm_head": True, "adamw_lr": 1e-2}
    first = run(TrainConfig(**settings), Path("shards"), out=tmp_path / "first", **common)
    settings = {**SMALL, "draft_vocab_size": 40, "train_lm_head": True, "init_from": first.drafter}
    again = run(TrainConfig(**settings), Path("shards"), out=tmp_path / "again", **common)
    old, new = load_drafter(first.drafter), load_drafter(again.drafter)
    ids = torch.arange(20) + old.d2t
    torch.testing.assert_close(new.lm_head.weight[ids], old.lm_head.weight, rtol=1e-2, atol=1e-3)


def test_warm_start_of_another_target_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")
    _, out, _, _ = exported(tmp_path)
    with pytest.raises(
        InputError, match=r"a drafter for hidden size 8 and vocabulary 23; this target has 16 and 40"
    ):
        build.warm_start(out, load_target(target), (1, 2, 3))
    parts = make_parts(dtype=torch.float32, hidden_size=16, vocab_size=40, draft_vocab_size=40)
    export_drafter(parts.model, tmp_path / "other")
    with pytest.raises(InputError, match=r"reads layers \[1, 2, 3\], the shards hold \[2, 4, 5\]"):
        build.warm_start(tmp_path / "other", load_target(target), (2, 4, 5))


def test_some_of_the_captured_layers_can_be_chosen(tmp_path: Path) -> None:
    """B95: four captured layers, three of them input: fc and the id list are three wide."""
    target = tiny_target(tmp_path / "m")
    result = run(
        TrainConfig(**SMALL, aux_layer_ids="3,1"), Path("shards"), out=tmp_path / "run", target_path=target,
        store=learnable_store(target), tensorboard=False,
    )  # fmt: skip
    config = json.loads((result.drafter / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert load_file(result.drafter / "model.safetensors")["fc.weight"].shape == (16, 32)
    with pytest.raises(
        ConfigError, match=r"names layer 7, which the shards do not hold; they hold \[1, 2, 3\]"
    ):
        build.chosen_layers(TrainConfig(aux_layer_ids="1,7"), (1, 2, 3))
