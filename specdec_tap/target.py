"""The few tensors of the target model that training needs, copied out of a checkpoint without loading it.

Training a drafter from shards needs three tensors of the target: the embedding rows (drafter input), the
output head (teacher distribution) and the final norm (only for data whose last state was stored before it).
This module finds them by name and shape in any local Hugging Face directory, copies their bytes, and reads
them back:

- ``save_target(checkpoint, shards/target)`` writes ``target.safetensors``, ``target.json``, ``config.json``
  and the tokenizer files. It runs inside the server, so it imports neither torch nor transformers.
- ``load_target(dir)`` opens either such a folder or a full checkpoint.

Tensors are handled as raw bytes: a 5 GB head of a large model passes through one small buffer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError

TARGET_FILE = "target.safetensors"
TARGET_JSON = "target.json"
TARGET_FORMAT_VERSION = 1

EMBED = "embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
NORM = "norm.weight"
NORM_BIAS = "norm.bias"

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
_MAX_JSON_BYTES = 64_000_000
_COPY_BYTES = 8 << 20
_SAMPLED_TENSORS, _SAMPLES_OF_TABLE, _SAMPLE_BYTES = 256, 64, 4096
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
}
_FLOAT_DTYPES = {"F32": np.dtype("<u4"), "F16": np.dtype("<u2"), "BF16": np.dtype("<u2")}
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_MAX_TOKENIZER_FILE_BYTES = 256 << 20

_EMBED_SUFFIXES = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embeddings.weight",
    "tok_embeddings.weight", "embedding.weight", "embed_in.weight", "embed.weight",
)  # fmt: skip
_HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "output.weight")
_NORM_SUFFIXES = (
    "norm.weight", "norm_f.weight", "ln_f.weight", "final_layernorm.weight", "final_layer_norm.weight",
    "final_norm.weight",
)  # fmt: skip
# Parts of multimodal, multi-token-prediction and per-layer tensors that only look like the ones wanted.
_DECOYS = re.compile(
    r"(^|[._])(vision|visual|vit|audio|image|video|encoder|mtp|draft|talker|code2wav)([._]|\d|$)"
)
# What GPTQ, AWQ and compressed-tensors store in place of ``weight``.
_PACKED = ("qweight", "weight_packed")
_INSIDE_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")

_RMS_ONE_PLUS = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "paligemma", "qwen3_next", "qwen3_5",
    "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
}  # fmt: skip
_RMS_PLAIN = {
    "llama", "llama4", "llama4_text", "mistral", "mistral3", "ministral3", "mixtral", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smollm3", "phi3", "granite",
    "granitemoe",
    "olmo2", "olmo3", "internlm2", "internlm3", "baichuan", "deepseek", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl", "glm4", "glm4_moe", "minimax", "minimax_m2", "gpt_oss",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe", "gemma3n",
    "gemma3n_text", "mamba", "mamba2", "falcon_h1", "nemotron_h", "seed_oss", "minicpm", "minicpm3",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where the bytes of one tensor lie: nothing is read until ``bits()`` or ``torch()``."""

    path: Path
    name: str
    dtype: str
    """safetensors dtype: BF16, F16 or F32."""
    shape: tuple[int, ...]
    offset: int
    """Absolute byte offset in ``path``."""
    nbytes: int

    def bits(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``[start, stop)`` as raw bits: uint16 for BF16 and F16, uint32 for F32."""
        kind = _FLOAT_DTYPES[self.dtype]
        rows = self.shape[0]
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise InputError(f"{self.name}: rows [{start}, {stop}) are outside its {rows:,} rows")
        row_bytes = self.nbytes // rows if rows else 0
        with self.path.open("rb") as file:
            file.seek(self.offset + start * row_bytes)
            data = np.fromfile(file, dtype=kind, count=(stop - start) * row_bytes // kind.itemsize)
        if data.nbytes != (stop - start) * row_bytes:
            raise InputError(f"{str(self.path)!r} ends inside tensor {self.name!r}; copy the file again")
        return data.reshape(stop - start, *self.shape[1:])

    def float32(self) -> np.ndarray:
        """The whole tensor as float32."""
        bits = self.bits()
        if self.dtype == "F32":
            return bits.view("<f4")
        if self.dtype == "F16":
            return bits.view("<f2").astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def torch(self) -> Any:
        """The whole tensor as a torch tensor of its own dtype (imports torch).

        The file is mapped, privately: only rows that are used take memory, and tied tables share it.
        """
        import torch

        dtype = getattr(torch, _TORCH_DTYPES[self.dtype])
        if self.path.stat().st_size < self.offset + self.nbytes:
            raise InputError(f"{str(self.path)!r} ends inside tensor {self.name!r}; copy the file again")
        if self.offset % dtype.itemsize:
            signed = self.bits().view("<i4" if self.dtype == "F32" else "<i2")
            return torch.from_numpy(signed).view(dtype)
        end = (self.offset + self.nbytes) // dtype.itemsize
        mapped = torch.from_file(str(self.path), shared=False, size=end, dtype=dtype)
        return mapped[self.offset // dtype.itemsize :].view(self.shape)


class ModelSizes:
    """Sizes out of the ``text_config`` that a subclass has."""

    __slots__ = ()
    text_config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.text_config["vocab_size"])

    @property
    def hidden_size(self) -> int:
        return int(self.text_config["hidden_size"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.text_config["num_hidden_layers"])


@dataclass(frozen=True, slots=True)
class Target(ModelSizes):
    """What a drafter needs to know of its target; tensors stay on disk until asked for."""

    path: Path
    config: dict[str, Any]
    """The checkpoint's config.json."""
    text_config: dict[str, Any]
    """The part that describes the language model (the same dict for text-only models)."""
    tied: bool
    """The output head is the embedding."""
    embed: TensorRef
    head: TensorRef
    """Equal to ``embed`` when tied."""
    head_bias: TensorRef | None
    norm: TensorRef | None
    norm_bias: TensorRef | None
    norm_kind: str
    """``rms``, ``rms_one_plus`` (Gemma: weight stored minus one), ``layer_norm`` or ``unknown``."""
    norm_eps: float
    logit_scale: float
    """Factor the model applies to its logits (Cohere, Granite, MiniCPM); 1.0 for most."""
    logit_softcap: float | None
    """``cap * tanh(logits / cap)`` (Gemma 2); None for most."""
    config_sha256: str
    files: tuple[Path, ...] = field(default=())
    """Tokenizer and generation files beside the config."""
    layers_sha256: str | None = None
    """Of a ``target/`` folder, which has no layers: the fingerprint of its checkpoint's, where noted."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which weights a model has: a rotated residual stream or a fine-tune may have the same config."""

    tables: str | None
    """SHA-256 of samples of embedding, head and final norm."""
    layers: str | None
    """The same of everything else."""

    def differs(self, other: Fingerprint) -> str | None:
        """What differs, as a noun for a message; None where all that both know is the same."""
        if None not in (self.tables, other.tables) and self.tables != other.tables:
            return "embedding, head or final norm"
        if None not in (self.layers, other.layers) and self.layers != other.layers:
            return "layers"
        return None


def save_target(
    model_path: Path | str,
    out_dir: Path | str,
    *,
    embed_key: str | None = None,
    head_key: str | None = None,
    norm_key: str | None = None,
) -> None:
    """Copy embedding, head and final norm, config and tokenizer of a checkpoint into ``out_dir``.

    Does nothing when ``out_dir`` already holds them. The folder appears whole or not at all, also when
    several processes write it at once.

    Args:
        model_path: A local Hugging Face directory (single safetensors file or sharded with an index).
        out_dir: Usually ``shards/target``.
        embed_key: Name of the embedding tensor, when the search finds several or none.
        head_key: The same for the output head.
        norm_key: The same for the final norm.

    Raises:
        InputError: The checkpoint lacks something, or ``out_dir`` belongs to another target.
    """
    out_dir = Path(out_dir)
    source = _open_checkpoint(Path(model_path), embed_key, head_key, norm_key)
    if _already_saved(out_dir, source):
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    part = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex}.tmp"
    part.mkdir(mode=0o700)
    try:
        _write_tensors(part / TARGET_FILE, source)
        for file in (source.path / "config.json", *source.files):
            _copy_file(file, part / file.name)
        info = {
            "format_version": TARGET_FORMAT_VERSION,
            "config_sha256": source.config_sha256,
            "tied": source.tied,
            "norm_kind": source.norm_kind,
            "norm_eps": source.norm_eps,
            "logit_scale": source.logit_scale,
            "logit_softcap": source.logit_softcap,
            "layers_sha256": fingerprint(source).layers,
            "tensors": {ours: ref.name for ours, ref in _tensors(source)},
        }
        _write_private(part / TARGET_JSON, json.dumps(info, indent=2).encode() + b"\n")
        _fsync_dir(part)
        try:
            part.rename(out_dir)
        except OSError as err:
            # Another rank was faster, or the folder belongs to another target: the second look tells which.
            if not _already_saved(out_dir, source):
                raise InputError(f"cannot write the target's tensors to {str(out_dir)!r}: {err}") from err
        _fsync_dir(out_dir.parent)
    except OSError as err:
        raise InputError(f"cannot write the target's tensors to {str(out_dir)!r}: {err}") from err
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load_target(
    path: Path | str,
    *,
    embed_key: str | None = None,
    head_key: str | None = None,
    norm_key: str | None = None,
) -> Target:
    """Open the folder that ``save_target`` wrote, or any local Hugging Face checkpoint.

    Args:
        path: ``shards/target`` or a model directory.
        embed_key: Name of the embedding tensor in a checkpoint, when the search finds several or none.
        head_key: The same for the output head.
        norm_key: The same for the final norm.

    Raises:
        InputError: Not such a folder, or a tensor is missing, quantized or of the wrong shape.
    """
    path = Path(path)
    if (path / TARGET_JSON).is_file():
        return _open_saved(path)
    return _open_checkpoint(path, embed_key, head_key, norm_key)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in small pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(target: Target) -> Fingerprint:
    """Tell a target's weights from another's of the same config.

    Samples of at most 3 MB are read, however large the checkpoint; how it is split into files does not count.

    Raises:
        InputError: A weight file is damaged.
    """
    tables = hashlib.sha256()
    for name, ref in _tensors(target):
        _add_samples(tables, name, ref, _SAMPLES_OF_TABLE)
    layers = target.layers_sha256
    if not (target.path / TARGET_JSON).is_file():
        layers = _sample_layers(Checkpoint(target.path))
    return Fingerprint(tables.hexdigest(), layers)


