"""Training settings: one frozen dataclass; its field docstrings are the help texts of the flags."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdec_tap.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of one training run."""

    # -- what is trained
    algorithm: str = "eagle3"
    """eagle3; eagle1 (also EAGLE-2's weights; needs shards with final_hidden: all); medusa (ttt_steps heads);
    peagle (all draft tokens in one pass)."""
    layer: Literal["llama", "qwen3", "kimik2"] = "llama"
    """Decoder layer of the drafter: llama, qwen3 (norms on query and key heads) or kimik2 (latent
    attention)."""
    num_layers: int = 1
    """Decoder layers of the drafter; engines run one pass through all of them for each draft token."""
    intermediate_size: int | None = None
    """Width of the MLP; None takes the target's."""
    num_heads: int | None = None
    """Query heads; None takes the target's."""
    num_kv_heads: int | None = None
    """Key and value heads; None takes the target's, or more where a start by copying needs them."""
    head_dim: int | None = None
    """Size of one head; None takes the target's."""
    draft_vocab_size: int | None = None
    """Tokens the drafter can propose; None chooses from traffic, at most max_draft_vocab_size."""
    max_draft_vocab_size: int = 32000
    """Upper bound of the automatic draft vocabulary."""
    min_draft_vocab_size: int = 8192
    """Lower bound of the automatic draft vocabulary; smaller target vocabularies are drafted whole."""
    loss_vocab_size: int | None = None
    """Rows of a frozen head over which the loss is taken, the most used ones. Rows left out cost nothing in
    training, but nothing teaches the drafter to avoid them. None takes all; for eagle1 and medusa, which
    propose from the whole vocabulary, as many as an automatic draft vocabulary would have."""
    aux_layer_ids: str | None = None
    """Which of the captured layers are the drafter's input, such as 2,15,27; None takes all of them."""
    norm_before_residual: bool = True
    """Start the residual stream from the normed state."""
    norm_before_fc: bool | None = None
    """One RMS norm over the concatenated aux states before they are fused; None: unless fc_norm is on or the
    engine's class for this layer has none (kimik2)."""
    fc_norm: bool | None = None
    """One RMS norm for each aux state instead; None: where norm_before_fc cannot be."""
    norm_output: bool = True
    """Feed the normed state back to the next draft step."""
    attention_bias: bool = False
    """Biases in the attention projections."""
    train_lm_head: bool = False
    """Train the output head too. It starts from the target's rows, and they are hard to improve on little
    data."""
    init_from: Path | None = None
    """Drafter folder (vLLM, SGLang or speculators layout) to start from; its shape and norms win over the
    settings here, its draft vocabulary over an automatic one."""

    init: Literal["auto", "copy", "random"] = "auto"
    """Where a new drafter starts: with attention that copies what followed the newest token before (copy), or
    random; auto copies where the drafter is EAGLE-3 with llama layers."""

    # -- objective
    ttt_steps: int = 3
    """Draft steps unrolled in training (training-time test)."""
    ttt_decay: float = 0.8
    """Loss weight of step k is this to the power k."""
    broken_keep: float = 0.25
    """Share of chains unrolled further after a wrong draft token, 0 to 1; a server never goes on there."""
    teacher_temperature: float = 0.7
    """Temperature of the target's distribution; below 1 sharpens it towards the greedy token."""
    loss: Literal["ce", "tv", "lk", "ce+tv", "ce+lk"] = "ce"
    """Distance to the target's distribution: cross-entropy (the gradient of KL), total variation, or minus
    the logarithm of the overlap (lk); the last two are about the share of sampled draft tokens that a
    server takes. A sum of two counts both."""
    hard_weight: float = 0.0
    """Share of the target's distribution replaced by its greedy token, 0 to 1."""
    feature_weight: float | None = None
    """Weight of the distance between the drafter's state and the target's final state: cosine, or smooth L1
    for eagle1; None: 1 for eagle1, 0 for the others."""
    mask_token_id: int | None = None
    """Token whose embedding stands for an unknown one in peagle; None takes the target's padding token, or
    its last one."""
    prompt_weight: float | None = None
    """Loss weight of prompt tokens; None: 1 where the shards hold the target's distribution of them (captured
    with final_hidden: all), else 0."""

    # -- optimization
    optimizer: Literal["muon", "adamw"] = "muon"
    """Muon for matrices with AdamW for the rest, or AdamW for everything."""
    lr: float = 2e-3
    """Peak learning rate of the matrices."""
    adamw_lr: float = 5e-3
    """Peak learning rate of norms and head under Muon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices."""
    adamw_weight_decay: float = 0.01
    """Decoupled weight decay of matrices that AdamW handles."""
    momentum: float = 0.95
    """Muon's momentum."""
    ns_steps: int = 5
    """Newton-Schulz steps of Muon."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup: float = 0.02
    """Share of the run spent warming up."""
    lr_floor: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    dropout: float = 0.0
    """Dropout on what attention and MLP add to the residual stream."""
    input_dropout: float = 0.0
    """Dropout on the aux states."""
    noise: float = 0.0
    """Uniform noise on the aux states, as a share of their standard deviation."""
    ema: float = 0.0
    """Decay of the moving average of weights that is evaluated and exported; 0 turns it off."""

    # -- how long and how much at once
    epochs: float = 8.0
    """Passes over the training records."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    time_limit: float | None = None
    """Seconds of training after which the schedule ends, whatever epochs says; None sets no limit."""
    batch_tokens: int = 2048
    """Rows of one forward pass; documents are packed, never padded or cut."""
    accumulate: int = 1
    """Forward passes for each optimizer step."""
    max_length: int = 32768
    """Rows after which one long document is split."""

    # -- evaluation, logs, checkpoints
    held_out: float = 0.05
    """Share of conversations kept for evaluation, chosen by a hash of their first prompt."""
    eval_draft_tokens: int = 3
    """Draft tokens in each round of the simulated server."""
    eval_epochs: float = 1.0
    """Evaluate after so many passes (and at the end)."""
    eval_steps: int | None = None
    """Evaluate after so many optimizer steps instead; None goes by eval_epochs (100 with --follow)."""
    eval_records: int = 512
    """Held-out records used for each evaluation, at most."""
    patience: int = 0
    """Stop after so many evaluations without a better simulated acceptance length; 0 never stops early."""
    log_steps: int = 10
    """Write a log line every so many optimizer steps."""
    save_interval: float = 120.0
    """Seconds between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""

    trackers: str | None = None
    """Experiment trackers beside log.jsonl and TensorBoard: wandb, mlflow or wandb,mlflow. Each reads its own
    environment variables."""

    license: str | None = None
    """License named on the model card, such as apache-2.0; None says there that it must be chosen."""

    # -- training beside a server (--follow)
    follow_start: int = 20_000
    """Supervised tokens to wait for before the draft vocabulary is chosen and training starts."""
    follow_backlog: int = 1 << 20
    """Rows that may wait for training; beyond them the oldest records are dropped and counted."""
    follow_idle: float | None = None
    """End after so many seconds without a new record; None waits for ever."""

    # -- machine
    seed: int = 0
    """Seed of initial weights, order and noise."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or auto."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the matrix products; master weights are always float32. auto is bfloat16, and float32 on a CPU
    that has no instructions for it."""
    teacher_cache: int = 256 << 20
    """Bytes of memory in which the teacher's answers are kept from one pass to the next."""
    workers: int = 1
    """Threads that decode shards ahead of time."""
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """With several processes: every one holds the whole drafter (ddp), or a share of weights, gradients and
    optimizer state (fsdp2)."""

    def __post_init__(self) -> None:
        from .algorithms import ALGORITHMS  # needs torch, which --help does not

        if isinstance(self.init_from, str):
            object.__setattr__(self, "init_from", Path(self.init_from).expanduser())
        problems = []
        if self.algorithm not in ALGORITHMS:
            known = ", ".join(map(repr, ALGORITHMS))
            problems.append(f"algorithm is {self.algorithm!r}; expected one of {known}")
        for name in (
            "num_layers", "ttt_steps", "batch_tokens", "accumulate", "max_length", "eval_draft_tokens",
            "log_steps", "keep_checkpoints", "workers", "eval_records", "ns_steps", "follow_backlog",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; expected at least 1")
        limits = ("max_steps", "time_limit", "eval_steps", "follow_idle")
        for name in (
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "draft_vocab_size",
            *limits,
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(f"{name} is {value}; expected more than 0")
        for name in (
            "broken_keep",
            "hard_weight",
            "held_out",
            "warmup",
            "lr_floor",
            "dropout",
            "input_dropout",
            "ema",
        ):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                problems.append(f"{name} is {value}; expected 0 to 1")
        for name in ("lr", "adamw_lr", "epochs", "teacher_temperature", "eval_epochs", "save_interval"):
            if getattr(self, name) <= 0:
                problems.append(f"{name} is {getattr(self, name)}; expected more than 0")
        for name in (
            "weight_decay",
            "adamw_weight_decay",
            "clip",
            "noise",
            "patience",
            "momentum",
            "follow_start",
            "teacher_cache",
        ):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.prompt_weight is not None and self.prompt_weight < 0:
            problems.append(f"prompt_weight is {self.prompt_weight}; expected 0 or more")
        if not 0 < self.ttt_decay <= 1:
            problems.append(f"ttt_decay is {self.ttt_decay}; expected more than 0, at most 1")
        if self.norm_before_fc and self.fc_norm:
            problems.append("norm_before_fc and fc_norm are both set; choose one, the engines apply only one")
        if self.license is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", self.license):
            problems.append(f"license is {self.license!r}; expected a name such as apache-2.0")
        unknown = [t for t in self.tracker_names if t not in ("wandb", "mlflow")]
        if unknown:
            problems.append(f"trackers names {unknown[0]!r}; expected wandb, mlflow or wandb,mlflow")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def tracker_names(self) -> list[str]:
        """Names in ``trackers``."""
        return [t.strip() for t in (self.trackers or "").split(",") if t.strip()]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings of a YAML file, converted and checked for unknown keys.

    Raises:
        ConfigError: Lists every unknown key (with the nearest name) and every bad value at once.
    """
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text()) or {}
    except OSError as err:
        raise ConfigError(f"--config is {str(path)!r}, which cannot be read: {err.strerror}") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {err}") from err
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{str(path)!r} holds a {type(loaded).__name__}; expected a mapping of settings")
    return convert(loaded, str(path))


def convert(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values of known settings in their types; raises one ``ConfigError`` for all problems."""
    kinds = typing.get_type_hints(TrainConfig)
    out, problems = {}, []
    for key, raw in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1)
            problems.append(
                f"{key} is not a training setting" + (f"; did you mean {near[0]}?" if near else "")
            )
            continue
        try:
            out[key] = _value(key, raw, kinds[key])
        except ValueError as err:
            problems.append(str(err))
    if problems:
        raise ConfigError("; ".join(f"{p} ({source})" for p in problems))
    return out


def _value(name: str, raw: Any, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        if raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null", "auto")):
            return None
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if raw not in choices:
            raise ValueError(f"{name} is {raw!r}; expected one of {', '.join(map(repr, choices))}")
        return raw
    if kind is bool:
        text = str(raw).lower()
        if text not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise ValueError(f"{name} is {raw!r}; expected true or false")
        return text in ("true", "1", "yes", "on")
    if kind is Path:
        return Path(str(raw)).expanduser()
    if kind is str:
        return str(raw)
    try:
        number = float(raw)
        if isinstance(raw, bool) or (kind is int and number != int(number)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} is {raw!r}; expected {what}") from None
    return int(number) if kind is int else number


def field_docs() -> dict[str, str]:
    """Documentation of each setting, read from the docstring under the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(TrainConfig))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for item, doc in itertools.pairwise(body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
        ):
            docs[item.target.id] = " ".join(str(doc.value.value).split())  # type: ignore[union-attr]
    return docs
