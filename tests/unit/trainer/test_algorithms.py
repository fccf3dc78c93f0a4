"""EAGLE-1, Medusa and P-EAGLE: values and gradients equal slow references, and exports are read back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import Eagle1Reference, MedusaReference, ParallelReference, reference_loss
from specdec_trainer import inputs
from specdec_trainer.algorithms import ALGORITHMS
from specdec_trainer.batch import pack
from specdec_trainer.build import draft_config, draft_vocabulary
from specdec_trainer.config import TrainConfig
from specdec_trainer.export import check_drafter, export_drafter, lend_tables, load_drafter
from specdec_trainer.objective import Eagle3Objective
from specdec_trainer.run import run
from trainer_fakes import (
    FakeStore,
    learnable_store,
    make_config,
    make_document,
    make_parts,
    random_record,
    tiny_target,
)

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import load_target

STEPS, DECAY = 4, 0.7
CASES = {
    "eagle1": ({"algorithm": "eagle1", "aux_layer_ids": ()}, Eagle1Reference),
    "eagle1_two_layers": ({"algorithm": "eagle1", "aux_layer_ids": (), "num_layers": 2}, Eagle1Reference),
    "medusa": ({"algorithm": "medusa", "aux_layer_ids": (), "draft_steps": 4}, MedusaReference),
    "medusa_reduced_vocab": (
        {"algorithm": "medusa", "aux_layer_ids": (), "draft_steps": 3, "num_layers": 2,
         "draft_vocab_size": 11},
        MedusaReference,
    ),
    "peagle": ({"algorithm": "peagle", "mask_token_id": 5}, ParallelReference),
    "peagle_normed_two_layers": (
        {"algorithm": "peagle", "mask_token_id": 5, "num_layers": 2, "norm_before_fc": True,
         "norm_output": True, "draft_vocab_size": 11},
        ParallelReference,
    ),
}  # fmt: skip


def documents(rng: np.random.Generator, reads: str):
    count = 1 if reads == "final" else 3
    return [
        make_document(rng, 9, [3, 4, 5, 6, 7, 8], num_aux=count),
        make_document(rng, 1, [0], num_aux=count),
        make_document(rng, 15, [2, 3, 4, 9, 10, 11, 14], num_aux=count, first_position=5),
        make_document(rng, 3, [], num_aux=count),
    ]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_reference(case: str) -> None:
    changes, slow_class = CASES[case]
    parts = make_parts(**changes)
    docs = documents(np.random.default_rng(1), parts.model.reads)
    weight = parts.model.feature_weight
    objective = Eagle3Objective(parts.model, parts.teacher, steps=STEPS, decay=DECAY, feature_weight=weight)
    parts.model.train()
    sums = objective.loss(pack(docs))
    sums.total.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in parts.model.named_parameters()}
    slow, correct, count = reference_loss(
        slow_class(weights, parts.model.config, parts.embed), docs, parts.target_head, parts.draft_ids,
        steps=STEPS, decay=DECAY, feature_weight=weight,
    )  # fmt: skip
    slow.backward()
    # The distance between states is taken in float32, as is the rotary table.
    torch.testing.assert_close(sums.total, slow, rtol=1e-6, atol=0)
    assert sums.count.tolist() == count.tolist()
    assert sums.correct.tolist() == correct.tolist()
    for name, p in parts.model.named_parameters():
        scale = float(weights[name].grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("case", CASES)
def test_proposals_follow_the_same_chain_as_training(case: str) -> None:
    """Feeding the proposed tokens back as the true ones gives the same proposals."""
    changes, slow_class = CASES[case]
    parts = make_parts(**changes)
    model = parts.model
    rng = np.random.default_rng(2)
    states = torch.from_numpy(rng.standard_normal((6, 1 if model.reads == "final" else 3, 8)))
    tokens = torch.from_numpy(rng.integers(0, 23, 6))
    steps = model.config.draft_steps or 3
    drafted = model.propose(states, tokens, steps=steps, first_position=2)
    slow = slow_class(dict(model.named_parameters()), model.config, parts.embed)
    following = torch.cat((tokens, drafted))
    with torch.no_grad():
        chain = slow.chain(states, following, 2, 5, steps)
    assert [int(model.best(state[None])) for state in chain] == drafted.tolist()


@pytest.mark.parametrize("algorithm", ["eagle1", "medusa", "peagle"])
def test_an_export_is_read_back_as_it_was(algorithm: str, tmp_path: Path) -> None:
    target = load_target(tiny_target(tmp_path / "target"))
    layers = () if ALGORITHMS[algorithm].reads == "final" else (2, 4, 5)
    size = 30 if ALGORITHMS[algorithm].reducible else None
    config = TrainConfig(algorithm=algorithm, ttt_steps=3, draft_vocab_size=size)
    ids = draft_vocabulary(config, target, np.arange(40))
    draft = draft_config(config, target, layers, 40 if ids is None else len(ids))
    model = ALGORITHMS[algorithm](draft)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    if ids is not None:
        model.d2t.copy_(torch.from_numpy(ids) - torch.arange(len(ids)))
    export_drafter(model, tmp_path / "drafter", target=target, dtype=torch.float32)
    assert check_drafter(tmp_path / "drafter", target=target) == []
    loaded = load_drafter(tmp_path / "drafter", compute_dtype=torch.float32)
    lend_tables(loaded, target)
    lend_tables(model, target)
    assert type(loaded) is type(model)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    states = torch.randn(5, len(layers) or 1, 16)
    tokens = torch.arange(5)
    assert torch.equal(loaded.propose(states, tokens, steps=3), model.propose(states, tokens, steps=3))


def test_names_in_the_export_are_those_of_vllm(tmp_path: Path) -> None:
    """EagleLlamaForCausalLM has no fc bias, no norm at either end, no head; the others as vLLM reads them."""
    from safetensors import safe_open

    target = load_target(tiny_target(tmp_path / "target"))

    def exported(algorithm: str, **settings) -> tuple[dict, dict]:
        config = TrainConfig(algorithm=algorithm, ttt_steps=2, **settings)
        layers = () if ALGORITHMS[algorithm].reads == "final" else (2, 4, 5)
        ids = draft_vocabulary(config, target, np.arange(40))
        model = ALGORITHMS[algorithm](draft_config(config, target, layers, 40 if ids is None else len(ids)))
        model.start(torch.Generator().manual_seed(0))
        model.lm_head.weight.data.normal_()
        if ids is not None:
            model.d2t.copy_(torch.from_numpy(ids) - torch.arange(len(ids)))
        export_drafter(model, tmp_path / algorithm, target=target)
        with safe_open(tmp_path / algorithm / "model.safetensors", "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return json.loads((tmp_path / algorithm / "config.json").read_text()), shapes

    config, shapes = exported("eagle1")
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert shapes["fc.weight"] == [16, 32]
    assert set(shapes) == {"fc.weight"} | {
        f"layers.0.{name}.weight"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }  # fmt: skip
    config, shapes = exported("medusa")
    assert (config["model_type"], config["num_heads"], config["original_lm_head"]) == ("medusa", 2, True)
    assert shapes == {
        "blocks.0.layers.0.weight": [16, 16],
        "blocks.1.layers.0.weight": [16, 16],
        "lm_head.weight": [40, 16],
    }
    config, shapes = exported("peagle")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["mask_token_id"] == config["pard_token"] == 39
    assert shapes["mask_hidden"] == [1, 48]


@pytest.mark.parametrize("algorithm", ["eagle1", "medusa", "peagle"])
def test_an_algorithm_learns_and_resumes(algorithm: str, tmp_path: Path) -> None:
    """The loop, the held-out numbers, checkpoints and the export work for every algorithm."""
    tiny_target(tmp_path / "target")
    store = learnable_store(tmp_path / "target")
    settings = {
        "algorithm": algorithm, "ttt_steps": 3, "dtype": "float32", "batch_tokens": 256, "epochs": 1000,
        "eval_epochs": 1000, "lr": 1e-1 if algorithm == "medusa" else 2e-2, "adamw_lr": 5e-3,
        "schedule": "constant",
    }  # fmt: skip
    where = {
        "out": tmp_path / "run",
        "target_path": tmp_path / "target",
        "store": store,
        "tensorboard": False,
    }
    run(TrainConfig(**settings, max_steps=60), tmp_path, **where)
    result = run(TrainConfig(**settings, max_steps=120), tmp_path, resume=True, **where)
    assert result.state.step == 120
    assert result.state.best > 1.5
    assert check_drafter(result.drafter, target=load_target(tmp_path / "target")) == []
    card = (result.drafter / "README.md").read_text()
    assert f'"method": "{ALGORITHMS[algorithm].method}"' in card


def test_eagle1_refuses_shards_without_the_prompt_s_final_states(tmp_path: Path) -> None:
    store = FakeStore([random_record(np.random.default_rng(0), 4, 6)])
    store.header = SimpleNamespace(dtype="float32", aux_layer_ids=(1, 2, 3), final_scope="response")
    with pytest.raises(InputError, match=r"final states at response positions only.*FINAL_HIDDEN=all"):
        inputs.view(store, ALGORITHMS["eagle1"])
    assert inputs.view(store, ALGORITHMS["medusa"])[0].gaps == [(0, 3)]


def test_aux_readers_refuse_shards_without_aux_states() -> None:
    store = FakeStore()
    store.header = SimpleNamespace(dtype="float32", aux_layer_ids=(), final_scope="all")
    with pytest.raises(InputError, match="the shards hold no aux states, which EAGLE-3 reads"):
        inputs.view(store, ALGORITHMS["eagle3"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "eagle1", "draft_vocab_size": 20},
            "draft_vocab_size is 20, .* proposes from the whole",
        ),
        (
            {"algorithm": "medusa", "draft_vocab_size": 20},
            "draft_vocab_size is 20, .* proposes from the whole",
        ),
        ({"algorithm": "eagle1", "layer": "qwen3"}, "algorithm eagle1 with layer 'qwen3'"),
        ({"algorithm": "eagle1", "layer": "kimik2"}, "algorithm eagle1 with layer 'kimik2'"),
        ({"algorithm": "peagle", "layer": "qwen3"}, "algorithm peagle with layer 'qwen3'"),
        ({"algorithm": "peagle", "layer": "kimik2"}, "algorithm peagle with layer 'kimik2'"),
        ({"algorithm": "peagle", "mask_token_id": 40}, r"mask_token_id is 40; expected .*\(0 to 39\)"),
        ({"algorithm": "eagle1", "train_lm_head": True}, "train_lm_head is true, but algorithm eagle1"),
    ],
)
def test_what_an_algorithm_cannot_have_is_said(settings: dict, message: str, tmp_path: Path) -> None:
    tiny_target(tmp_path / "target")
    with pytest.raises(ConfigError, match=message):
        run(
            TrainConfig(**settings), tmp_path, out=tmp_path / "run", target_path=tmp_path / "target",
            store=learnable_store(tmp_path / "target", records=4), tensorboard=False,
        )  # fmt: skip


def test_other_formats_are_refused(tmp_path: Path) -> None:
    model = ALGORITHMS["medusa"](make_config(algorithm="medusa", aux_layer_ids=(), draft_steps=2))
    with pytest.raises(ConfigError, match="algorithm medusa is exported for vllm only; 'sglang'"):
        export_drafter(model, tmp_path / "drafter", format="sglang")
