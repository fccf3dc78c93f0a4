"""A trained drafter as a folder that an engine loads; checked after writing, renamed into place last.

Formats differ in tensor names, in where facts are kept, and in what a layer id means (id i = residual
stream entering layer i in the vLLM family, output of layer i in the SGLang family).
"""

from __future__ import annotations

import dataclasses
import json
import pickle  # its error class
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.target import Fingerprint, Target, fingerprint

from .algorithms import ALGORITHMS, algorithm_of
from .drafter import Drafter
from .mla import LatentShape
from .model import LAYERS, DraftConfig
from .rope import rope_parameters

FORMATS = ("vllm", "sglang", "trtllm", "speculators")
WEIGHTS = "model.safetensors"
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION_KEY, RESIDUAL_IN, LAYER_OUTPUT = "aux_layer_convention", "residual_in", "layer_output"
"""What an id i means: the residual stream entering layer i (vLLM), or the output of layer i (SGLang)."""


def export_drafter(
    model: Drafter,
    out_dir: Path,
    *,
    target: Target | None = None,
    target_name: str | None = None,
    format: str = "vllm",
    card: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    draft_tokens: int = 3,
    learnt_from: Fingerprint | None = None,
) -> None:
    """Write a drafter folder.

    Args:
        model: Its weights are read, not changed.
        out_dir: Replaced if it holds a drafter, refused if it holds anything else.
        target: For its end-of-sequence ids; facts only.
        target_name: Hub id or folder of the target, for the speculators format and the card.
        format: One of ``FORMATS``.
        card: Text of README.md.
        dtype: Of the stored weights.
        draft_tokens: Proposal length noted in the speculators format.
        learnt_from: Of the target that gave the states; ``target``'s by default.

    Raises:
        ConfigError: The format cannot express this drafter.
        InputError: The folder cannot be written or would overwrite something else.
    """
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
    config = engine_config(model.config, format, target=target, target_name=target_name, dtype=dtype,
                           draft_tokens=draft_tokens)  # fmt: skip
    if learnt_from is None and target is not None:
        learnt_from = fingerprint(target)
    if learnt_from is not None:
        facts = config["transformer_layer_config"] if format == "speculators" else config
        facts["target_tables_sha256"] = learnt_from.tables
        facts["target_layers_sha256"] = learnt_from.layers
    tensors = engine_tensors(model, format, dtype)
    if out_dir.exists() and not (out_dir / WEIGHTS).is_file() and any(out_dir.iterdir()):
        raise InputError(f"{str(out_dir)!r} exists and holds no drafter; choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    part = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex}.tmp"
    try:
        part.mkdir(mode=0o700)
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if card is not None:
            (part / "README.md").write_text(card)
        for file in part.iterdir():
            file.chmod(0o600)
        if problems := check_drafter(part, target=target):
            raise InputError("the exported drafter is wrong: " + "; ".join(problems))
        if out_dir.exists():
            old = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex}.old"
            out_dir.rename(old)
            part.rename(out_dir)
            shutil.rmtree(old)
        else:
            part.rename(out_dir)
    except OSError as err:
        raise InputError(f"cannot write the drafter to {str(out_dir)!r}: {err}") from err
    finally:
        shutil.rmtree(part, ignore_errors=True)