def _sample_layers(checkpoint: Checkpoint) -> str | None:
    names = [name for name in checkpoint if not is_candidate(name)]
    if not names:  # a copy of the tables alone
        return None
    # In no order of the model's: with evenly spaced ones every sample might be of the same small kind.
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    digest = hashlib.sha256()
    for name in names[:_SAMPLED_TENSORS]:
        _add_samples(digest, name, checkpoint.ref(name), 1)
    return digest.hexdigest()


def _add_samples(digest: Any, name: str, ref: TensorRef, count: int) -> None:
    """Bytes from the middle of ``count`` equal parts of a tensor."""
    digest.update(f"{name} {ref.dtype} {list(ref.shape)};".encode())
    try:
        with ref.path.open("rb", buffering=0) as file:
            for i in range(count):
                middle = ref.nbytes * (2 * i + 1) // (2 * count)
                start = max(0, min(middle, ref.nbytes - _SAMPLE_BYTES))
                file.seek(ref.offset + start)
                digest.update(file.read(min(_SAMPLE_BYTES, ref.nbytes)))
    except OSError as err:
        raise InputError(f"cannot read tensor {ref.name!r} of {str(ref.path)!r}: {err.strerror}") from err


class Checkpoint:
    """Every tensor of a local safetensors checkpoint, by name; headers are read, data is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        self._opened: dict[Path, dict[str, TensorRef]] = {}
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise InputError(f"{str(index)!r} has no 'weight_map' of tensor names to file names")
            # A name with a directory part would read outside the checkpoint.
            self._where = {str(key): path / Path(value).name for key, value in weight_map.items()}
            missing = sorted({file.name for file in self._where.values() if not file.is_file()})
            if missing:
                raise InputError(
                    f"{str(index)!r} lists {missing[0]!r}, which is not there"
                    + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                    + "; download the checkpoint again"
                )
        elif single.is_file():
            self._where = dict.fromkeys(self._file(single), single)
        elif files := sorted(path.glob("*.safetensors")):
            self._where = {name: file for file in files for name in self._file(file)}
        else:
            pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt")) + sorted(path.glob("*.gguf"))
            found = f" (found {pickled[0].name!r}; only safetensors checkpoints are read)" if pickled else ""
            raise InputError(f"no *.safetensors file in {str(path)!r}{found}")

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def ref(self, name: str) -> TensorRef:
        """Where tensor ``name`` lies."""
        file = self._where[name]
        refs = self._file(file)
        if name not in refs:
            raise InputError(f"{str(file)!r} lacks tensor {name!r}, which the index places there")
        return refs[name]

    def _file(self, path: Path) -> dict[str, TensorRef]:
        if path not in self._opened:
            self._opened[path] = read_safetensors_header(path)
        return self._opened[path]


def read_safetensors_header(path: Path) -> dict[str, TensorRef]:
    """Tensor places of one safetensors file, every offset checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{str(path)!r} is not a safetensors file (header length {length:,})")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as err:
        raise InputError(f"cannot read {str(path)!r} as a safetensors file: {err}") from err
    if not isinstance(header, dict):
        raise InputError(f"{str(path)!r} is not a safetensors file (its header is not an object)")
    refs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape = tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
            dtype = str(entry["dtype"])
        except (TypeError, KeyError, ValueError) as err:
            raise InputError(f"{str(path)!r}: bad header entry of tensor {name!r}") from err
        width = _DTYPE_BYTES.get(dtype)
        wrong = min(shape, default=0) < 0 or (width is not None and end - begin != width * math.prod(shape))
        if wrong or not 0 <= begin <= end <= size - 8 - length:
            raise InputError(f"{str(path)!r} is cut short or damaged: tensor {name!r} lies outside the file")
        refs[name] = TensorRef(path, name, dtype, shape, 8 + length + begin, end - begin)
    return refs


