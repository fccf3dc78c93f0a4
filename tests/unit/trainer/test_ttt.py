"""The fast path equals the slow reference in values and gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import Reference, reference_loss
from specdec_trainer.batch import pack
from specdec_trainer.evaluate import evaluate
from specdec_trainer.mla import LatentShape
from specdec_trainer.objective import Eagle3Objective
from trainer_fakes import make_document, make_parts

LATENT = {
    "layer": "kimik2", "num_kv_heads": 4,
    "latent": LatentShape(
        q_lora_rank=5, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=8, v_head_dim=5
    ),
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 12,
    "beta_fast": 4.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "peer_norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc_norm": {"fc_norm": True},
    "two_layers": {"num_layers": 2},
    "three_layers_normed": {"num_layers": 3, "norm_before_residual": True, "norm_output": True},
    "reduced_vocab": {"draft_vocab_size": 11},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"layer": "qwen3"},
    "partial_rotary": {"rope": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "one_kv_head_each": {"num_kv_heads": 4},
    "kimik2": {**LATENT, "rope": YARN, "norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "kimik2_plain_rope_no_query_latent": {**LATENT, "latent": replace(LATENT["latent"], q_lora_rank=None)},
    "kimik2_two_layers": {**LATENT, "rope": YARN, "num_layers": 2},
}


def packed_documents(rng: np.random.Generator):
    """Lengths 1 to 17, prompts, two answers in one document, a prefix gap, a row trained on its label."""
    return [
        make_document(rng, 9, [3, 4, 5, 6, 7, 8], name="plain"),
        make_document(rng, 1, [0], name="single"),
        make_document(rng, 17, [2, 3, 4, 9, 10, 11, 12, 16], first_position=5, name="turns after a gap"),
        make_document(rng, 3, [], name="context only"),
        make_document(rng, 6, [0, 1, 2, 3, 4, 5], without_final=(1, 4), name="labels"),
    ]


def fast_and_slow(parts, documents, steps: int, decay: float = 0.7):
    objective = Eagle3Objective(parts.model, parts.teacher, steps=steps, decay=decay)
    parts.model.train()
    sums = objective.loss(pack(documents))
    sums.total.backward()
    fast = {n: p.grad.clone() for n, p in parts.model.named_parameters()}
    weights = {n: p.detach().clone().requires_grad_() for n, p in parts.model.named_parameters()}
    slow, correct, count = reference_loss(
        Reference(weights, parts.model.config, parts.embed), documents, parts.target_head, parts.draft_ids,
        steps=steps, decay=decay,
    )  # fmt: skip
    slow.backward()
    return sums, fast, slow, {n: w.grad for n, w in weights.items()}, correct, count


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_equal_the_reference(variant: str) -> None:
    """B58, B60, B61, B62, B91: alignment, positions, mask, teacher forcing, document borders, every
    parameter."""
    parts = make_parts(**VARIANTS[variant])
    documents = packed_documents(np.random.default_rng(1))
    sums, fast, slow, slow_grads, correct, count = fast_and_slow(parts, documents, steps=4)
    torch.testing.assert_close(sums.total, slow, rtol=1e-6, atol=0)
    assert sums.count.tolist() == count.tolist()
    assert sums.correct.tolist() == correct.tolist()
    for name, grad in fast.items():
        # The rotary table is float32, as in the engine; everything else is float64 here.
        scale = float(slow_grads[name].abs().max())
        torch.testing.assert_close(
            grad, slow_grads[name], rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert float(grad.abs().max()) > 0, name


def test_float32_is_as_close_as_float32_can_be() -> None:
    parts = make_parts(dtype=torch.float32)
    documents = packed_documents(np.random.default_rng(2))
    sums, fast, slow, slow_grads, *_ = fast_and_slow(parts, documents, steps=7)
    torch.testing.assert_close(sums.total, slow, rtol=1e-5, atol=0)
    for name, grad in fast.items():
        scale = float(slow_grads[name].abs().max())
        torch.testing.assert_close(grad, slow_grads[name], rtol=1e-3, atol=1e-5 * scale)


def test_bfloat16_follows_float32() -> None:
    """B54: one to three layers give finite losses near the exact ones."""
    for layers in (1, 2, 3):
        exact = make_parts(num_layers=layers)
        documents = packed_documents(np.random.default_rng(3))
        want = Eagle3Objective(exact.model, exact.teacher, steps=3, decay=1.0).loss(pack(documents)).total
        parts = make_parts(num_layers=layers)
        parts.model.float().compute_dtype = torch.bfloat16
        for name in ("weight", "rows"):
            setattr(parts.teacher, name, getattr(parts.teacher, name).bfloat16())
        sums = Eagle3Objective(parts.model, parts.teacher, steps=3, decay=1.0).loss(pack(documents))
        sums.total.backward()
        assert abs(float(sums.total.detach()) / float(want.detach()) - 1) < 0.05
        assert all(bool(torch.isfinite(p.grad).all()) for p in parts.model.parameters())


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_do_not_change_anything(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B86: logits and attention scores are worked off in chunks of any size."""
    from specdec_trainer import attention, loss

    monkeypatch.setattr(attention, "_chunk_rows", lambda entries, device: chunk)
    monkeypatch.setattr(loss, "chunk_rows", lambda vocab, device: chunk)
    parts = make_parts(draft_vocab_size=11, num_layers=2)
    documents = packed_documents(np.random.default_rng(4))
    sums, fast, slow, slow_grads, *_ = fast_and_slow(parts, documents, steps=3)
    torch.testing.assert_close(sums.total, slow, rtol=1e-6, atol=0)
    for name, grad in fast.items():
        torch.testing.assert_close(grad, slow_grads[name], rtol=2e-5, atol=1e-6)


