"""Muon in float32, for CPUs that are slow in torch's own bfloat16."""

from __future__ import annotations

import pytest
import torch
from specdec_trainer import optim
from specdec_trainer.optim import Float32Muon, Optimizers

SETTINGS = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_muon_in_float32_is_torch_s_muon_but_for_rounding(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    start, grads = torch.randn(shape, generator=g), [torch.randn(shape, generator=g) for _ in range(4)]
    weights, made = [], []
    for kind in (torch.optim.Muon, Float32Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], **SETTINGS)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        weights.append(weight.detach() - start)
        made.append(optimizer)
    theirs, ours = weights
    assert float((theirs - ours).norm() / theirs.norm()) < 0.02
    assert torch.nn.functional.cosine_similarity(theirs.flatten(), ours.flatten(), dim=0) > 0.9995
    # The momentum does not go through bfloat16: it is the same, and a run goes on with either.
    torch.testing.assert_close(
        made[0].state_dict()["state"][0]["momentum_buffer"],
        made[1].state_dict()["state"][0]["momentum_buffer"],
    )
    made[1].load_state_dict(made[0].state_dict())


@pytest.mark.parametrize(("fast", "kind"), [(True, torch.optim.Muon), (False, Float32Muon)])
def test_the_cpu_decides_which_muon(monkeypatch: pytest.MonkeyPatch, fast: bool, kind: type) -> None:
    monkeypatch.setattr(optim, "has_bfloat16", lambda device: fast)
    made = Optimizers(
        torch.nn.Linear(8, 8), name="muon", lr=0.1, adamw_lr=0.1, weight_decay=0.0, adamw_weight_decay=0.0,
        momentum=0.9, ns_steps=5,
    )  # fmt: skip
    assert type(made.parts[0]) is kind