def is_candidate(name: str) -> bool:
    """Whether a tensor may be the embedding, the output head or the final norm (or a bias of these), by its
    name. Packed ones count: a table that cannot be read must be told from one that is not there."""
    weight = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
    suffixes = (*_EMBED_SUFFIXES, *_HEAD_SUFFIXES, *_NORM_SUFFIXES)
    return _is_named(weight, suffixes) or _is_packed(weight, suffixes)


def _is_named(name: str, suffixes: tuple[str, ...]) -> bool:
    return any(name == s or name.endswith("." + s) for s in suffixes) and not (
        _INSIDE_LAYER.search(name) or _DECOYS.search(name)
    )


def _is_packed(name: str, suffixes: tuple[str, ...]) -> bool:
    module, _, kind = name.rpartition(".")
    return kind in _PACKED and _is_named(f"{module}.weight", suffixes)


def tokenizer_names() -> tuple[str, ...]:
    """Files beside the weights that describe tokenizer and chat template."""
    return _TOKENIZER_FILES


def norm_kind(model_type: str, *, has_bias: bool) -> str:
    """Which normalisation a model family ends with; ``unknown`` families are not guessed."""
    if has_bias:
        return "layer_norm"
    if model_type in _RMS_ONE_PLUS:
        return "rms_one_plus"
    return "rms" if model_type in _RMS_PLAIN else "unknown"


