"""What ``doctor --plan`` computes, against what torch really allocates and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from specdec_trainer.algorithms import ALGORITHMS
from specdec_trainer.batch import pack
from specdec_trainer.config import TrainConfig
from specdec_trainer.loss import TeacherHead
from specdec_trainer.mla import LatentShape
from specdec_trainer.model import DraftConfig
from specdec_trainer.objective import Eagle3Objective
from trainer_fakes import TARGET_CONFIG, make_document

from specdec_tap import plan
from specdec_tap.errors import InputError

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
LATENT = LatentShape(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
CASES = {
    "llama": {},
    "llama_normed_two_layers": {"num_layers": 2, "norm_before_fc": True},
    "wide_mlp": {"intermediate_size": 640, "num_heads": 8},
    "kimik2": {"layer": "kimik2", "latent": LATENT, "num_kv_heads": 4, "fc_norm": True},
    "eagle1": {"algorithm": "eagle1", "aux_layer_ids": ()},
    "medusa": {"algorithm": "medusa", "aux_layer_ids": (), "draft_steps": 5, "num_layers": 2},
    "peagle": {"algorithm": "peagle", "mask_token_id": 3},
}


def draft(**changes) -> DraftConfig:
    values = {
        "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 4096, "vocab_size": 50, "draft_vocab_size": 50, "aux_layer_ids": (1, 2, 3),
    }  # fmt: skip
    return DraftConfig(**{**values, **changes})


def kept_bytes(config: DraftConfig, rows: int, steps: int) -> int:
    """Bytes that autograd keeps for a document of ``rows`` supervised rows, parameters aside."""
    model = ALGORITHMS[config.algorithm](config, compute_dtype=torch.bfloat16)
    model.start(torch.Generator().manual_seed(0))
    model.embed_weight = torch.randn(50, 64).bfloat16()
    model.lm_head.weight.data.normal_()
    model.lm_head.weight.requires_grad_(False)
    model.lm_head.to(torch.bfloat16)
    objective = Eagle3Objective(model, TeacherHead(torch.randn(50, 64).bfloat16(), None), steps=steps)
    document = make_document(
        np.random.default_rng(0), rows, list(range(rows)), hidden=64, vocab=50, dtype=torch.bfloat16,
        num_aux=len(config.aux_layer_ids) or 1,
    )  # fmt: skip
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective.loss(pack([document]))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 4])
def test_activations_are_what_autograd_keeps(case: str, steps: int) -> None:
    config = draft(**CASES[case])
    per_row = (kept_bytes(config, 400, steps) - kept_bytes(config, 200, steps)) / 200
    assert plan.activation_bytes(config, steps, 2) == pytest.approx(per_row, rel=0.08)


def test_kimi_k2_at_its_real_size() -> None:
    """Every number by hand: 64 heads of 192 and 128, ranks 1536 and 512, an MLP of 18432."""
    target = plan.read_config(RECIPES / "kimi-k2.yaml")
    assert plan.default_aux_layer_ids(target.num_hidden_layers) == (2, 30, 58)
    h, heads, vocab = 7168, 64, 163_840
    attention = (
        1536 * 2 * h + 1536 + heads * 192 * 1536 + 576 * 2 * h + 512 + heads * 256 * 512 + h * heads * 128
    )
    trained = (
        attention + 3 * h * 18432 + 3 * h * h + 3 * h + 4 * h
    )  # fc; one norm for each aux state; four norms
    settings = TrainConfig(layer="kimik2", optimizer="adamw", draft_vocab_size=vocab, ttt_steps=4)
    numbers = plan.plan_training(target, settings)
    assert numbers.trainable_parameters == trained
    assert numbers.parameters == trained + vocab * h
    assert (numbers.weights, numbers.gradients, numbers.optimizer) == (4 * trained, 4 * trained, 8 * trained)
    assert numbers.tables == 2 * h * 3 * vocab
    assert 20e9 < numbers.total < 40e9
    capture = plan.plan_capture(target, tokens_per_s=4000, response_share=0.3)
    assert capture.raw_bytes_per_token == 4 * h * 2
    assert capture.gb_per_hour == pytest.approx(3.3 * h * 2 / 1.5 * 4000 * 3600 / 1e9)


def test_both_recipes_describe_the_same_language_model() -> None:
    first, second = (plan.read_config(RECIPES / f"{name}.yaml") for name in ("kimi-k2", "kimi-k2.5"))
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "q_lora_rank",
        "kv_lora_rank",
        "intermediate_size",
    ):
        assert first.text_config[name] == second.text_config[name]
    assert second.config["model_type"] == "kimi_k25"
    assert plan.recommended_layer(second)[0] == "kimik2"


def test_muon_keeps_one_moment_of_matrices() -> None:
    target = plan.ConfigOnly(TARGET_CONFIG, TARGET_CONFIG, Path("config.json"))
    muon = plan.plan_training(target, TrainConfig(), aux_layer_ids=(2, 4, 5))
    adamw = plan.plan_training(target, TrainConfig(optimizer="adamw"), aux_layer_ids=(2, 4, 5))
    assert adamw.optimizer == 8 * adamw.trainable_parameters
    assert 4 * muon.trainable_parameters < muon.optimizer < adamw.optimizer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read a model's config"),
        ("[]", "holds no model config"),
        (json.dumps({"hidden_size": 8}), "num_hidden_layers is None; expected a positive integer"),
        (json.dumps({"hidden_size": "8"}), "hidden_size is '8'; expected a positive integer"),
    ],
)
def test_a_bad_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        plan.read_config(file)
