"""The tap's layers and those of the server's own drafter: the model gives both, and each gets its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace as Object

import pytest
import torch

from specdec_tap.config import TapConfig
from specdec_tap.errors import UnsupportedVllmError
from specdec_tap.vllm_plugin.attach import Plan, attach, choose_layers
from specdec_tap.vllm_plugin.runner_common import PLAN, wrap_sample_tokens


class Inner(torch.nn.Module):
    """Keeps its layers as vLLM's DeepSeek does: an attribute, without vLLM's mixin."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.aux_hidden_state_layers = layers


class Model(torch.nn.Module):
    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.model = Inner(layers)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = layers

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return (2, 4, 5)


def choose(
    own: tuple[int, ...], asked: tuple[int, ...] | None, *, drafter: bool = True
) -> tuple[Plan, Model]:
    plan = Plan(TapConfig(dir=Path("shards"), aux_layer_ids=asked), "v1", own_flag=drafter)
    config = Object(model_config=Object(hf_text_config=Object(num_hidden_layers=8)), additional_config={})
    model = Model(own)
    choose_layers(plan, model, config)
    return plan, model


@pytest.mark.parametrize(
    ("own", "asked", "union", "tap_slots", "own_slots"),
    [
        ((2, 4, 5), None, (2, 4, 5), (0, 1, 2), (0, 1, 2)),
        ((1, 3), (2, 4, 5), (1, 2, 3, 4, 5), (1, 3, 4), (0, 2)),
        ((5, 2, 4), (4, 8), (2, 4, 5, 8), (1, 3), (0, 1, 2)),
    ],
)
def test_the_servers_drafter_gets_exactly_its_own_layers(own, asked, union, tap_slots, own_slots) -> None:
    """A Kimi server with a drafter and the tap crashed: its drafter was given no states at all."""
    plan, model = choose(own, asked)
    assert model.model.aux_hidden_state_layers == union
    assert plan.tap_slots == tap_slots and plan.own_slots == own_slots


def test_without_a_drafter_only_the_taps_layers_are_asked_for() -> None:
    plan, model = choose((), None, drafter=False)
    assert model.model.aux_hidden_state_layers == (2, 4, 5)
    assert plan.own_slots is None


def test_a_drafter_whose_layers_are_unknown_is_refused() -> None:
    with pytest.raises(UnsupportedVllmError, match="Model does not say of which layers"):
        choose((), None)


def test_a_server_that_goes_on_without_capture_keeps_its_drafters_states(caplog) -> None:
    """``strict: false``: what cannot be tapped is served as it would be without the tap."""
    plan = Plan(TapConfig(dir=Path("shards"), strict=False), "v1")
    state = Object(aux_hidden_states=["own"], hidden_states="final")
    config = Object(model_config=Object(hf_text_config=Object(num_hidden_layers=8)), additional_config={})
    runner = Object(
        vllm_config=config, use_aux_hidden_state_outputs=True, execute_model_state=state, **{PLAN: plan}
    )
    attach(plan, Model(()), runner)
    assert not plan.attached and "capture is off for this server" in caplog.text

    def replaced(state: Object, aux: object) -> Object:
        raise AssertionError("the state is the server's own")

    sample_tokens = wrap_sample_tokens(lambda self: self.execute_model_state, replaced)
    assert sample_tokens(runner) is state


@pytest.mark.parametrize("strict", [True, False])
def test_a_machine_that_lacks_something_stops_only_a_strict_server(strict, monkeypatch, caplog) -> None:
    """Here: no memory for the ring. The model gives its states by then, and the drafter gets its own."""

    def make_tap(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    module = sys.modules[attach.__module__]
    monkeypatch.setattr(module, "make_tap", make_tap)
    monkeypatch.setattr(module, "is_capture_rank", lambda: True)
    plan = Plan(TapConfig(dir=Path("shards"), strict=strict), "v1")
    config = Object(model_config=Object(hf_text_config=Object(num_hidden_layers=8)), additional_config={})
    runner = Object(vllm_config=config, use_aux_hidden_state_outputs=True, device="cpu")
    if strict:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            attach(plan, Model((1, 3)), runner)
        return
    attach(plan, Model((1, 3)), runner)
    assert "capture is off for this server: [Errno 12] Cannot allocate memory" in caplog.text
    assert plan.attached and plan.tap is None and plan.own_slots == (0, 2)
