"""The chunked loss equals the plain one, and every custom gradient is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from specdec_trainer import loss
from specdec_trainer.attention import Layout, attend
from specdec_trainer.layers import _GatedDown
from specdec_trainer.loss import TeacherHead, soft_cross_entropy
from specdec_trainer.norm import RMSNorm
from specdec_trainer.rope import Rope


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("options", [
    {}, {"logit_scale": 0.3}, {"logit_softcap": 2.0}, {"temperature": 0.5}, {"hard_weight": 0.4},
    {"bias": rand(17, seed=9)},
])  # fmt: skip
def test_soft_cross_entropy_equals_torch(options: dict) -> None:
    final, target_head, hidden = rand(9, 6, seed=1), rand(17, 6, seed=2), rand(9, 6, seed=3).requires_grad_()
    ids = torch.tensor([0, 2, 3, 7, 11, 16])
    head = rand(6, 6, seed=4).requires_grad_()
    weight = torch.rand(9, dtype=torch.float64)
    teacher = TeacherHead(target_head, ids, **options)
    greedy = teacher.greedy(final)
    values = teacher(final, greedy, head)
    total, rows, correct = soft_cross_entropy(hidden, head, values.centroid, values.best, weight)
    total.backward()

    logits = final @ target_head.T + options.get("bias", 0)
    logits = logits * options.get("logit_scale", 1)
    if cap := options.get("logit_softcap"):
        logits = cap * torch.tanh(logits / cap)
    assert torch.equal(greedy, logits.argmax(-1))
    q = torch.softmax(logits[:, ids] / options.get("temperature", 1), -1)
    for i, token in enumerate(greedy.tolist()):
        if token in ids and (share := options.get("hard_weight")):
            q[i] = (1 - share) * q[i]
            q[i, ids.tolist().index(token)] += share
    plain_hidden = hidden.detach().clone().requires_grad_()
    plain_head = head.detach().clone().requires_grad_()
    losses = -(q * F.log_softmax(plain_hidden @ plain_head.T, -1)).sum(-1)
    (losses * weight).sum().backward()
    torch.testing.assert_close(total, (losses * weight).sum())
    torch.testing.assert_close(rows, losses.detach())
    torch.testing.assert_close(hidden.grad, plain_hidden.grad)
    torch.testing.assert_close(head.grad, plain_head.grad)
    best = ids[(plain_hidden @ plain_head.T).argmax(-1)]
    assert torch.equal(correct, best == greedy)


@pytest.mark.parametrize("form", ["tv", "lk"])
def test_overlap_losses_equal_torch(form: str) -> None:
    """Rows with the target's whole distribution, rows with its token alone, a row that has no token here."""
    final, target_head, hidden = rand(9, 6, seed=1), rand(17, 6, seed=2), rand(9, 6, seed=3).requires_grad_()
    ids = torch.tensor([0, 2, 3, 7, 11, 16])
    head = rand(6, 6, seed=4).requires_grad_()
    weight = torch.tensor([1, 0.3, 0, 1, 2, 1, 1, 0.5, 1], dtype=torch.float64)
    label = torch.tensor([-1, 2, -1, -1, 0, -1, -1, 5, -1])
    best = torch.tensor([3, 2, 1, -1, 0, 4, 1, 5, 2])
    teacher = TeacherHead(target_head, ids, temperature=0.6)
    total, rows, correct = loss.overlap_loss(hidden, head, teacher, final, label, best, weight, form)
    total.backward()

    q = torch.softmax(final @ target_head[ids].T / 0.6, -1)
    for i in (1, 4, 7):
        q[i] = F.one_hot(label[i], 6)
    plain_hidden = hidden.detach().clone().requires_grad_()
    plain_head = head.detach().clone().requires_grad_()
    logits = plain_hidden @ plain_head.T
    overlap = torch.minimum(torch.softmax(logits, -1), q).sum(-1)
    losses = 1 - overlap if form == "tv" else -overlap.log()
    (losses * weight).sum().backward()
    torch.testing.assert_close(total, (losses * weight).sum())
    torch.testing.assert_close(rows, losses.detach())
    torch.testing.assert_close(hidden.grad, plain_hidden.grad)
    torch.testing.assert_close(head.grad, plain_head.grad)
    assert torch.equal(correct, logits.argmax(-1) == best)


