"""Kernels for GPUs compute what the plain code does; without a GPU flex attention runs unfused here."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from specdec_trainer import kernels
from specdec_trainer.attention import Layout, attend, attend_in_chunks
from specdec_trainer.build import compute_dtype
from specdec_trainer.flex import attend_flex, make_block_mask
from specdec_trainer.loss import softmax_parts


@pytest.fixture
def cpu_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a backward pass of flex attention on a CPU, though its unfused form has one."""
    import torch.nn.attention.flex_attention as module

    monkeypatch.setattr(module, "_validate_device", lambda *args: None)


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_flex_attention_equals_chunks_in_values_and_gradients(
    kv_heads: int, own: int, cpu_backward: None
) -> None:
    """Rows with holes, documents that start and end inside blocks, value heads of another size."""
    total, d, e = 430, 8, 5
    rows = torch.tensor([t for t in range(total) if t % 7 and not 150 <= t < 300])
    layout = Layout(
        rows, torch.tensor([0, 3, 129, 310, 311]), heads=4, keys=total, like=torch.zeros(1).double()
    )
    n = len(rows)
    inputs = [rand(n, 4, d, seed=0), rand(total, kv_heads, d, seed=1), rand(total, kv_heads, e, seed=2)]
    if own:
        inputs += [rand(n, own, kv_heads, d, seed=3), rand(n, own, kv_heads, e, seed=4)]
    inputs = [x.requires_grad_() for x in inputs]
    padded = inputs if own else [*inputs, None, None]
    pull = rand(n, 4, e, seed=5)
    results = []
    for function in (attend_flex, attend_in_chunks):
        out = function(*padded, layout, 0.3)
        results.append((out, *torch.autograd.grad((out * pull).sum(), inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_a_block_mask_says_which_blocks_are_seen_wholly() -> None:
    """Against the mask itself, entry by entry."""
    first = torch.tensor([0] * 200 + [200] * 500)
    last = torch.arange(700)
    mask = make_block_mask(last, first, 700)
    keys = torch.arange(700)
    allowed = (keys <= last[:, None]) & (keys >= first[:, None])
    for q in range(6):
        part = allowed[q * 128 : (q + 1) * 128]
        some = {k for k in range(6) if part[:, k * 128 : (k + 1) * 128].any()}
        listed = set(mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist())
        whole = set(mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist())
        assert listed | whole == some and not listed & whole
        for k in whole:
            assert part.shape[0] == 128 and part[:, k * 128 : (k + 1) * 128].all()
    assert int(mask.full_kv_num_blocks.sum()) > 0, "the case must have a whole block"


def test_the_fused_softmax_equals_the_plain_one() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    logits = rand(37, 130, seed=0).float() * 5
    target = torch.randint(-1, 130, (37,), generator=torch.Generator().manual_seed(1))
    plain = softmax_parts(logits, target)
    torch.testing.assert_close(plain[0], torch.softmax(logits, -1))
    torch.testing.assert_close(plain[1], torch.logsumexp(logits, -1))
    assert torch.equal(plain[2], (logits.argmax(-1) == target))
    assert kernels.agree(kernels.compiled(softmax_parts)(logits, target), plain, 1e-5)


def test_a_kernel_that_fails_or_disagrees_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def breaks() -> bool:
        raise RuntimeError("no compiler\nmore")

    with caplog.at_level(logging.WARNING, "specdec_trainer"):
        assert not kernels.usable("the kernel", breaks)
        assert not kernels.usable("the other kernel", lambda: False)
        assert kernels.usable("a good one", lambda: True)
    assert [r.getMessage() for r in caplog.records] == [
        "the kernel is not used, training is slower and as correct without it: RuntimeError: no compiler",
        "the other kernel is not used, training is slower and as correct without it: its values differ from "
        "the plain code's",
    ]
    one, two = torch.ones(3), torch.ones(3)
    two[1] = 1.2
    assert kernels.agree((one,), (one,), 1e-6) and not kernels.agree((one,), (two,), 1e-2)


def test_a_cpu_keeps_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda *args: pytest.fail("nothing is tried on a CPU"))
    cpu = torch.device("cpu")
    assert not kernels.fused_softmax_works(cpu, torch.float64)
    assert not kernels.flex_works(cpu, torch.float64, 4, 2, 8, 8)
    rows = torch.arange(3)
    layout = Layout(rows, torch.tensor([0]), heads=2, keys=3, like=torch.zeros(1))
    q, k, v = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    out = attend(q, k, v, None, None, layout, 0.5)
    assert torch.equal(out, attend_in_chunks(q, k, v, None, None, layout, 0.5))


@pytest.mark.parametrize(
    ("name", "device", "supported", "dtype"),
    [
        ("auto", "cpu", False, torch.float32),
        ("auto", "cpu", True, torch.bfloat16),
        ("auto", "cuda", False, torch.bfloat16),
        ("bfloat16", "cpu", False, torch.bfloat16),
        ("float32", "cuda", True, torch.float32),
    ],
)
def test_products_are_in_a_dtype_that_the_machine_multiplies(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, supported: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert compute_dtype(name, torch.device(device)) is dtype
