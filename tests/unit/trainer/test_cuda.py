"""The same code on a GPU: losses, gradients and a whole run agree with the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from specdec_trainer.batch import pack
from specdec_trainer.config import TrainConfig
from specdec_trainer.objective import Eagle3Objective
from specdec_trainer.run import run
from trainer_fakes import learnable_store, make_document, make_parts, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("draft_vocab", [23, 11])
def test_values_and_gradients_equal_the_cpus(draft_vocab: int) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        parts = make_parts(dtype=torch.float32, draft_vocab_size=draft_vocab, num_layers=2)
        rng = np.random.default_rng(0)
        batch = pack([make_document(rng, n, list(range(3, n))) for n in (40, 7, 300)])
        model, teacher = parts.model.to(device), parts.teacher
        for name in ("weight", "rows", "draft_ids", "to_draft"):
            value = getattr(teacher, name)
            setattr(teacher, name, None if value is None else value.to(device))
        sums = Eagle3Objective(model, teacher, steps=3).loss(batch.to(torch.device(device)))
        sums.total.backward()
        grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        results[device] = (sums.total.detach().cpu(), sums.correct.cpu(), grads)
    (want, right, want_grads), (got, got_right, got_grads) = results["cpu"], results["cuda"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got_right, right)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()))


def test_a_run_trains_resumes_and_exports(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "m")

    def go(steps: int, *, resume: bool = False):
        config = TrainConfig(
            device="cuda", batch_tokens=90, ttt_steps=2, eval_draft_tokens=2, max_steps=steps, ema=0.5
        )
        return run(
            config, Path("shards"), out=tmp_path / "run", target_path=target, resume=resume,
            store=learnable_store(target), tensorboard=False,
        )  # fmt: skip

    assert go(3).state.step == 3
    result = go(6, resume=True)
    assert result.state.step == 6
    assert result.evaluation is not None
    assert (result.drafter / "model.safetensors").is_file()