def test_packing_does_not_leak_between_documents() -> None:
    """B62: other documents in the pack, whatever they hold, change nothing."""
    parts = make_parts(num_layers=2)
    rng = np.random.default_rng(5)
    mine = make_document(rng, 12, list(range(4, 12)))

    def gradients(neighbours):
        parts.model.zero_grad()
        batch = pack([*neighbours, mine, *neighbours])
        objective = Eagle3Objective(parts.model, parts.teacher, steps=4, decay=0.8)
        total = objective.loss(batch).total
        others = objective.loss(pack([*neighbours, *neighbours])).total if neighbours else 0.0
        (total - others).backward()
        return total - others, [p.grad.clone() for p in parts.model.parameters()]

    alone, alone_grads = gradients([])
    for seed in (6, 7):
        other = make_document(np.random.default_rng(seed), 9, list(range(9)))
        packed, packed_grads = gradients([other])
        torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
        for a, b in zip(packed_grads, alone_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_short_and_long_documents_stay_finite() -> None:
    """B55: lengths 1, 3 and 300 in one pack equal the single-document results."""
    parts = make_parts()
    rng = np.random.default_rng(8)
    documents = [make_document(rng, n, list(range(n))) for n in (3, 300, 1)]
    objective = Eagle3Objective(parts.model, parts.teacher, steps=3, decay=1.0)
    together = objective.loss(pack(documents)).total
    apart = sum(objective.loss(pack([d])).total for d in documents)
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)
    together.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in parts.model.parameters())


def test_broken_chains_can_be_dropped() -> None:
    """With broken_keep=0 step k compares exactly the rows whose first k draft tokens were right."""
    parts = make_parts()
    rng = np.random.default_rng(9)
    batch = pack([make_document(rng, 200, list(range(200)))])
    objective = Eagle3Objective(parts.model, parts.teacher, steps=3, decay=1.0, broken_keep=0.0)
    table = objective.matches(batch, 3)[0].greedy
    parts.model.train()
    sums = objective.loss(batch)
    alive = batch.run_left.numpy()[:, None] >= np.arange(3)
    prefix = np.cumprod(table.numpy(), axis=1).astype(bool)
    assert sums.count.tolist() == [
        200,
        (prefix[:, 0] & alive[:, 1]).sum(),
        (prefix[:, 1] & alive[:, 2]).sum(),
    ]


