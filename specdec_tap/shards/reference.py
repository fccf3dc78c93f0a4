"""Compare stored states with a Hugging Face forward of the same tokens: the judge of last resort.

The forward runs in float32; the error that the model's own storage dtype makes is measured by a second
forward in that dtype, so that "equal" has a meaning that does not depend on the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, SpecdecTapError
from .content import _spread
from .layout import ShardHeader
from .reader import Record, ShardStore

if TYPE_CHECKING:
    from .verify import VerifyReport

_MAX_TOKENS = 2048
_SCALE_TOLERANCE = 0.003
_LOSSY_ERROR = {"lossless": 0.0, "fp8": 0.06, "int8": 0.03}
_MIN_ERROR = 1e-3
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
_DECODER_NAMES = ("decoder", "language_model", "text_model")
_PROBE_TOKENS = 8
_SAME_STATE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Relative difference of two rows that rounding does not reach."""
_SAME_DIRECTION = 0.99
"""Cosine above which the head sees a state: its own scale is no difference."""


def check_reference(
    store: ShardStore,
    report: VerifyReport,
    model_dir: Path,
    num_records: int,
    tell: Callable[[str, int, int], None],
) -> None:
    """Run the model on a few records and judge every aux layer and the final state.

    Raises:
        InputError: transformers is missing, the folder does not load, or no record is usable.
    """
    forward = ReferenceModel(model_dir)
    header = store.header
    errors: dict[str, dict[str, list[np.ndarray]]] = {}
    used = 0
    for number in _spread(len(store)):
        if used >= num_records:
            break
        try:
            record = store[number]
            if record.gaps or not 2 <= record.num_tokens <= _MAX_TOKENS or record.meta.lora:
                continue
            stored = _stored(record)
        except SpecdecTapError:
            continue  # reported before
        tell("reference", used, num_records)
        exact = forward.states(record.token_ids, "float32")
        rounded = forward.states(record.token_ids, header.dtype)
        _collect(errors, stored, exact, rounded)
        used += 1
    if not used:
        raise InputError(
            f"no record without gaps, without LoRA and of at most {_MAX_TOKENS:,} tokens to compare "
            "with --reference"
        )
    report.content["reference"] = {"records": used, "model": model_dir.name, "states": {}}
    for name, found in errors.items():
        report.content["reference"]["states"][name] = _judge(report, str(store.root), header, name, found)