def _open_checkpoint(path: Path, embed_key: str | None, head_key: str | None, norm_key: str | None) -> Target:
    if not path.is_dir():
        raise InputError(f"no model directory at {str(path)!r}")
    config, text = _read_config(path)
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    if (width := text.get("word_embed_proj_dim")) not in (None, hidden):
        raise InputError(
            f"{str(path / 'config.json')!r}: word_embed_proj_dim is {width!r} and hidden_size {hidden:,}: "
            "its embedding and head are of another width than its layers, which no drafter here can share; "
            "use a model where both are equal"
        )
    tensors = Checkpoint(path)
    embed = _find(tensors, "embedding", "embed_key", embed_key, _EMBED_SUFFIXES, hidden=hidden, vocab=vocab)
    declared = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    head = None
    # With tie_word_embeddings: true the engine ignores a stored head, so it is ignored here too.
    if declared is not True or head_key is not None:
        head = _find(tensors, "output head", "head_key", head_key, _HEAD_SUFFIXES, hidden=hidden, vocab=vocab)
    norm = _find(tensors, "final norm", "norm_key", norm_key, _NORM_SUFFIXES, hidden=hidden, vocab=None)
    if embed is None:
        names = ", ".join(sorted(name for name in tensors if "embed" in name)[:8]) or "none"
        raise InputError(
            f"no embedding tensor of shape [{vocab:,}, {hidden:,}] in {str(path)!r}; tensors with 'embed' in "
            f"their name: {names}. Name the right one with embed_key"
        )
    if head is None and declared is False:
        raise InputError(
            f"{str(path)!r} has no lm_head.weight but its config says tie_word_embeddings: false; name the "
            "output head with head_key, or add the missing file"
        )
    tied = head is None
    head_bias = None
    if head is not None and (bias := head.name.removesuffix("weight") + "bias") in tensors:
        head_bias = _checked(tensors.ref(bias), "output head bias")
    norm_bias = None
    if norm is not None and (bias := norm.name.removesuffix("weight") + "bias") in tensors:
        norm_bias = _checked(tensors.ref(bias), "final norm bias")
    model_type = str(text.get("model_type", config.get("model_type", "")))
    softcap = text.get("final_logit_softcapping")
    return Target(
        path=path,
        config=config,
        text_config=text,
        tied=tied,
        embed=embed,
        head=embed if head is None else head,
        head_bias=head_bias,
        norm=norm,
        norm_bias=norm_bias,
        norm_kind=norm_kind(model_type, has_bias=norm_bias is not None),
        norm_eps=norm_eps(text, 1e-6 if norm_bias is None else 1e-5),
        logit_scale=_logit_scale(text, model_type),
        logit_softcap=float(softcap) if softcap else None,
        config_sha256=file_sha256(path / "config.json"),
        files=_tokenizer_files(path),
    )


