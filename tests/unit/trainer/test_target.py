"""The target's tensors are found by name and shape in every layout of checkpoint, and copied bit for bit."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdec_tap.errors import InputError
from specdec_tap.target import TARGET_FILE, load_target, save_target

HIDDEN, VOCAB = 8, 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tensors(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {
        f"{prefix}embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        f"{prefix}norm.weight": rng.standard_normal(HIDDEN).astype(np.float32),
        f"{prefix}layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}layers.3.self_attn.k_norm.weight": np.ones(HIDDEN, np.float32),
    }
    if head:
        out[head] = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return out


def checkpoint(
    path: Path, weights: dict[str, np.ndarray], config: dict | None = None, *, files: int = 1
) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (path / "tokenizer.json").write_text("{}")
    if files == 1:
        save_file(weights, path / "model.safetensors")
        return path
    weight_map = {
        name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors"
        for i, name in enumerate(sorted(weights))
    }
    for file in set(weight_map.values()):
        save_file({n: weights[n] for n in weights if weight_map[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, files: int, tied: bool) -> None:
    """B69: single file or sharded, tied or not."""
    weights = tensors(head=None if tied else "lm_head.weight")
    model = checkpoint(tmp_path / "m", weights, {**CONFIG, "tie_word_embeddings": tied}, files=files)
    save_target(model, tmp_path / "shards" / "target")
    target = load_target(tmp_path / "shards" / "target")
    assert target.tied is tied
    np.testing.assert_array_equal(target.embed.float32(), weights["model.embed_tokens.weight"])
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    np.testing.assert_array_equal(target.head.float32(), head)
    np.testing.assert_array_equal(target.norm.float32(), weights["model.norm.weight"])
    assert [f.name for f in target.files] == ["tokenizer.json"]


def test_index_that_lists_a_missing_shard_names_it(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", tensors(), files=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"lists 'model-00002-of-00003\.safetensors', which is not there"):
        load_target(model)


@pytest.mark.parametrize(
    ("prefix", "head", "embed"),
    [
        ("language_model.model.", "language_model.lm_head.weight", "embed_tokens"),
        ("model.language_model.", "lm_head.weight", "embed_tokens"),
        ("backbone.", "lm_head.weight", "embeddings"),
        ("llm.model.", "llm.lm_head.weight", "embed_tokens"),
        ("transformer.", "lm_head.weight", "wte"),
    ],
)
def test_other_prefixes_and_decoys(tmp_path: Path, prefix: str, head: str, embed: str) -> None:
    """B70: VLM and Mamba names; decoys of another shape, of the vision tower, of an extra layer."""
    weights = {k.replace("embed_tokens", embed): v for k, v in tensors(prefix, head).items()}
    weights["vision_tower.embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    weights["model.visual.norm.weight"] = np.zeros(HIDDEN, np.float32)
    weights[f"{prefix}other.embed_tokens.weight"] = np.zeros((5, HIDDEN), np.float32)
    weights[f"{prefix}layers.4.shared_head.head.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    weights[f"{prefix}layers.4.embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
    config = {"model_type": "some_vl", "architectures": ["X"], "text_config": {**CONFIG}, "vision_config": {}}
    target = load_target(checkpoint(tmp_path / "m", weights, config))
    assert (target.embed.name, target.head.name) == (f"{prefix}{embed}.weight", head)
    assert target.norm.name == f"{prefix}norm.weight"
    assert target.hidden_size == HIDDEN


def test_ambiguous_names_are_listed_and_can_be_overridden(tmp_path: Path) -> None:
    weights = tensors()
    weights["twin.embed_tokens.weight"] = weights["model.embed_tokens.weight"] + 1
    model = checkpoint(tmp_path / "m", weights)
    with pytest.raises(
        InputError, match=r"could be the embedding: 'model\.embed_tokens\.weight', 'twin\.embed"
    ):
        load_target(model)
    target = load_target(model, embed_key="twin.embed_tokens.weight")
    np.testing.assert_array_equal(target.embed.float32(), weights["twin.embed_tokens.weight"])
    with pytest.raises(InputError, match=r"cannot be the embedding"):
        load_target(model, embed_key="model.norm.weight")
    with pytest.raises(InputError, match=r"embed_key names 'nope'"):
        load_target(model, embed_key="nope")


def test_missing_embedding_lists_candidates(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.embed_strange"] = weights.pop("model.embed_tokens.weight")
    with pytest.raises(InputError, match=r"no embedding tensor of shape \[30, 8\].*model\.embed_strange"):
        load_target(checkpoint(tmp_path / "m", weights))


def test_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no lm_head\.weight but its config says tie_word_embeddings: false"
    ):
        load_target(checkpoint(tmp_path / "m", tensors(head=None)))


def test_tied_model_ignores_a_stored_head_as_the_engine_does(tmp_path: Path) -> None:
    target = load_target(checkpoint(tmp_path / "m", tensors(), {**CONFIG, "tie_word_embeddings": True}))
    assert target.tied
    assert target.head == target.embed


@pytest.mark.parametrize("name", ["lm_head.qweight", "lm_head.weight_packed", "lm_head.weight"])
def test_quantized_head_is_refused(tmp_path: Path, name: str) -> None:
    weights = tensors(head=None)
    weights[name] = np.zeros((VOCAB, HIDDEN), np.int8)
    with pytest.raises(InputError, match=r"output head of .* is quantized \(tensor 'lm_head"):
        load_target(checkpoint(tmp_path / "m", weights))


def test_quantized_layers_with_plain_head_are_fine(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.layers.0.mlp.up_proj.qweight"] = np.zeros((4, 4), np.int32)
    assert load_target(checkpoint(tmp_path / "m", weights)).head.name == "lm_head.weight"


Raw = dict[str, tuple[str, tuple[int, ...]]]


def raw_checkpoint(path: Path, layout: Raw, config: dict, *, files: int = 2) -> dict[str, np.ndarray]:
    """A checkpoint of any dtypes, which numpy does not have; returns the random bits of its bf16 tensors."""
    rng = np.random.default_rng(3)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    bits, weight_map = {}, {}
    for part in range(files):
        header, data = {}, b""
        for name in sorted(layout)[part::files]:
            dtype, shape = layout[name]
            value = rng.standard_normal(shape).astype("<f4")
            width = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1}[dtype]
            bits[name] = (value.view("<u4") >> 16).astype("<u2")
            raw = bits[name].tobytes() if dtype == "BF16" else rng.bytes(width * value.size)
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
            weight_map[name] = f"model-{part + 1:05d}-of-{files:06d}.safetensors"
        text = json.dumps(header).encode()
        file = path / f"model-{part + 1:05d}-of-{files:06d}.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {name: value for name, value in bits.items() if layout[name][0] == "BF16"}


def int4_layout() -> tuple[Raw, dict]:
    """Kimi-K2.5 as published: experts packed by compressed-tensors, all else bf16, a vision tower beside."""
    lm = "language_model.model."
    layout: Raw = {
        f"{lm}embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        f"{lm}norm.weight": ("BF16", (HIDDEN,)),
        "language_model.lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
        f"{lm}layers.0.self_attn.kv_a_layernorm.weight": ("BF16", (HIDDEN,)),
        f"{lm}layers.0.self_attn.o_proj.weight": ("BF16", (HIDDEN, HIDDEN)),
        "vision_tower.encoder.final_layernorm.weight": ("BF16", (HIDDEN,)),
        "vision_tower.patch_embed.pos_emb.weight": ("BF16", (VOCAB, HIDDEN)),
        "mm_projector.pre_norm.weight": ("BF16", (HIDDEN,)),
    }
    for expert in range(2):
        for proj in ("gate_proj", "up_proj", "down_proj"):
            name = f"{lm}layers.1.mlp.experts.{expert}.{proj}"
            layout[f"{name}.weight_packed"] = ("I32", (16, HIDDEN // 8))
            layout[f"{name}.weight_scale"] = ("BF16", (16, 1))
            layout[f"{name}.weight_shape"] = ("I32", (2,))
    quantization = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }  # fmt: skip
    text = {**CONFIG, "model_type": "kimi_k2", "quantization_config": quantization}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "tie_word_embeddings": False, "text_config": text, "vision_config": {"hidden_size": 4},
    }  # fmt: skip
    return layout, config


def fp8_layout() -> tuple[Raw, dict]:
    """DeepSeek-V3 as published: fp8 blocks with ``weight_scale_inv``, and a layer that predicts further."""
    layout: Raw = {
        "model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.layers.4.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.layers.4.shared_head.head.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.layers.4.shared_head.norm.weight": ("BF16", (HIDDEN,)),
    }
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        layout[f"model.layers.0.{name}.weight"] = ("F8_E4M3", (HIDDEN, HIDDEN))
        layout[f"model.layers.0.{name}.weight_scale_inv"] = ("F32", (1, 1))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return layout, {**CONFIG, "model_type": "deepseek_v3", "quantization_config": quantization}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (int4_layout, ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight",
                       "language_model.model.norm.weight")),
        (fp8_layout, ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")),
    ],
)  # fmt: skip
def test_int4_and_fp8_checkpoints_are_found_and_read(tmp_path: Path, make, names) -> None:
    layout, config = make()
    bits = raw_checkpoint(tmp_path / "m", layout, config)
    save_target(tmp_path / "m", tmp_path / "t")
    for target in (load_target(tmp_path / "m"), load_target(tmp_path / "t")):
        assert (target.tied, target.norm_kind) == (False, "rms")
        for ref, name in zip((target.embed, target.head, target.norm), names, strict=True):
            np.testing.assert_array_equal(ref.bits(), bits[name])
            np.testing.assert_array_equal(ref.float32().view("<u4") >> 16, bits[name])


QUANTIZED_HEADS = {
    "fp8 blocks": {"weight": ("F8_E4M3", (VOCAB, HIDDEN)), "weight_scale_inv": ("F32", (1, 1))},
    "int8": {"weight": ("I8", (VOCAB, HIDDEN)), "weight_scale": ("BF16", (VOCAB, 1))},
    "nvfp4": {"weight": ("U8", (VOCAB, HIDDEN // 2)), "weight_scale": ("F8_E4M3", (VOCAB, 1))},
    "int4": {"weight_packed": ("I32", (VOCAB, HIDDEN // 8)), "weight_scale": ("BF16", (VOCAB, 1)),
             "weight_shape": ("I64", (2,))},
    "gptq": {"qweight": ("I32", (HIDDEN // 8, VOCAB)), "qzeros": ("I32", (1, 4)),
             "scales": ("BF16", (1, VOCAB))},
}  # fmt: skip


@pytest.mark.parametrize("kind", QUANTIZED_HEADS)
@pytest.mark.parametrize("table", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("declared", [False, None])
def test_a_quantized_table_is_named_with_its_dtype(tmp_path: Path, kind: str, table: str, declared) -> None:
    """Not taken for a model without a head, even when its config does not say whether it is tied."""
    layout, config = fp8_layout()
    prefix = "" if kind.startswith("fp8") else "language_model."
    layout = {prefix + name: value for name, value in layout.items()}
    del layout[f"{prefix}{table}.weight"]
    layout |= {f"{prefix}{table}.{name}": value for name, value in QUANTIZED_HEADS[kind].items()}
    config["tie_word_embeddings"] = declared
    raw_checkpoint(tmp_path / "m", layout, config)
    first, (dtype, _) = next(iter(QUANTIZED_HEADS[kind].items()))
    what = "output head" if table == "lm_head" else "embedding"
    expected = (
        rf"the {what} of .* is quantized \(tensor '{prefix}{table}\.{first}', dtype {dtype}\); "
        r"training needs it in bfloat16, float16 or float32: point --target at the original checkpoint"
    )
    with pytest.raises(InputError, match=expected):
        load_target(tmp_path / "m")


def test_a_packed_head_of_a_tied_model_is_ignored_as_the_engine_does(tmp_path: Path) -> None:
    layout, config = fp8_layout()
    layout["lm_head.weight"] = ("F8_E4M3", (VOCAB, HIDDEN))
    raw_checkpoint(tmp_path / "m", layout, {**config, "tie_word_embeddings": True})
    assert load_target(tmp_path / "m").tied


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "llama"}, "rms"),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "rms_one_plus"),
        ({"model_type": "qwen3_next"}, "rms_one_plus"),
        ({"model_type": "never_heard_of"}, "unknown"),
    ],
)
def test_norm_flavour_comes_from_the_family(tmp_path: Path, config: dict, kind: str) -> None:
    """B72: Gemma-like norms store weight minus one; unknown families are not guessed."""
    target = load_target(checkpoint(tmp_path / "m", tensors(), {**CONFIG, **config}))
    assert target.norm_kind == kind
    assert target.logit_softcap == config.get("final_logit_softcapping")


def test_norm_with_bias_is_layer_norm_and_is_copied(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.norm.bias"] = np.full(HIDDEN, 2.0, np.float32)
    weights["lm_head.bias"] = np.arange(VOCAB, dtype=np.float32)
    model = checkpoint(tmp_path / "m", weights, {**CONFIG, "model_type": "phi", "layer_norm_eps": 1e-3})
    save_target(model, tmp_path / "t")
    target = load_target(tmp_path / "t")
    assert (target.norm_kind, target.norm_bias.float32()[0], target.head_bias.float32()[3]) == (
        "layer_norm",
        2.0,
        3.0,
    )


@pytest.mark.parametrize(
    ("extra", "scale"),
    [
        ({"model_type": "cohere", "logit_scale": 0.25}, 0.25),
        ({"model_type": "granite", "logits_scaling": 8.0}, 0.125),
        ({"model_type": "minicpm", "dim_model_base": 4}, 0.5),
        ({"model_type": "llama", "logit_scale": 9.0}, 1.0),
    ],
)
def test_logit_scale_follows_the_family(tmp_path: Path, extra: dict, scale: float) -> None:
    assert load_target(checkpoint(tmp_path / "m", tensors(), {**CONFIG, **extra})).logit_scale == scale


def test_save_is_private_whole_and_idempotent(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", tensors())
    out = tmp_path / "shards" / "target"
    save_target(model, out)
    inode = (out / TARGET_FILE).stat().st_ino
    save_target(model, out)
    assert (out / TARGET_FILE).stat().st_ino == inode
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in out.iterdir()} == {0o600}
    assert [p.name for p in out.parent.iterdir()] == ["target"]
    assert sorted(load_file(out / TARGET_FILE)) == ["embed_tokens.weight", "lm_head.weight", "norm.weight"]


def test_save_from_a_saved_folder_round_trips(tmp_path: Path) -> None:
    save_target(checkpoint(tmp_path / "m", tensors()), tmp_path / "a")
    assert load_target(tmp_path / "a").norm_eps == 1e-5


def test_another_target_is_refused(tmp_path: Path) -> None:
    save_target(checkpoint(tmp_path / "a", tensors()), tmp_path / "t")
    other = checkpoint(tmp_path / "b", tensors(), {**CONFIG, "rms_norm_eps": 1e-6})
    with pytest.raises(InputError, match=r"holds the tensors of another target"):
        save_target(other, tmp_path / "t")


def test_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match=r"holds no target\.json; move it away"):
        save_target(checkpoint(tmp_path / "m", tensors()), tmp_path / "t")
    assert (tmp_path / "t" / "mine.txt").read_text() == "keep"


def test_ranks_that_save_at_once_all_succeed(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", tensors())
    problems: list[BaseException] = []

    def save() -> None:
        try:
            save_target(model, tmp_path / "t")
        except BaseException as err:
            problems.append(err)

    threads = [threading.Thread(target=save) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not problems
    assert load_target(tmp_path / "t").vocab_size == VOCAB
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "t"]


@pytest.mark.parametrize("keep", [0, 7, 40, 400, 1500])
def test_cut_file_is_an_error_with_the_path(tmp_path: Path, keep: int) -> None:
    model = checkpoint(tmp_path / "m", tensors())
    file = model / "model.safetensors"
    os.truncate(file, keep)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_target(model)


def test_no_safetensors_names_what_was_found(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", tensors())
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"found 'pytorch_model\.bin'; only safetensors"):
        load_target(model)


@pytest.mark.parametrize("value", [None, 0, "8", True])
def test_bad_config_value_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match=r"hidden_size is .*expected a positive integer"):
        load_target(checkpoint(tmp_path / "m", tensors(), {**CONFIG, "hidden_size": value}))


def test_padded_vocab_rows_are_accepted(tmp_path: Path) -> None:
    """B68: config.vocab_size smaller than the rows stored."""
    target = load_target(checkpoint(tmp_path / "m", tensors(), {**CONFIG, "vocab_size": VOCAB - 3}))
    assert (target.vocab_size, target.embed.shape[0]) == (VOCAB - 3, VOCAB)


def test_bfloat16_bits_and_rows(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    weights = {k: torch.from_numpy(v).bfloat16() for k, v in tensors().items()}
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_torch(weights, model / "model.safetensors")
    save_target(model, tmp_path / "t")
    ref = load_target(tmp_path / "t").embed
    assert torch.equal(ref.torch(), weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(ref.float32(), weights["model.embed_tokens.weight"].float().numpy())
    np.testing.assert_array_equal(ref.bits(3, 5), ref.bits()[3:5])
    with pytest.raises(InputError, match=r"rows \[3, 99\)"):
        ref.bits(3, 99)


def test_import_needs_no_torch() -> None:
    code = "import sys, specdec_tap.target; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
