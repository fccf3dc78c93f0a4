"""One tiny random checkpoint per model family, in the layout that its real checkpoints have.

A fault of one layer, one position or a missing norm must be visible in a comparison, so weights are large,
every norm, bias, gate and sink is random, and eight layers give three different default aux ids.

``FAMILIES`` also says how far each family can be tested on a CPU, with the reason where it is not far.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tiny import make_tokenizer

VOCAB = 320
NUM_LAYERS = 8
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to make and serve a tiny member of a model family."""

    config: Callable[[], Any]
    """Returns the transformers config."""
    finish: Callable[[Path], None] | None = None
    """Changes the saved checkpoint into the layout that the family's real checkpoints have."""
    reference: str | None = None
    """A subfolder that holds the same weights for transformers, where it cannot read the layout itself."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's ``LLM`` that this family needs."""
    refused: str | None = None
    """Why vLLM 0.32 cannot give this family's aux states: part of the tap's message when it refuses."""


def make_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save a float32 checkpoint of family ``name`` with a byte-level tokenizer; returns ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    family = FAMILIES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)
    randomise(model)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    if family.finish is not None:
        family.finish(folder)
    return folder


def randomise(model: Any) -> None:
    """Replace every parameter and buffer of learned values by a random one that keeps the stream lively.

    Matrices get a gain of about one on their input width; vectors that scale (norms) lie in 0.5 to 1.5, or
    within 0.5 of zero where the family stores them minus one; other vectors (biases, sinks) are small.
    """
    import torch

    one_plus = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            if "norm" in key and value.dim() == 1:
                value.uniform_(-0.5, 0.5) if one_plus else value.uniform_(0.5, 1.5)
            elif "embed" in key:
                value.normal_(0.0, 1.0)
            elif value.dim() == 1:
                value.normal_(0.0, 0.2)
            else:
                # Fused experts [E, in, out] are as wide as the model on one side; the square root of the
                # last dimension is close enough for both orientations.
                value.normal_(0.0, 1.2 * value.shape[-1] ** -0.5)


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of ``config.json``; a value of None removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    file.write_text(json.dumps(config, indent=2))


def _llama() -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return LlamaConfig(**_COMMON, **_GQA, rope_parameters=rope, rms_norm_eps=1e-5)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, **_GQA, sliding_window=None)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_COMMON, **{**_GQA, "num_attention_heads": 2, "num_key_value_heads": 1})


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, **_GQA)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_COMMON, **_GQA, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )


def _phi3() -> Any:
    from transformers import Phi3Config

    gqa = {**_GQA, "num_attention_heads": 2}
    return Phi3Config(**_COMMON, **gqa, original_max_position_embeddings=2048)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **{**_COMMON, "tie_word_embeddings": True}, **_GQA, sliding_window=32, query_pre_attn_scalar=32
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**_COMMON, **_GQA, num_local_experts=4, num_experts_per_tok=2, sliding_window=32)


def _deepseek_v3(**changes: Any) -> Any:
    from transformers import DeepseekV3Config

    # As in the real configs, with a shorter original length so that tiny prompts reach past it. Without yarn
    # vLLM 0.32's CPU kernel rotates MLA queries wrongly (its input is a strided slice), tap or not.
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    }
    # The CPU build's MLA decode kernel is compiled for a latent of 512 + 64 only.
    values: dict[str, Any] = {
        **_COMMON,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 0,
        "rope_parameters": rope,
        **changes,
    }
    return DeepseekV3Config(**values)


def _as_deepseek_v3(folder: Path) -> None:
    """Add the keys of real DeepSeek-V3 configs that transformers has no field for and vLLM reads."""
    edit_config(folder, topk_method="noaux_tc", scoring_func="sigmoid")


KIMI_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


def _kimi_k2() -> Any:
    return _deepseek_v3(rope_parameters=dict(KIMI_ROPE), n_group=1, topk_group=1)


def _as_kimi_k2(folder: Path) -> None:
    """Turn a DeepSeek-V3 checkpoint into a Kimi-K2 one: same tensors, another config."""
    _keep_reference(folder)
    rope = {("type" if key == "rope_type" else key): value for key, value in KIMI_ROPE.items()}
    del rope["rope_theta"]
    edit_config(
        folder,
        model_type="kimi_k2",
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters=None,
        rope_theta=KIMI_ROPE["rope_theta"],
        rope_scaling=rope,
    )


def _as_kimi_k25(folder: Path) -> None:
    """Wrap a Kimi-K2 text model as Kimi-K2.5: prefix ``language_model.``, nested config, a vision tower."""
    import torch
    from safetensors.torch import load_file, save_file

    _as_kimi_k2(folder)
    text = json.loads((folder / "config.json").read_text())
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    # Beside the language model stand the tower's tensors, one of them named like an embedding.
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(8, 8, 32)
    tensors["mm_projector.proj.0.weight"] = torch.randn(128, 128)
    save_file(tensors, file)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "patch_size": 14,
        },
        "media_placeholder_token_id": 5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _keep_reference(folder: Path) -> None:
    """Keep the checkpoint as transformers saved it, beside the layout that vLLM reads."""
    reference = folder / "reference"
    reference.mkdir()
    for name in ("config.json", "model.safetensors"):
        (reference / name).write_bytes((folder / name).read_bytes())


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **_COMMON,
        **_GQA,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=128,
    )


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_COMMON,
        **_GQA,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_mtp_layers=0,
    )


_CPU_MLA = {"attention_backend": "CPU_MLA"}
FAMILIES: dict[str, Family] = {
    "llama": Family(config=_llama),
    "mistral": Family(config=_mistral),
    "qwen2": Family(config=_qwen2),
    "qwen3": Family(config=_qwen3),
    "qwen3-moe": Family(config=_qwen3_moe),
    "phi3": Family(config=_phi3),
    "gemma3": Family(config=_gemma3, refused="Gemma3ForCausalLM has no EAGLE-3 interface"),
    "gpt-oss": Family(config=_gpt_oss),
    "deepseek-v3": Family(config=_deepseek_v3, finish=_as_deepseek_v3, engine=_CPU_MLA),
    "kimi-k2": Family(config=_kimi_k2, finish=_as_kimi_k2, reference="reference", engine=_CPU_MLA),
    "kimi-k2.5": Family(
        config=_kimi_k2,
        finish=_as_kimi_k25,
        reference="reference",
        engine={**_CPU_MLA, "language_model_only": True},
    ),
    "llama4": Family(config=_llama4),
    "glm4-moe": Family(config=_glm4_moe, refused="Glm4MoeForCausalLM has no EAGLE-3 interface"),
}


def make_unsupported(folder: Path, kind: str) -> Path:
    """Save a config and a tokenizer without weights: the doctor must not need them."""
    import transformers

    small = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2}
    layers = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = {
        "gpt2": lambda: transformers.GPT2Config(**small, n_embd=64, n_layer=4, n_head=2),
        "opt": lambda: transformers.OPTConfig(**small, **layers, ffn_dim=128, word_embed_proj_dim=64),
        "bert": lambda: transformers.BertConfig(**small, **layers),
        "t5": lambda: transformers.T5Config(**small, d_model=64, num_layers=2),
        "unheard": lambda: transformers.LlamaConfig(**small, **layers),
    }[kind]()
    config.architectures = [
        {
            "gpt2": "GPT2LMHeadModel",
            "opt": "OPTForCausalLM",
            "bert": "BertModel",
            "t5": "T5ForConditionalGeneration",
            "unheard": "UnheardOfForCausalLM",
        }[kind]
    ]
    config.save_pretrained(folder)
    make_tokenizer(folder)
    return folder
