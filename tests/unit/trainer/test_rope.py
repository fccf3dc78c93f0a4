"""One rope, whichever transformers version wrote the config."""

from __future__ import annotations

import pytest
import torch
from specdec_trainer.export import _rope_keys
from specdec_trainer.rope import Rope, inverse_frequencies, rope_parameters

from specdec_tap.errors import InputError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e6])
@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_both_spellings_mean_the_same(theta: float, scaling: dict | None) -> None:
    """B73: theta in the old place, in the new one, and as we export it."""
    old = {"rope_theta": theta, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}}
    assert rope_parameters(old) == rope_parameters(new)
    assert rope_parameters(_rope_keys(rope_parameters(old))) == rope_parameters(old)
    assert rope_parameters(old)["rope_theta"] == theta


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_frequencies_equal_hugging_face(scaling: dict | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters,
        max_position_embeddings=8192,
    )  # fmt: skip
    theirs = LlamaRotaryEmbedding(config)
    mine, scale = inverse_frequencies(64, rope_parameters({"rope_parameters": parameters}))
    torch.testing.assert_close(mine, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_old_names_and_multimodal_sections() -> None:
    assert rope_parameters({"rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"] == "linear"
    sections = {"type": "mrope", "mrope_section": [1, 2]}
    assert rope_parameters({"rope_theta": 7.0, "rope_scaling": sections}) == {
        "rope_type": "default", "rope_theta": 7.0,
    }  # fmt: skip
    per_type = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    assert rope_parameters({"rope_parameters": per_type})["rope_theta"] == 1e6


def test_unknown_type_is_refused() -> None:
    with pytest.raises(InputError, match=r"rope_type 'spiral' is not supported; expected one of"):
        rope_parameters({"rope_scaling": {"rope_type": "spiral"}})


def test_table_grows_with_positions() -> None:
    rope = Rope(4, {"rope_type": "default", "rope_theta": 10000.0})
    x = torch.randn(2, 1, 4)
    near = rope.apply(x, torch.tensor([3, 5]))
    far = rope.apply(x, torch.tensor([3, 70000]))
    assert torch.equal(near[0], far[0])
    torch.testing.assert_close(far.norm(dim=-1), x.norm(dim=-1))