def _open_saved(path: Path) -> Target:
    info = _read_json(path / TARGET_JSON)
    version = info.get("format_version")
    if version != TARGET_FORMAT_VERSION:
        raise InputError(
            f"{str(path / TARGET_JSON)!r} has format_version {version!r}; "
            f"this version reads {TARGET_FORMAT_VERSION}"
        )
    config, text = _read_config(path)
    refs = read_safetensors_header(path / TARGET_FILE)
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    for name in (EMBED,) if info.get("tied") else (EMBED, HEAD):
        ref = refs.get(name)
        if ref is None or len(ref.shape) != 2 or ref.shape[0] < vocab or ref.shape[1] != hidden:
            found = "is missing" if ref is None else f"has shape {list(ref.shape)}"
            raise InputError(f"{str(path / TARGET_FILE)!r}: {name} {found}; expected [{vocab}, {hidden}]")
        _checked(ref, name)
    try:
        return Target(
            path=path,
            config=config,
            text_config=text,
            tied=bool(info["tied"]),
            embed=refs[EMBED],
            head=refs[EMBED if info["tied"] else HEAD],
            head_bias=refs.get(HEAD_BIAS),
            norm=refs.get(NORM),
            norm_bias=refs.get(NORM_BIAS),
            norm_kind=str(info["norm_kind"]),
            norm_eps=float(info["norm_eps"]),
            logit_scale=float(info["logit_scale"]),
            logit_softcap=None if info["logit_softcap"] is None else float(info["logit_softcap"]),
            config_sha256=str(info["config_sha256"]),
            files=_tokenizer_files(path),
            layers_sha256=info.get("layers_sha256"),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise InputError(f"{str(path / TARGET_JSON)!r} is damaged: {err!r}") from err


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"no config.json in {str(path)!r}; expected a Hugging Face model directory")
    config = _read_json(file)
    return config, language_model_config(config, file)


def language_model_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The part of a config that describes the language model, with its sizes under today's names.

    Args:
        config: A model's config.json; the same dict comes back for text-only models.
        file: Where it was read, for the message.

    Raises:
        InputError: A size is missing or no positive integer.
    """
    text = config
    for key in ("text_config", "llm_config", "language_config", "thinker_config", "text_config"):
        if isinstance(text.get(key), dict):
            text = text[key]
    for key, old in (
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("vocab_size", "vocab_size"),
    ):
        value = text.get(key, text.get(old))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{str(file)!r}: {key} is {value!r}; expected a positive integer")
        if key not in text:
            text = {**text, key: value}
    return text


def _find(
    tensors: Checkpoint,
    what: str,
    option: str,
    key: str | None,
    suffixes: tuple[str, ...],
    *,
    hidden: int,
    vocab: int | None,
) -> TensorRef | None:
    """The one tensor with a known suffix and the right shape; embeddings and heads may be padded in rows."""

    def fits(ref: TensorRef) -> bool:
        if vocab is None:
            return ref.shape == (hidden,)
        return len(ref.shape) == 2 and ref.shape[0] >= vocab and ref.shape[1] == hidden

    if key is not None:
        if key not in tensors:
            raise InputError(f"{option} names {key!r}, which {str(tensors.path)!r} does not hold")
        ref = tensors.ref(key)
        if not fits(ref):
            raise InputError(f"{option} names {key!r} of shape {list(ref.shape)}; it cannot be the {what}")
        return _checked(ref, what)
    refs = [tensors.ref(name) for name in tensors if _is_named(name, suffixes)]
    fitting = [ref for ref in refs if fits(ref)]
    if not fitting:
        # Packed numbers have another shape than their table.
        quantized = [tensors.ref(name) for name in tensors if _is_packed(name, suffixes)]
        quantized += [ref for ref in refs if ref.dtype not in _FLOAT_DTYPES]
        if quantized:
            raise InputError(_quantized_message(what, quantized[0]))
        return None
    # The language model's own tensors have the shortest path ("model.norm" before "model.extra.norm").
    fitting.sort(key=lambda ref: (ref.name.count("."), ref.name))
    best = [ref for ref in fitting if ref.name.count(".") == fitting[0].name.count(".")]
    if len(best) > 1:
        raise InputError(
            f"several tensors of {str(tensors.path)!r} could be the {what}: "
            + ", ".join(repr(ref.name) for ref in best)
            + f"; name the right one with {option}"
        )
    return _checked(best[0], what)


def _checked(ref: TensorRef, what: str) -> TensorRef:
    if ref.dtype not in _FLOAT_DTYPES:
        raise InputError(_quantized_message(what, ref))
    return ref


def _quantized_message(what: str, ref: TensorRef) -> str:
    return (
        f"the {what} of {str(ref.path)!r} is quantized (tensor {ref.name!r}, dtype {ref.dtype}); training "
        "needs it in bfloat16, float16 or float32: point --target at the original checkpoint, or at one "
        "whose quantization leaves embedding and output head out"
    )


def norm_eps(text: Mapping[str, Any], default: float = 1e-6) -> float:
    """Epsilon of a language model's norms, whatever its config calls it; some, as OPT's, do not say it and
    take torch's 1e-5 for a layer norm."""
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
        if isinstance(text.get(key), int | float):
            return float(text[key])
    return default