def test_chunks_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """B86."""
    results = []
    for size in (1, 4, 1000):
        monkeypatch.setattr(loss, "chunk_rows", lambda vocab, device, size=size: size)
        hidden, head = rand(11, 5, seed=1).requires_grad_(), rand(13, 5, seed=2).requires_grad_()
        teacher = TeacherHead(rand(13, 5, seed=3), None)
        final = rand(11, 5, seed=4)
        values = teacher(final, teacher.greedy(final), head)
        total, *_ = soft_cross_entropy(hidden, head, values.centroid, values.best, torch.ones(11).double())
        total.backward()
        results.append((total.detach(), hidden.grad, head.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_rows_without_weight_have_no_gradient() -> None:
    """B58: exactly the supervised rows move the drafter."""
    hidden, head = rand(6, 5, seed=1).requires_grad_(), rand(13, 5, seed=2)
    weight = torch.tensor([0, 1, 0, 1, 1, 0]).double()
    total, *_ = soft_cross_entropy(
        hidden, head, rand(6, 5, seed=3), torch.zeros(6, dtype=torch.int64), weight
    )
    total.backward()
    assert (hidden.grad.abs().sum(-1) > 0).tolist() == weight.bool().tolist()


def test_token_outside_the_draft_vocabulary_is_never_correct() -> None:
    teacher = TeacherHead(rand(13, 5), torch.tensor([1, 4]))
    assert teacher(rand(2, 5), torch.tensor([4, 5]), rand(2, 5)).best.tolist() == [1, -1]
    hidden, head = rand(2, 5), rand(2, 5)
    *_, correct = soft_cross_entropy(hidden, head, hidden, torch.tensor([-1, -1]), torch.ones(2).double())
    assert not correct.any()


def test_gradients_of_every_custom_function() -> None:
    """B59: gradcheck in float64."""
    check = torch.autograd.gradcheck
    x = rand(5, 8).requires_grad_()
    norm = RMSNorm(8, 1e-5).double()
    assert check(
        lambda a, w: torch.func.functional_call(norm, {"weight": w}, a), (x, rand(8).requires_grad_())
    )
    down = rand(3, 8, seed=2).requires_grad_()
    assert check(_GatedDown.apply, (x, rand(5, 8, seed=1).requires_grad_(), down))
    rope = Rope(8, {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    heads = rand(5, 2, 8).requires_grad_()
    assert check(lambda a: rope.apply(a, torch.tensor([0, 3, 4, 9, 2])), (heads,))
    layout = Layout(torch.tensor([0, 2, 3, 4]), torch.tensor([0, 3]), heads=4, keys=5, like=heads)
    q, k, v = rand(4, 4, 3).requires_grad_(), rand(5, 2, 3, seed=1).requires_grad_(), rand(5, 2, 6, seed=2)
    own_k, own_v = rand(4, 2, 2, 3, seed=3).requires_grad_(), rand(4, 2, 2, 6, seed=4).requires_grad_()
    assert check(lambda *a: attend(*a, layout, 0.7), (q, k, v.requires_grad_(), own_k, own_v))
    assert check(lambda *a: attend(*a, None, None, layout, 0.7), (q, k, v))
    hidden, head = rand(4, 5).requires_grad_(), rand(7, 5, seed=1).requires_grad_()
    best, weight = torch.tensor([0, 3, -1, 6]), rand(4, seed=2).abs()
    centroid = rand(4, 5, seed=3).requires_grad_()
    assert check(lambda h, w, c: soft_cross_entropy(h, w, c, best, weight, 0.5)[0], (hidden, head, centroid))
    teacher, final = TeacherHead(rand(9, 5), torch.arange(7)), rand(4, 5, seed=5)
    assert check(lambda w: teacher(final, teacher.greedy(final), w).centroid, (head,))


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """B86: 4,096 rows of a 49,152-token vocabulary, 800 MB of float32 logits, in under 120 MB."""
    import resource
    import subprocess
    import sys

    code = """
import resource, torch
from specdec_trainer.loss import TeacherHead, soft_cross_entropy
g = torch.Generator().manual_seed(0)
head = torch.randn(49152, 64, generator=g)
hidden = torch.randn(4096, 64, generator=g).requires_grad_()
teacher = TeacherHead(head, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
final = hidden.detach()
values = teacher(final, teacher.greedy(final), head)
soft_cross_entropy(hidden, head, values.centroid, values.best, torch.ones(4096))[0].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    assert resource.RLIMIT_AS is not None
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out) < 120


@pytest.mark.parametrize("vocab", [23, 100, 128, 1000, 49152])
def test_first_choice_is_argmax(vocab: int) -> None:
    """Ties included: bfloat16 logits have many."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    logits[3] = 0.0
    assert torch.equal(loss.first_choice(logits), logits.argmax(-1))
    assert loss.first_choice(logits[:0]).shape == (0,)