class ReferenceModel:
    """A Hugging Face causal language model that gives every residual state and the post-norm final state."""

    def __init__(self, model_dir: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        """Load the weights.

        Args:
            model_dir: A local Hugging Face directory.
            dtype: To load in; ``states`` keeps a converted copy where it is asked for another.
            device: A torch device.

        Raises:
            InputError: torch or transformers is missing, or the folder does not load.
        """
        try:
            import torch
            import transformers
        except ImportError as err:
            raise InputError(
                "a Hugging Face forward needs torch and transformers; pip install 'specdec-tap[train]'"
            ) from err
        if not model_dir.is_dir():
            raise InputError(
                f"{str(model_dir)!r} is not a folder; --reference expects a Hugging Face model directory"
            )
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
            ).eval()
            self._models = {dtype: model.to(device)}
        except (OSError, ValueError, RuntimeError, KeyError) as err:
            raise InputError(f"{str(model_dir)!r} does not load as a Hugging Face model: {err}") from err
        self._torch = torch
        self._device = device

    def states(
        self, token_ids: np.ndarray, dtype: str, only: Collection[Any] | None = None
    ) -> dict[Any, np.ndarray]:
        """float32 [T - 1, H] by layer id (residual entering that layer; N is before the norm) and
        ``"final"``; with ``only``, of these alone."""
        torch = self._torch
        model = self._in_dtype(dtype)
        base = getattr(model, model.base_model_prefix)
        norm = _last_norm(base)
        before_norm: list[Any] = []
        hooks = []
        if norm is not None:
            hooks.append(norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0])))
        ids = torch.from_numpy(token_ids[:-1].astype(np.int64))[None].to(self._device)
        try:
            with torch.inference_mode():
                out = base(input_ids=ids, output_hidden_states=True, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        found: dict[Any, Any] = dict(enumerate(out.hidden_states[:-1]))
        if before_norm:
            found[len(out.hidden_states) - 1] = before_norm[-1]
        found["final"] = out.last_hidden_state
        if missing := sorted(set(only or ()) - set(found), key=str):
            raise InputError(
                f"{type(base).__name__} gives no state for {missing}: its last norm is not among "
                f"{', '.join(_NORM_NAMES)}, so the stream before it is not known; leave layer "
                f"{len(out.hidden_states) - 1} out of --layers"
            )
        return {k: h[0].float().cpu().numpy() for k, h in found.items() if only is None or k in only}

    def check_captures(self, token_ids: np.ndarray) -> None:
        """Try a few tokens: is this a causal model whose head sees the states that ``states`` returns?

        Args:
            token_ids: Any tokens of its vocabulary, at least 4; the first few are used.

        Raises:
            InputError: It is not, so what a drafter would learn from its states is wrong; says why.
        """
        torch = self._torch
        dtype, model = next(iter(self._models.items()))
        base, head = getattr(model, model.base_model_prefix), model.get_output_embeddings()
        name = type(model).__name__
        ids = torch.from_numpy(token_ids[:_PROBE_TOKENS].astype(np.int64))[None].to(self._device)
        seen: list[Any] = []
        hook = None if head is None else head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            with torch.inference_mode():
                out = base(input_ids=ids, use_cache=False)
                short = base(input_ids=ids[:, : ids.shape[1] // 2], use_cache=False).last_hidden_state
                model(input_ids=ids, use_cache=False)
        finally:
            if hook is not None:
                hook.remove()
        final = out.last_hidden_state
        change = (final[:, : short.shape[1]] - short).float().norm(dim=-1) / short.float().norm(dim=-1)
        if float(change.median()) > _SAME_STATE[dtype]:
            raise InputError(
                f"{name}: later tokens change the states of earlier ones, so it is no causal language model "
                "and a drafter cannot learn from it; name a decoder"
            )
        if seen and (seen[-1].shape != final.shape or _min_cosine(torch, final, seen[-1]) < _SAME_DIRECTION):
            raise InputError(
                f"{name}: its head sees other states than its base model returns, so final states would be "
                "wrong for a drafter. Such a model cannot be captured"
            )

    def _in_dtype(self, dtype: str) -> Any:
        """The model with weights of a dtype; buffers, such as rope's frequencies, stay as they were made."""
        if dtype not in self._models:
            model = copy.deepcopy(next(iter(self._models.values())))
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(self._torch, dtype))
            self._models[dtype] = model
        return self._models[dtype]


def _last_norm(base: Any) -> Any:
    """The norm behind the last layer, in the base model or in the decoder that it wraps; None if none has a
    known name."""
    holders = [base, *(getattr(base, name, None) for name in _DECODER_NAMES)]
    found = (getattr(holder, name, None) for holder in holders for name in _NORM_NAMES)
    return next((norm for norm in found if norm is not None), None)


def _min_cosine(torch: Any, a: Any, b: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).min())


def _stored(record: Record) -> dict[str, tuple[Any, int, np.ndarray]]:
    """name -> (key in the reference, first position, float32 rows)."""
    header = record.header
    aux = record.aux_float()
    out: dict[str, tuple[Any, int, np.ndarray]] = {
        f"aux_{i}": (i, 0, aux[:, a]) for a, i in enumerate(header.aux_layer_ids)
    }
    spans = record.final_span
    if spans:
        start, stop = max(spans, key=lambda s: s[1] - s[0])
        key = "final" if header.final_hidden == "post_norm" else header.target.num_hidden_layers
        out["final"] = (key, start, record.final_float(start, stop))
    return out


def _collect(
    errors: dict[str, dict[str, list[np.ndarray]]],
    stored: dict[str, tuple[Any, int, np.ndarray]],
    exact: dict[Any, np.ndarray],
    rounded: dict[Any, np.ndarray],
) -> None:
    for name, (key, first, rows) in stored.items():
        truth = exact[key][first : first + len(rows)]
        found = errors.setdefault(name, {})
        found.setdefault("own", []).append(_relative(rows, truth))
        found.setdefault("rounding", []).append(_relative(rounded[key][first : first + len(rows)], truth))
        found.setdefault("scale", []).append((rows * truth).sum(1) / np.maximum((truth**2).sum(1), 1e-30))
        for other, states in exact.items():
            if other != key:
                found.setdefault(f"like {other}", []).append(
                    _relative(rows, states[first : first + len(rows)])
                )
        if len(rows) > 2:
            found.setdefault("one later", []).append(_relative(rows[:-1], truth[1:]))
            found.setdefault("one earlier", []).append(_relative(rows[1:], truth[:-1]))


def _relative(rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows - truth, axis=1) / np.maximum(np.linalg.norm(truth, axis=1), 1e-30)


def _judge(
    report: VerifyReport, where: str, header: ShardHeader, name: str, found: dict[str, list[np.ndarray]]
) -> dict[str, Any]:
    medians = {what: float(np.median(np.concatenate(values))) for what, values in found.items()}
    own, rounding, scale = (medians.pop(k) for k in ("own", "rounding", "scale"))
    allowed = max(2.0 * rounding, _MIN_ERROR) + _LOSSY_ERROR[header.codec]
    nearest = min(medians, key=medians.__getitem__)
    result = {
        "relative_error_median": own,
        "rounding_error_median": rounding,
        "allowed": allowed,
        "scale": scale,
        "nearest_other": nearest,
        "nearest_other_error": medians[nearest],
    }
    if medians[nearest] < own:
        what = nearest.replace("like final", "the final state").replace("like ", "the state entering layer ")
        what = what.replace("one later", "its own layer one position later")
        what = what.replace("one earlier", "its own layer one position earlier")
        message = (
            f"{name} is nearer to {what} (relative error {medians[nearest]:.4f}) than to what the header says"
        )
        report.add("error", "wrong_state", where, f"{message} (error {own:.4f})")
    elif own > allowed:
        message = f"{name} differs from the model by {own:.4f} (median relative error per row)"
        report.add(
            "error",
            "values_differ",
            where,
            f"{message}; expected at most {allowed:.4f}, twice what {header.dtype} itself rounds",
        )
    if abs(scale - 1.0) > _SCALE_TOLERANCE and own < 0.5:
        report.add(
            "error", "wrong_scale", where, f"{name} is the model's state times {scale:.4f}; expected 1"
        )
    return result