def engine_config(
    draft: DraftConfig,
    format: str,
    *,
    target: Target | None,
    target_name: str | None,
    dtype: torch.dtype,
    draft_tokens: int,
) -> dict[str, Any]:
    """``config.json`` of one format."""
    names, kind = LAYERS[draft.layer].engine, ALGORITHMS[draft.algorithm]
    if draft.algorithm != "eagle3" and format != "vllm":
        raise ConfigError(
            f"algorithm {draft.algorithm} is exported for vllm only; {format!r} is not known for it"
        )
    if draft.latent is not None and format != "vllm":
        raise ConfigError(f"layer {draft.layer} cannot be expressed in the {format} format; export for vllm")
    if draft.latent is not None and draft.latent.q_lora_rank is None:
        raise ConfigError(
            "the drafter has no query latent (q_lora_rank null), and vLLM 0.32 looks for one in "
            "every drafter "
            f"of layer {draft.layer}; train with q_lora_rank set"
        )
    flat: dict[str, Any] = {
        "model_type": names.model_type,
        "hidden_size": draft.hidden_size,
        "num_hidden_layers": draft.num_layers,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_position_embeddings,
        "vocab_size": draft.vocab_size,
        "attention_bias": draft.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": draft.mlp_bias,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        **_rope_keys(draft.rope),
    }
    if draft.latent is not None:
        del flat["head_dim"]  # of nothing in latent attention; transformers derives another one
        flat |= {
            **dataclasses.asdict(draft.latent),
            # The MLP is dense in every layer; transformers' class for this type expects to hear it.
            "first_k_dense_replace": draft.num_layers,
            "num_nextn_predict_layers": 0,
        }
    dtype_name = str(dtype).removeprefix("torch.")
    if target is not None:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = target.text_config.get(key, target.config.get(key))
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                flat[key] = value
    if format == "speculators":
        return _speculators_config(draft, flat, dtype_name, target, target_name, draft_tokens)
    ids = [i if format == "vllm" else i - 1 for i in draft.aux_layer_ids]
    if min(ids, default=0) < 0:
        raise ConfigError(
            f"aux layer 0 (the embeddings) cannot be expressed in the {format} format, whose ids mean "
            "outputs of "
            "layers; export for vllm"
        )
    # V1 reads the nested list, V2 the top-level one, and the width of fc comes from num_aux_hidden_states.
    flat |= {
        "architectures": [names.architecture],
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.hidden_size,
        "num_aux_hidden_states": len(ids),
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "norm_before_fc": draft.norm_before_fc,
        },
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }
    if format != "vllm":
        unsupported = [
            name
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            if getattr(draft, name)
        ]
        if draft.layer != "llama":
            unsupported.append(f"layer {draft.layer}")
        if draft.num_layers > 1:
            unsupported.append(f"num_layers {draft.num_layers}")
        if unsupported and format == "trtllm":
            raise ConfigError(
                f"TensorRT-LLM's EAGLE-3 drafter has no {', '.join(unsupported)}; train with these "
                "off to export "
                "for it"
            )
    config = kind.engine_config(draft, flat)
    if IDS_KEY in config:
        config[CONVENTION_KEY] = RESIDUAL_IN if format == "vllm" else LAYER_OUTPUT
    if not kind.own_head and target is not None and target.logit_scale != 1.0:
        config["logit_scale"] = target.logit_scale
    return config


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Rope settings in both spellings (transformers 4 and 5)."""
    out: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_parameters": dict(rope)}
    if rope["rope_type"] != "default":
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        out["rope_scaling"] = scaling
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        out["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return out


def _speculators_config(
    draft: DraftConfig,
    flat: dict[str, Any],
    dtype: str,
    target: Target | None,
    target_name: str | None,
    tokens: int,
) -> dict[str, Any]:
    if target_name is None:
        raise ConfigError(
            "the speculators format names its target; pass --target-name (a hub id or a folder)"
        )
    architectures = [] if target is None else list(target.config.get("architectures") or [])
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft.draft_vocab_size,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "target_hidden_size": draft.hidden_size,
        IDS_KEY: list(draft.aux_layer_ids),
        CONVENTION_KEY: RESIDUAL_IN,
        "tie_word_embeddings": False,
        "has_no_defaults_at_init": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformer_layer_config": flat,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }


def engine_tensors(model: Drafter, format: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of one format; never ``embed_tokens``, which engines share from the target."""
    out: dict[str, Tensor] = {}
    for name, value in model.engine_tensors().items():
        if format in ("sglang", "trtllm") and model.config.num_layers == 1:
            name = name.replace("layers.0.", "midlayer.")
        kept = dtype if value.is_floating_point() else value.dtype
        out[name] = value.detach().to("cpu", kept).contiguous().clone()
    if model.reduced_vocab or format in ("sglang", "speculators"):
        d2t = model.d2t.cpu()
        t2d = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(len(d2t)) + d2t] = True
        out["d2t"], out["t2d"] = d2t.clone(), t2d
    return out


