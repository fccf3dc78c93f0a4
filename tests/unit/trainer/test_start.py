"""A drafter that starts by copying proposes what followed before, without any training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from specdec_trainer import start
from specdec_trainer.build import build, draft_config
from specdec_trainer.config import TrainConfig
from specdec_trainer.model import Eagle3Drafter
from specdec_trainer.run import run
from trainer_fakes import FakeRecord, FakeStore, learnable_store, tiny_target

from specdec_tap.errors import ConfigError
from specdec_tap.target import load_target

VOCAB, HIDDEN, PERIOD = 160, 192, 40
TARGET = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip


def states_of(embed: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Aux states ``[n, 3, H]``: the lowest layer knows its token, the others are loud and know nothing."""
    noise = rng.standard_normal((len(tokens), 3, embed.shape[1])).astype(np.float32)
    noise[:, 0] = embed[tokens] + 0.3 * noise[:, 0]
    return torch.from_numpy(noise * np.array([1.0, 6.0, 20.0], np.float32)[:, None])


def drafter(tmp_path: Path, **settings) -> tuple[Eagle3Drafter, np.ndarray]:
    """A new drafter with random weights, and the target's embedding."""
    target = load_target(tiny_target(tmp_path / "m", TARGET))
    config = TrainConfig(dtype="float32", **settings)
    ids = None
    if config.draft_vocab_size is not None:
        ids = np.sort(np.random.default_rng(5).permutation(VOCAB)[: config.draft_vocab_size])
    draft = draft_config(config, target, (1, 4, 6), VOCAB if ids is None else len(ids))
    objective = build(config, draft, target, ids, torch.device("cpu"))
    return objective.model.eval(), target.embed.float32()


def proposed(model: Eagle3Drafter, embed: np.ndarray) -> tuple[float, float, float]:
    """Share of right first, second and third tokens in the second half of sequences that repeat once."""
    rng = np.random.default_rng(1)
    known = (torch.arange(model.config.draft_vocab_size) + model.d2t).numpy()
    right = []
    for _ in range(40):
        once = rng.permutation(known)[:PERIOD]
        tokens = np.concatenate((once, once))
        seen = PERIOD + int(rng.integers(2, PERIOD - 4))
        aux = states_of(embed, tokens[: seen - 1], rng)
        said = model.propose(aux, torch.from_numpy(tokens[1:seen]), steps=3)
        right.append((said.numpy() == tokens[seen : seen + 3]).tolist())
    return tuple(np.mean(right, axis=0).tolist())


def teach_copying(model: Eagle3Drafter, embed: np.ndarray, rows: int = 4000) -> float:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, VOCAB, rows)
    sample = [
        (states_of(embed, part[1:], rng), torch.from_numpy(np.stack((part[1:], part[:-1]), 1)))
        for part in np.split(tokens, 8)
    ]
    return start.start_from_copying(model, sample, torch.ones(model.config.draft_vocab_size))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_heads": 2},
        {"norm_before_fc": False, "fc_norm": True},
        {"norm_before_fc": False, "fc_norm": False, "norm_before_residual": False},
        {"draft_vocab_size": 90},
        {"num_layers": 2},
    ],
    ids=["default", "grouped", "fc-norm", "plain", "small-vocab", "two-layers"],
)
def test_an_untrained_drafter_copies_what_followed_before(tmp_path: Path, settings: dict) -> None:
    model, embed = drafter(tmp_path, **settings)
    before = proposed(model, embed)
    held = teach_copying(model, embed)
    after = proposed(model, embed)
    assert held > 0.5
    assert before[0] < 0.1
    assert after[0] > 0.7, after
    # Later tokens come from the drafter's own states, in chains whose earlier tokens were right or not.
    assert after[1] > 0.4, after


@pytest.mark.parametrize("rows", [0, 8])
def test_too_few_rows_leave_the_drafter_as_it_is(tmp_path: Path, rows: int) -> None:
    model, embed = drafter(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, rows)
    sample = (
        [(states_of(embed, tokens, rng), torch.from_numpy(np.stack((tokens, tokens), 1)))] if rows else []
    )
    assert start.start_from_copying(model, sample, torch.ones(VOCAB)) is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_what_is_written_down_changes_and_a_seed_decides_it(tmp_path: Path) -> None:
    model, embed = drafter(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    teach_copying(model, embed)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name for name in before if not torch.equal(before[name], first[name])}
    attention = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert changed == attention | {"fc.weight"}
    model.load_state_dict(before)
    teach_copying(model, embed)
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())


def test_entries_that_match_turn_slowly(tmp_path: Path) -> None:
    model, _ = drafter(tmp_path)
    layer = model.layers[0]
    still = start._still_entries(layer).tolist()
    half = layer.head_dim // 2
    assert len(still) >= layer.head_dim // 4
    slowest = max(float(layer.rope.inv_freq[i % half]) for i in still)
    others = [float(layer.rope.inv_freq[i % half]) for i in range(layer.head_dim) if i not in still]
    assert slowest < min(others)


def test_runs_start_by_copying_where_they_can(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")
    common = {"target_path": target, "store": learnable_store(target), "tensorboard": False}
    settings = {"epochs": 2, "batch_tokens": 90, "ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32"}
    said: list[str] = []
    result = run(TrainConfig(**settings), Path("s"), out=tmp_path / "a", say=said.append, **common)
    assert np.isfinite(result.evaluation.mean_loss).all()
    assert any("starts by copying" in line for line in said)
    said.clear()
    run(TrainConfig(init="random", **settings), Path("s"), out=tmp_path / "b", say=said.append, **common)
    run(TrainConfig(layer="qwen3", **settings), Path("s"), out=tmp_path / "c", say=said.append, **common)
    assert not any("starts by copying" in line for line in said)
    with pytest.raises(ConfigError, match=r"init is 'copy', but the drafter is EAGLE-3 with layer 'qwen3'"):
        run(TrainConfig(init="copy", layer="qwen3"), Path("s"), out=tmp_path / "d", **common)


def test_one_row_records_are_no_sample(tmp_path: Path) -> None:
    from specdec_trainer.data import Dataset, survey

    rng = np.random.default_rng(0)
    short = FakeRecord([1, 2], [(0, 2, "response")], rng.random((1, 3, 8)), rng.random((1, 8)))
    long = FakeRecord(range(9), [(0, 9, "response")], rng.random((8, 3, 8)), rng.random((8, 8)))
    store = FakeStore([short, long])
    found = survey(store, [0, 1], vocab_size=23, max_length=99)
    ((aux, own),) = Dataset(store, found).own_tokens(5)
    assert own.tolist() == [[t, t - 1] for t in range(2, 8)]
    np.testing.assert_array_equal(aux.numpy(), long.aux()[2:].view(np.float32))
