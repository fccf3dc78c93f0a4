"""Products in few shapes give what plain ones give, and a run of changing sizes keeps few kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdec_trainer import attention, tiles
from specdec_trainer.attention import Layout, attend
from specdec_trainer.batch import pack
from specdec_trainer.objective import Eagle3Objective
from trainer_fakes import make_document, make_parts


@pytest.mark.parametrize("n", [1, 15, 16, 100, 255, 256, 257, 700])
def test_tiled_linear_equals_a_plain_one(n: int) -> None:
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, 24, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(40, 24, generator=g).requires_grad_()
    bias = torch.randn(40, generator=g)
    away = torch.randn(n, 40, generator=g).bfloat16()
    y = tiles.linear(x, weight, bias)
    y.backward(away)
    x2 = x.detach().float().requires_grad_()
    w2 = weight.detach().bfloat16().float().requires_grad_()
    y2 = torch.nn.functional.linear(x2, w2, bias)
    y2.backward(away.float())
    for mine, plain in ((y, y2), (x.grad, x2.grad), (weight.grad, w2.grad)):
        torch.testing.assert_close(
            mine.float(), plain, rtol=0.02, atol=0.02 * float(plain.detach().abs().max())
        )


def test_sizes_are_few() -> None:
    for n in range(1, 5000):
        assert n <= tiles.rounded(n) <= max(64, n * 1.5)
        assert n <= tiles.tail_size(n) <= max(16, 2 * n - 1)
    assert len({tiles.rounded(n) for n in range(1, 32769)}) < 25


@pytest.mark.parametrize("steps", [0, 2])
def test_padded_attention_equals_plain_attention(steps: int) -> None:
    """Documents of odd sizes, windows of keys that reach into the neighbours, own keys of earlier steps."""
    rng = np.random.default_rng(0)
    g = torch.Generator().manual_seed(0)
    lengths = [3, 400, 70, 129]
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)[:-1])))
    total = sum(lengths)
    rows = torch.from_numpy(np.sort(rng.choice(total, 350, replace=False)))

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    q, keys, value = values(350, 4, 8), values(total, 2, 8), values(total, 2, 8)
    own = (values(350, steps, 2, 8), values(350, steps, 2, 8)) if steps else (None, None)
    away = values(350, 4, 8)

    def run(kind: torch.dtype) -> list[torch.Tensor]:
        inputs = [
            None if t is None else t.clone().detach().to(kind).requires_grad_()
            for t in (q, keys, value, *own)
        ]
        layout = Layout(rows, starts, heads=4, keys=total, like=inputs[0])
        out = attend(*inputs, layout, 0.35)
        out.backward(away.to(kind))
        return [out.detach(), *(t.grad for t in inputs if t is not None)]

    for mine, plain in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        torch.testing.assert_close(
            mine.double(), plain, rtol=0.05, atol=0.02 * float(plain.detach().abs().max())
        )


def test_a_pack_uses_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve packs of different sizes: the later ones bring hardly any shape that was not there before."""
    seen: list[set[tuple]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
                tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16]
                shape = tuple((tuple(t.shape), t.stride()) for t in tensors)
                if shape:
                    seen[-1].add((str(func), shape))
            return func(*args, **(kwargs or {}))

    parts = make_parts(dtype=torch.float32)
    parts.model.compute_dtype = torch.bfloat16
    parts.teacher.weight, parts.teacher.rows = parts.teacher.weight.bfloat16(), parts.teacher.rows.bfloat16()
    objective = Eagle3Objective(parts.model, parts.teacher, steps=3)
    monkeypatch.setattr(attention, "_CHUNK_ELEMENTS", {"cpu": 1 << 14, "cuda": 1})
    rng = np.random.default_rng(1)
    for _ in range(8):
        sizes = rng.integers(40, 240, 4)
        batch = pack([
            make_document(rng, int(n), list(range(int(n) // 3, int(n))), dtype=torch.bfloat16) for n in sizes
        ])  # fmt: skip
        seen.append(set())
        with Watch():
            objective.loss(batch).total.backward()
    new = [len(now - set().union(*seen[:i])) for i, now in enumerate(seen)]
    assert new[0] > 20
    assert sum(new[5:]) / 3 < 0.2 * new[0], new