def drafter_fingerprint(path: Path) -> Fingerprint:
    """Of the target that a drafter folder was trained for; unknown in those of others."""
    config = _read_config(path)
    facts = {**config.get("transformer_layer_config", {}), **config}
    return Fingerprint(facts.get("target_tables_sha256"), facts.get("target_layers_sha256"))


def expected_tensors(draft: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the drafter's own tensors, as in its ``state_dict``."""
    kind = ALGORITHMS[draft.algorithm]
    with torch.device("meta"):
        model = kind(draft)
    absent = {"d2t"} if kind.own_head else {"d2t", "lm_head.weight"}
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in absent}


def check_drafter(path: Path, *, target: Target | None = None) -> list[str]:
    """What is wrong with a drafter folder; an empty list means an engine will load what was trained.

    Args:
        path: The folder.
        target: When given, vocabulary, hidden size and a stored embedding are compared with it.
    """
    try:
        config, tensors = read_folder(path)
        draft, _ = parse_config(config, None if target is None else target.num_hidden_layers)
    except (InputError, ConfigError) as err:
        return [str(err)]
    problems = []
    tensors = ALGORITHMS[draft.algorithm].own_names({canonical_name(n): t for n, t in tensors.items()})
    expected = expected_tensors(draft)
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"tensor {name} is missing")
        elif tuple(tensors[name].shape) != shape:
            text = f"tensor {name} has shape {list(tensors[name].shape)}; expected {list(shape)}"
            if name == "fc.weight":
                text += _fusion_width(config, draft, tensors[name])
            problems.append(text)
    extra = sorted(set(tensors) - set(expected) - {"d2t", "t2d", "embed_tokens.weight"})
    if extra:
        problems.append(f"unexpected tensors: {', '.join(extra)}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            problems.append(f"tensor {name} holds values that are not finite")
    problems += _mapping_problems(draft, tensors.get("d2t"), tensors.get("t2d"))
    if config.get("quantization_config"):
        problems.append(
            "config.json has a quantization_config, often the target's: an engine would take these plain "
            "weights for packed ones; remove it"
        )
    if target is not None:
        if outside := [i for i in named_layers(config) if not 0 <= i <= target.num_hidden_layers]:
            problems.append(
                f"config.json names aux layers {outside}, but the target has {target.num_hidden_layers} "
                "layers"
            )
        if what := drafter_fingerprint(path).differs(fingerprint(target)):
            problems.append(
                f"it was trained for a model with another {what} than {str(target.path)!r} "
                "(fingerprints differ)"
            )
        if target.vocab_size != draft.vocab_size:
            problems.append(f"vocab_size is {draft.vocab_size:,}, the target's is {target.vocab_size:,}")
        embed = tensors.get("embed_tokens.weight")
        if embed is not None:
            theirs = target.embed.torch()[: target.vocab_size]
            if embed.shape != theirs.shape or not torch.equal(embed.to(theirs.dtype), theirs):
                problems.append(
                    "embed_tokens.weight differs from the target's: the engine would keep this copy; "
                    "remove it"
                )
    return problems


def check_notes(path: Path, *, target: Target | None = None) -> list[str]:
    """What an engine will decide for itself about a drafter folder, and what is assumed here."""
    try:
        config = _read_config(path)
    except InputError:  # said by check_drafter
        return []
    notes = []
    if config.get("auto_map"):
        notes.append(
            "config.json has an auto_map: an engine would run code of that folder, and refuses to without "
            "--trust-remote-code; remove it, engines have classes of their own for drafters"
        )
    if ALGORITHMS[algorithm_of(config) or "eagle3"].reads != "aux":
        return notes
    if named_layers(config):
        return notes + _layer_notes(config)
    layers = _target_layers(config, None if target is None else target.num_hidden_layers)
    these = f"here {default_layers(layers)}" if layers else "N is the target's number of layers"
    return [
        *notes,
        "config.json names no aux layers (eagle_aux_hidden_state_layer_ids): vLLM will take its default "
        f"(2, N//2, N-3), {these}; make sure that the drafter was trained on these",
    ]


def _layer_notes(config: dict[str, Any]) -> list[str]:
    """Which of the two meanings of a layer id is assumed, and which runner reads the list."""
    ids, stated = named_layers(config), config.get(CONVENTION_KEY)
    notes = []
    outputs = f"outputs of layers (SGLang's and SpecForge's spelling; vLLM's is {[i + 1 for i in ids]})"
    too_low = "vLLM takes the list as it stands and would read one layer too low: write its spelling for vLLM"
    if stated == LAYER_OUTPUT:
        notes.append(f"aux layers {ids} are {outputs}, as {CONVENTION_KEY} says; {too_low}")
    elif stated != RESIDUAL_IN and "speculators_model_type" not in config:
        if ids[0] == 1:
            notes.append(
                f"aux layers {ids} are assumed to be {outputs}, because the list begins with 1: the default "
                f"(1, N//2-1, N-4) there; {too_low}. If it was trained on the streams after {ids} layers, "
                "the list is right for vLLM"
            )
        else:
            notes.append(
                f"aux layers {ids} are assumed to be the streams after so many layers (vLLM's spelling), "
                "because the list does not begin with 1, as SGLang's and SpecForge's defaults do; if they "
                f"are outputs of layers, vLLM's spelling is {[i + 1 for i in ids]}"
            )
    if not config.get(IDS_KEY):
        notes.append(
            f"{IDS_KEY} is only inside eagle_config: vLLM's V1 runner reads it there, its V2 runner does not "
            "and takes the default; write it at the top level too"
        )
    return notes


def named_layers(config: dict[str, Any]) -> list[int]:
    """Layer ids in ``config.json``; none where the engine takes its default."""
    nested = config.get("eagle_config") or {}
    return list(config.get(IDS_KEY) or nested.get(IDS_KEY) or [])


def default_layers(num_layers: int) -> list[int]:
    """The layers that vLLM, and SGLang in its own spelling, takes for a drafter that names none."""
    return sorted({2, num_layers // 2, num_layers - 3})


def _target_layers(config: dict[str, Any], known: int | None) -> int:
    """Decoder layers of a drafter's target; 0 where nothing tells."""
    layers = known or int(config.get("target_num_hidden_layers") or 0)
    return layers if layers >= 6 else 0


def _fusion_width(config: dict[str, Any], draft: DraftConfig, fc: Tensor) -> str:
    """Why ``fc`` has another width than the ids say, to be added to a message."""
    ids, size = named_layers(config), draft.hidden_size
    if not ids or fc.ndim != 2 or fc.shape[1] % size:
        return ""
    return (
        f": config.json names {len(ids)} aux layers {ids}, but the tensor joins {fc.shape[1] // size}; leave "
        "only those that are its input in eagle_aux_hidden_state_layer_ids"
    )


def _mapping_problems(draft: DraftConfig, d2t: Tensor | None, t2d: Tensor | None) -> list[str]:
    reduced = draft.draft_vocab_size != draft.vocab_size
    if d2t is None:
        if reduced:
            return [
                f"d2t is missing though draft_vocab_size {draft.draft_vocab_size:,} differs from vocab_size "
                f"{draft.vocab_size:,}: an engine would take draft ids for target ids"
            ]
        return []
    problems = []
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (draft.draft_vocab_size,):
        return [f"d2t is {d2t.dtype} {list(d2t.shape)}; expected int64 [{draft.draft_vocab_size}]"]
    ids = torch.arange(len(d2t)) + d2t
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        problems.append("d2t is not ascending: it must hold offsets (target id minus draft id), not ids")
    if int(ids.min()) < 0 or int(ids.max()) >= draft.vocab_size:
        problems.append(f"d2t points outside the target vocabulary of {draft.vocab_size:,}")
    elif t2d is not None:
        want = torch.zeros(draft.vocab_size, dtype=torch.bool)
        want[ids] = True
        if t2d.dtype != torch.bool or not torch.equal(t2d, want):
            problems.append("t2d does not name exactly the tokens that d2t maps to")
    return problems


def canonical_name(name: str) -> str:
    """vLLM's name of a tensor in any of the layouts."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and all tensors of a drafter folder."""
    config = _read_config(path)
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(
            f"{str(path)!r} is not a drafter folder: *.safetensors (or pytorch_model*.bin) is missing"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_tensors(file)
    return config, tensors


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as err:
        raise InputError(f"{str(path)!r} is not a drafter folder: {err}") from err
    if not isinstance(config, dict):
        raise InputError(f"{str(path)!r} is not a drafter folder: config.json holds no object")
    return config


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (OSError, SafetensorError) as err:
            raise InputError(f"cannot read {str(file)!r}: {err}") from err
    try:
        # weights_only: torch rebuilds tensors and plain containers, and calls nothing else of the pickle.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as err:
        raise InputError(
            f"cannot read {str(file)!r} as plain tensors ({str(err).splitlines()[0]}); convert it to "
            "model.safetensors where its pickle can be trusted"
        ) from err
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"{str(file)!r} does not hold tensors by name; expected a state dict")
    return tensors


def parse_config(config: dict[str, Any], target_layers: int | None = None) -> tuple[DraftConfig, str]:
    """Drafter settings from ``config.json`` of any format.

    Args:
        config: Its content.
        target_layers: Decoder layers of the target, for a config that names no aux layers. Where nothing
            tells, their ids are 1, 2, 3: right in number only.

    Returns:
        ``(settings, "vllm" | "speculators")``, layer ids in vLLM's spelling; those of foreign SGLang folders
        look like vLLM's and are taken as such unless the caller knows better.

    Raises:
        InputError: A field is missing.
    """
    speculators = "speculators_model_type" in config
    algorithm = algorithm_of(config) or "eagle3"
    kind = ALGORITHMS[algorithm]
    inner = config.get("transformer_layer_config", {}) if speculators else config
    inner = {**inner, **kind.unused}
    facts = config
    nested = config.get("eagle_config") or {}
    ids = named_layers(config)
    if config.get(CONVENTION_KEY) == LAYER_OUTPUT:
        ids = [i + 1 for i in ids]
    width = facts.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    if kind.reads == "final":
        ids = []
    elif not ids:
        layers = _target_layers(config, target_layers)
        ids = default_layers(layers) if layers else list(range(1, width + 1))
    layers_of = {kind.engine.model_type: name for name, kind in LAYERS.items()}
    layers_of["deepseek_v3"] = "kimik2"
    layer = layers_of.get(str(inner.get("model_type", "llama")))
    if layer is None:
        raise InputError(
            f"config.json of the drafter has model_type {inner['model_type']!r}; expected one of "
            f"{', '.join(sorted(layers_of))}"
        )
    try:
        latent = _parse_latent(inner) if layer == "kimik2" else None
        heads = int(inner["num_attention_heads"])
        head_dim = inner.get("head_dim") or inner["hidden_size"] // heads
        values: dict[str, Any] = dict(
            algorithm=algorithm,
            layer=layer,
            latent=latent,
            hidden_size=int(inner["hidden_size"]),
            num_layers=int(inner.get("num_hidden_layers", 1)),
            intermediate_size=int(inner["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(inner.get("num_key_value_heads") or heads) if latent is None else heads,
            head_dim=int(head_dim) if latent is None else latent.qk_head_dim,
            rms_norm_eps=float(inner["rms_norm_eps"]),
            rope=rope_parameters(inner),
            max_position_embeddings=int(inner.get("max_position_embeddings", 32768)),
            vocab_size=int(inner["vocab_size"]),
            draft_vocab_size=int(config.get("draft_vocab_size") or inner["vocab_size"]),
            aux_layer_ids=tuple(int(i) for i in ids),
            norm_before_residual=bool(facts.get("norm_before_residual", speculators)),
            norm_before_fc=bool(nested.get("norm_before_fc", facts.get("norm_before_fc", False))),
            fc_norm=bool(facts.get("fc_norm", False)),
            norm_output=bool(facts.get("norm_output", False)),
            attention_bias=bool(inner.get("attention_bias", False)),
            mlp_bias=bool(inner.get("mlp_bias", False)),
        )
        draft = DraftConfig(**(values | kind.parse(config)))
    except (KeyError, TypeError, ValueError) as err:
        raise InputError(f"config.json of the drafter is incomplete or wrong: {err!r}") from err
    return draft, "speculators" if speculators else "vllm"


def _parse_latent(inner: dict[str, Any]) -> LatentShape:
    rank = inner.get("q_lora_rank")
    return LatentShape(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(inner["kv_lora_rank"]),
        qk_nope_head_dim=int(inner["qk_nope_head_dim"]),
        qk_rope_head_dim=int(inner["qk_rope_head_dim"]),
        v_head_dim=int(inner["v_head_dim"]),
    )


def load_drafter(
    path: Path, *, compute_dtype: torch.dtype = torch.bfloat16, target_layers: int | None = None
) -> Drafter:
    """A drafter folder as a model; ``lend_tables`` gives it what it shares with the target.

    Args:
        path: The folder.
        compute_dtype: Of the products.
        target_layers: Decoder layers of the target, for a config that names no aux layers.

    Raises:
        InputError: The folder is not a whole drafter, or nothing tells which layers it reads.
    """
    if problems := check_drafter(path):
        raise InputError(f"{str(path)!r} cannot be loaded: " + "; ".join(problems))
    config, tensors = read_folder(path)
    draft, _ = parse_config(config, target_layers)
    reads_aux = ALGORITHMS[draft.algorithm].reads == "aux"
    if reads_aux and not (named_layers(config) or _target_layers(config, target_layers)):
        raise InputError(
            f"config.json in {str(path)!r} names no aux layers (eagle_aux_hidden_state_layer_ids), and the "
            "engines' default (2, N//2, N-3) depends on the target's N layers; name the target (--target) or "
            "write the ids into the file"
        )
    kind = ALGORITHMS[draft.algorithm]
    model = kind(draft, compute_dtype=compute_dtype)
    weights = kind.own_names({canonical_name(n): t for n, t in tensors.items()})
    own = {n: weights[n].float() for n in expected_tensors(draft)}
    if not kind.own_head:
        own["lm_head.weight"] = model.lm_head.weight
    own["d2t"] = weights.get("d2t", torch.zeros(draft.draft_vocab_size, dtype=torch.int64))
    model.load_state_dict(own)
    return model


def lend_tables(model: Drafter, target: Target) -> None:
    """Give a loaded drafter the target's embedding and, where it has none of its own, the target's head."""
    model.embed_weight = target.embed.torch()[: target.vocab_size].to(model.compute_dtype)
    if not model.own_head:
        head = target.head.torch()[: target.vocab_size]
        model.lm_head.weight.data.copy_(head.float() * target.logit_scale)


def check_embedding(path: Path, target: Target) -> None:
    """Refuse a drafter with an embedding of its own: here it would get the target's.

    Raises:
        InputError: Its rows are not the target's.
    """
    embed = {canonical_name(n): t for n, t in read_folder(path)[1].items()}.get("embed_tokens.weight")
    if embed is None:
        return
    theirs = target.embed.torch()[: target.vocab_size]
    if embed.shape == theirs.shape:
        # As engines compare them: in the dtype they are served in.
        differ = int((embed.bfloat16() != theirs.bfloat16()).any(1).sum())
        if not differ:
            return
        how = f"{differ:,} of {len(theirs):,} rows differ"
    else:
        how = f"its shape is {list(embed.shape)}, the target's {list(theirs.shape)}"
    raise InputError(
        f"{str(path)!r} has an embed_tokens.weight of its own ({how}), but a drafter is trained and exported "
        "with the target's embedding; take the tensor out of the folder to start with the target's, or start "
        "from a drafter that shares it"
    )


def target_ids_of(model: Drafter) -> np.ndarray | None:
    """Ascending target ids of the draft vocabulary; None when it is the whole one."""
    if not model.reduced_vocab:
        return None
    return (torch.arange(len(model.d2t)) + model.d2t.cpu()).numpy()