def test_inputs_from_inference_mode_and_noise_train() -> None:
    """B84: captured tensors may come from inference mode; noise never writes into them."""
    parts = make_parts(dtype=torch.float32)
    with torch.inference_mode():
        document = make_document(np.random.default_rng(10), 12, list(range(12)))
    batch = pack([document])
    before = batch.aux.clone()
    parts.model.train()
    objective = Eagle3Objective(parts.model, parts.teacher, steps=3, noise=0.1)
    objective.loss(batch, torch.Generator().manual_seed(0)).total.backward()
    assert torch.equal(batch.aux, before)
    assert all(float(p.grad.abs().max()) > 0 for p in parts.model.parameters())


def test_loss_over_chosen_rows_equals_a_smaller_vocabulary() -> None:
    """Training over rows of a frozen head is training a drafter that has only these rows."""
    small = make_parts(draft_vocab_size=11)
    whole = make_parts()
    ids = small.draft_ids
    with torch.no_grad():
        for name, p in whole.model.named_parameters():
            p.copy_(whole.target_head if name.startswith("lm_head") else small.model.get_parameter(name))
        small.model.lm_head.weight.copy_(whole.target_head[ids])
    small.teacher = type(small.teacher)(whole.target_head, ids)
    for parts in (small, whole):
        parts.model.lm_head.weight.requires_grad_(False)
        parts.model.embed_weight = whole.embed
    batch = pack(packed_documents(np.random.default_rng(11)))
    part = Eagle3Objective(whole.model, whole.teacher, steps=3, loss_rows=ids, loss_teacher=small.teacher)
    want = Eagle3Objective(small.model, small.teacher, steps=3).loss(batch)
    got = part.loss(pack(packed_documents(np.random.default_rng(11))))
    torch.testing.assert_close(got.total, want.total)
    assert torch.equal(got.correct, want.correct)
    # Evaluation compares with every row.
    _, all_rows = part.matches(pack(packed_documents(np.random.default_rng(11))), 3)
    assert int(all_rows.lost.sum()) == 0
    assert int(want.lost.sum()) > 0


def test_sampled_acceptance_counts_the_tokens_that_the_traffic_has() -> None:
    """A run whose tokens are the drafter's own proposals is accepted whole, whatever the target prefers."""
    parts = make_parts()
    rng = np.random.default_rng(5)
    rows, steps = 40, 3
    document = make_document(rng, rows, list(range(rows)))
    aux = document.aux.double()
    for t in range(rows - 1):  # the token after row t is what the drafter proposes there
        document.tokens[t + 1] = document.labels[t] = int(
            parts.model.propose(aux[: t + 1], torch.from_numpy(document.tokens[: t + 1]), steps=1)[0]
        )
    objective = Eagle3Objective(parts.model, parts.teacher, steps=steps)
    tables, _ = objective.matches(pack([document]), steps)
    assert tables.traffic[: rows - 1, 0].all()
    assert not tables.greedy[:, 0].all()
    result = evaluate(objective, [pack([document])], steps=steps, draft_tokens=1)
    assert result.sampled_acceptance_length > 1.9
    assert result.simulated_acceptance_length < result.sampled_acceptance_length


@pytest.mark.parametrize("form", ["tv", "lk"])
def test_forms_of_the_loss_add_up_and_follow_the_same_chains(form: str) -> None:
    """Documents with rows that have a label only; each form alone and both together."""
    documents = packed_documents(np.random.default_rng(1))
    totals, grads = {}, {}
    for name in ("ce", form, f"ce+{form}"):
        parts = make_parts(draft_vocab_size=11)
        parts.model.train()
        sums = Eagle3Objective(parts.model, parts.teacher, steps=3, form=name).loss(pack(documents))
        sums.total.backward()
        totals[name], grads[name] = sums.total.detach(), parts.model.fc.weight.grad
    torch.testing.assert_close(totals[f"ce+{form}"], totals["ce"] + totals[form])
    torch.testing.assert_close(grads[f"ce+{form}"], grads["ce"] + grads[form])
    assert float(grads[form].abs().max()) > 0