def _logit_scale(text: dict[str, Any], model_type: str) -> float:
    if model_type.startswith("cohere"):
        return float(text.get("logit_scale", 0.0625))
    if model_type.startswith("granite") and text.get("logits_scaling"):
        return 1.0 / float(text["logits_scaling"])
    if model_type.startswith("minicpm") and text.get("dim_model_base"):
        return float(text["dim_model_base"]) / float(text["hidden_size"])
    if model_type == "falcon_h1":
        return float(text.get("lm_head_multiplier", 1.0))
    return 1.0


def _tokenizer_files(path: Path) -> tuple[Path, ...]:
    files = (path / name for name in _TOKENIZER_FILES)
    return tuple(f for f in files if f.is_file() and f.stat().st_size <= _MAX_TOKENIZER_FILE_BYTES)


def _tensors(target: Target) -> list[tuple[str, TensorRef]]:
    named = [
        (EMBED, target.embed),
        (HEAD, None if target.tied else target.head),
        (HEAD_BIAS, target.head_bias),
        (NORM, target.norm),
        (NORM_BIAS, target.norm_bias),
    ]
    return [(name, ref) for name, ref in named if ref is not None]


def _already_saved(out_dir: Path, source: Target) -> bool:
    if not out_dir.exists():
        return False
    if not (out_dir / TARGET_JSON).is_file():
        if any(out_dir.iterdir()):
            raise InputError(f"{str(out_dir)!r} exists but holds no {TARGET_JSON}; move it away")
        out_dir.rmdir()
        return False
    saved = _open_saved(out_dir)
    if saved.config_sha256 != source.config_sha256 or fingerprint(saved).differs(fingerprint(source)):
        raise InputError(
            f"{str(out_dir)!r} holds the tensors of another target than {str(source.path)!r}; "
            "capture each target into a folder of its own"
        )
    return True


def _write_tensors(path: Path, target: Target) -> None:
    named = _tensors(target)
    header: dict[str, Any] = {}
    offset = 0
    for name, ref in named:
        end = offset + ref.nbytes
        header[name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _create_private(path) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, ref in named:
            with ref.path.open("rb") as file:
                file.seek(ref.offset)
                left = ref.nbytes
                while left:
                    chunk = file.read(min(left, _COPY_BYTES))
                    if not chunk:
                        raise InputError(
                            f"{str(ref.path)!r} ends inside tensor {name!r}; copy the file again"
                        )
                    out.write(chunk)
                    left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise InputError(f"{str(path)!r} is larger than {_MAX_JSON_BYTES:,} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise InputError(f"cannot read {str(path)!r}: {err}") from err
    if not isinstance(value, dict):
        raise InputError(f"{str(path)!r} is not a JSON object")
    return value


def _create_private(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _write_private(path: Path, data: bytes) -> None:
    with _create_private(path) as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _copy_file(source: Path, dest: Path) -> None:
    with source.open("rb") as file, _create_private(dest) as out:
        shutil.copyfileobj(file, out, _COPY_BYTES)


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
