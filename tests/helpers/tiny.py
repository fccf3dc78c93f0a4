"""Tiny models with random weights, in the layouts that vLLM loads. Each takes well under a second to make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer (one token a byte, three special tokens) with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_llama(
    folder: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 320,
    tied: bool = True,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Path:
    """Save a random llama with a byte-level tokenizer; weights are large enough to give varied text.

    Eight layers, so that vLLM's default aux ids (2, N//2, N-3) are three different ones.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_eagle3_drafter(
    folder: Path, target: Path, *, draft_vocab_size: int = 128, tokens: Sequence[int] = (), seed: int = 1
) -> Path:
    """Save a random one-layer EAGLE-3 llama drafter for ``target`` (tensor names as vLLM reads them).

    It proposes ``tokens`` (ascending), or as many as ``draft_vocab_size`` says.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    # Evenly spaced target tokens; d2t holds offsets: target id = draft id + d2t[draft id].
    chosen = torch.linspace(0, config["vocab_size"] - 1, draft_vocab_size).long()
    if tokens:
        chosen = torch.tensor(tokens)
        draft_vocab_size = len(tokens)
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "layers.0.input_layernorm.weight": ones.clone(),
        "layers.0.hidden_norm.weight": ones.clone(),
        "layers.0.self_attn.q_proj.weight": matrix(heads * head, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": matrix(kv_heads * head, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads * head, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * head),
        "layers.0.post_attention_layernorm.weight": ones.clone(),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": ones.clone(),
        "lm_head.weight": matrix(draft_vocab_size, hidden),
        "d2t": chosen - torch.arange(draft_vocab_size),
        "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    drafter = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": draft_vocab_size,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act", "rope_theta",
    ):  # fmt: skip
        if name in config:
            drafter[name] = config[name]
    drafter["rope_theta"] = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(drafter, indent=2))
    return folder


def rotate_llama(folder: Path, source: Path, *, seed: int = 3) -> Path:
    """Save an untied float32 llama whose residual stream is rotated: same config, same answers, other states.

    This is what rotation before quantization (QuaRot, SpinQuant) does to a checkpoint.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = {name: weight.double() for name, weight in load_file(source / "model.safetensors").items()}
    hidden = weights["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))[0]
    for name, weight in weights.items():
        gain = None
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            gain = name.rsplit(".", 3)[0] + ".input_layernorm.weight"
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            gain = name.rsplit(".", 3)[0] + ".post_attention_layernorm.weight"
        elif name == "lm_head.weight":
            gain = "model.norm.weight"
        if gain is not None:  # a norm's gain does not commute with the rotation: the next product takes it
            weights[name] = weight * weights[gain] @ rotation
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = rotation.T @ weight
        elif name == "model.embed_tokens.weight":
            weights[name] = weight @ rotation
    for name, weight in weights.items():
        if "norm" in name:
            weights[name] = torch.ones_like(weight)
    rotated = {name: weight.float().contiguous() for name, weight in weights.items()}
    save_file(rotated, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
