"""An algorithm is one class and one entry in the registry: everything else learns of it from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_trainer.algorithms import ALGORITHMS, algorithm_of
from specdec_trainer.config import TrainConfig, convert
from specdec_trainer.drafter import Chains, Drafter, Step
from specdec_trainer.export import check_drafter, lend_tables, load_drafter
from specdec_trainer.layers import project
from specdec_trainer.model import DraftConfig
from specdec_trainer.run import run
from torch import Tensor, nn
from trainer_fakes import learnable_store, tiny_target

from specdec_tap import plan
from specdec_tap.cli.eval import speculative_config
from specdec_tap.errors import ConfigError
from specdec_tap.target import load_target


class MeanDrafter(Drafter):
    """One matrix over the mean of the aux states and the embedding of the next token."""

    title = "Mean"
    method = "mean"
    serving = {"mean_drafting": True}  # noqa: RUF012  # read only
    needs_context = False

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config, compute_dtype)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        return project(torch.cat((state, self.embed(tokens)), -1), self.mix)

    def chains(self, batch: Any, steps: int) -> Chains:
        state = batch.aux[batch.rows].mean(1).to(self.compute_dtype)
        rows = torch.arange(batch.num_supervised)
        keep: Tensor | None = None
        for index in range(steps):
            alive = batch.run_left[rows] >= index
            if keep is not None:
                alive &= keep
            rows, state = rows[alive], state[alive]
            if not len(rows):
                return
            state = self.step(state, batch.tokens[batch.rows[rows] + index])
            keep = yield Step(index, rows, state)

    def propose(self, states: Tensor, tokens: Tensor, *, steps: int, first_position: int = 0) -> Tensor:
        state, token = states[-1:].mean(1).to(self.compute_dtype), tokens[-1:]
        out = []
        for _ in range(steps):
            state = self.step(state, token)
            token = self.best(state)
            out.append(token)
        return torch.cat(out)

    @classmethod
    def recognises(cls, config: dict[str, Any]) -> bool:
        return config.get("architectures") == ["MeanDraftModel"]

    @classmethod
    def engine_config(cls, draft: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
        return {**facts, "architectures": ["MeanDraftModel"]}


@pytest.fixture
def mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "mean", MeanDrafter)


@pytest.mark.usefixtures("mean")
def test_a_registered_algorithm_trains_exports_and_is_read_back(tmp_path: Path) -> None:
    target = load_target(tiny_target(tmp_path / "target"))
    settings = convert({"algorithm": "mean", "max_steps": "2", "dtype": "float32", "ttt_steps": "2"}, "test")
    result = run(
        TrainConfig(**settings), tmp_path, out=tmp_path / "run", target_path=tmp_path / "target",
        store=learnable_store(tmp_path / "target"), tensorboard=False,
    )  # fmt: skip
    assert result.state.step == 2
    assert check_drafter(result.drafter, target=target) == []
    assert "# Mean drafter" in (result.drafter / "README.md").read_text()
    config = json.loads((result.drafter / "config.json").read_text())
    assert (config["architectures"], algorithm_of(config)) == (["MeanDraftModel"], "mean")
    drafter = load_drafter(result.drafter, compute_dtype=torch.float32)
    assert isinstance(drafter, MeanDrafter)
    lend_tables(drafter, target)
    assert drafter.propose(torch.randn(4, 3, 16), torch.arange(4), steps=3).shape == (3,)
    served = speculative_config(result.drafter, 3)
    assert (served["method"], served["mean_drafting"]) == ("mean", True)


@pytest.mark.usefixtures("mean")
def test_a_registered_algorithm_is_planned(tmp_path: Path) -> None:
    tiny_target(tmp_path / "target")
    target = plan.read_config(tmp_path / "target" / "config.json")
    numbers = plan.plan_training(target, plan.check_settings({"algorithm": "mean"}))
    assert (numbers.algorithm, numbers.trainable_parameters) == ("mean", 2 * 16 * 16)


def test_an_unknown_algorithm_is_named_with_the_known_ones(mean: None) -> None:
    with pytest.raises(ConfigError, match=r"algorithm is 'meen'; expected one of 'eagle3', .*'mean'"):
        TrainConfig(algorithm="meen")


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, "peagle"),
        ({"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}, "peagle"),
        ({"architectures": ["EagleLlamaForCausalLM"], "mask_token_id": 3}, "eagle1"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        ({"model_type": "medusa", "mask_token_id": 3}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_a_config_tells_its_algorithm(config: dict[str, Any], algorithm: str | None) -> None:
    """What shares EAGLE-3's layout is told apart by what it adds."""
    assert algorithm_of(config) == algorithm
