"""What importing and exporting share: samples, conventions, the checks on them."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError, ShardError
from ..codec import encode_block
from ..layout import Piece, RecordMeta, ShardHeader, Span, TargetInfo, check_stream_name
from ..lossy import from_float, to_float
from ..reader import Record, ShardStore, open_shards
from ..stitch import Stitched, stitch
from ..writer import ShardWriter
from .staging import staged

if TYPE_CHECKING:
    import torch

    from ...target import Target

_NORM_TOLERANCE = 0.02
MAX_ROWS = 1 << 21
REFERENCE_RECORDS = 4


@dataclass(frozen=True, slots=True)
class Format:
    """What a tool means by its files when they do not say."""

    module: str
    layer_shift: int
    """Add to the tool's layer ids to get ours (residual stream entering the layer)."""
    final_hidden: str
    """``post_norm`` or ``pre_norm``."""
    about: str


FORMATS = {
    "modelopt": Format("modelopt", 1, "post_norm", "Model-Optimizer .pt (HF, TensorRT-LLM)"),
    "modelopt-vllm": Format("modelopt", 0, "pre_norm", "Model-Optimizer .pt made by its vLLM script"),
    "speculators": Format("speculators", 0, "pre_norm", "speculators hs_*.safetensors and dataset"),
    "vllm-connector": Format("connector", 0, "pre_norm", "vLLM ExampleHiddenStatesConnector"),
    "specforge": Format("specforge", 1, "post_norm", "SpecForge .ckpt and .ckpt.gz"),
    "eagle": Format("eagle", 0, "post_norm", "EAGLE-1 ge_data .ckpt: final states only"),
}  # fmt: skip


@dataclass(slots=True)
class Sample:
    """One sequence as a neighbour stores it: states for every token."""

    name: str
    token_ids: np.ndarray
    """int [T]."""
    loss_mask: np.ndarray | None
    """bool [T], true where a token is trained on; None if the format does not say."""
    aux: np.ndarray
    """Bits [T, A, H]."""
    final: np.ndarray | None
    """Bits [T, H]."""
    dtype: str
    final_hidden: str | None = None
    """What the file itself says of its final states: ``post_norm`` or ``pre_norm``; None if nothing."""


def to_bits(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A float tensor as raw bits and its dtype's name.

    Raises:
        InputError: Another dtype.
    """
    import torch

    names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    if tensor.dtype not in names:
        raise InputError(f"states are {tensor.dtype}; expected bfloat16, float16 or float32")
    wide = tensor.dtype == torch.float32
    signed = tensor.detach().contiguous().view(torch.int32 if wide else torch.int16).numpy()
    return signed.view(np.uint32 if wide else np.uint16), names[tensor.dtype]


def load_torch(source: Any, name: str) -> dict[str, Any]:
    """``torch.load`` of tensors and plain values only: nothing in the file is ever executed.

    Raises:
        InputError: Not such a file; names it.
    """
    try:
        import torch
    except ImportError as err:
        raise InputError("reading .pt and .ckpt needs torch; pip install 'specdec-tap[train]'") from err
    try:
        data = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as err:
        # torch raises many types for foreign bytes, and advises to load them unsafely: its text is not shown.
        raise InputError(
            f"{name}: cannot be loaded as plain tensors ({type(err).__name__}); it is damaged, or "
            "holds objects "
            "that would have to be executed"
        ) from err
    if not isinstance(data, dict):
        raise InputError(f"{name}: holds a {type(data).__name__}; expected a dict of tensors")
    return data


def field(data: dict[str, Any], key: str, name: str) -> Any:
    """A required entry of a loaded file."""
    if key not in data:
        raise InputError(f"{name}: lacks {key!r}; it has {sorted(map(str, data))[:8]}")
    return data[key]


def token_row(tensor: Any, name: str) -> np.ndarray:
    """int32 [T] from a tensor of one or two axes."""
    ids = np.asarray(tensor).reshape(-1)
    if ids.dtype.kind not in "iu" or not len(ids) or len(ids) > MAX_ROWS:
        raise InputError(
            f"{name}: input ids are {ids.dtype} of {len(ids):,}; expected 1 to {MAX_ROWS:,} integers"
        )
    return ids.astype(np.int32)


def mask_row(tensor: Any, length: int, name: str) -> np.ndarray:
    """bool [T]; a mask that is shorter is filled with false."""
    mask = np.asarray(tensor).reshape(-1) != 0
    if len(mask) > length:
        raise InputError(f"{name}: loss mask has {len(mask):,} entries for {length:,} tokens")
    return np.pad(mask, (0, length - len(mask)))


# ---- import


def import_dump(
    format_name: str,
    source: Path,
    root: Path,
    model_dir: Path,
    *,
    layer_ids: tuple[int, ...] | None = None,
    layer_shift: int | None = None,
    final_hidden: str = "auto",
    stream: str = "imported",
    codec: str = "lossless",
    reference: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[str, Counter[str]]:
    """Write a neighbour's dump as shards: all of it, or nothing.

    Args:
        format_name: A key of ``FORMATS``.
        source: Its folder, or one file.
        root: Shards folder; ``target/`` is made from ``model_dir``.
        model_dir: The target model's Hugging Face directory.
        layer_ids: The tool's own layer ids, in the order of its states; its default if None.
        layer_shift: Add to those ids to get ours; the format's own if None.
        final_hidden: What the dump holds: ``post_norm``, ``pre_norm``, or ``auto`` to measure it. Shards are
            always written post-norm, which is what training needs. Where a file says it itself, its word
            counts for ``auto``, and another value is taken only if the measurement agrees with it.
        stream: Name of the stream to write; a number is added where there is one of that name.
        codec: As in the shard header.
        reference: Compare some of the records with a float32 forward of the model in this folder before they
            are added: only that can tell which layers states are of.
        progress: Called with the number of samples done.

    Returns:
        Name of the stream, and counts: ``records``, ``tokens``, ``rows``, and ``left out: REASON``.

    Raises:
        InputError: The dump does not fit the model or contradicts ``final_hidden`` or ``reference``; names
            the file. Nothing was added then.
    """
    from ...target import load_target, save_target

    if format_name not in FORMATS:
        raise InputError(f"format is {format_name!r}; expected one of {', '.join(FORMATS)}")
    spec = FORMATS[format_name]
    target = load_target(model_dir)
    module = importlib.import_module(f".{spec.module}", __package__)
    counts: Counter[str] = Counter()
    if (root / "target").exists():  # of another model: said before anything is read
        save_target(model_dir, root / "target")
    samples = module.read(source, target.hidden_size)
    try:
        first = next(samples)
    except StopIteration:
        raise InputError(f"no sample in {str(source)!r}; {_reasons(counts)}") from None
    header = _header(format_name, spec, target, model_dir, first, layer_ids, layer_shift, stream, codec)
    norm_of = _final_kind(first, target, spec, final_hidden)
    with staged(root, check_stream_name(stream)) as staging:
        with ShardWriter(staging.folder, header.replace(stream=staging.stream)) as writer:
            for sample in itertools.chain([first], samples):
                _check_claim(sample, first, spec, layer_ids, layer_shift)
                _check_sample(sample, header, target)
                _write_sample(writer, sample, target, norm_of, counts)
                if progress is not None:
                    progress(counts["records"])
        if not counts["records"]:
            raise InputError(f"no sample in {str(source)!r}; {_reasons(counts)}")
        if reference is not None:
            _compare(staging.folder, reference)
        save_target(model_dir, root / "target")
        staging.publish()
    return staging.stream, counts


def _compare(imported: Path, model_dir: Path) -> None:
    """Refuse states that are not the model's.

    Raises:
        InputError: Names each layer that differs, and the one that it is.
    """
    from ..reference import check_reference
    from ..verify import VerifyReport

    report = VerifyReport()
    with open_shards(imported) as store:
        check_reference(store, report, model_dir, REFERENCE_RECORDS, lambda *_: None)
    if not report.ok:
        found = "; ".join(finding.message for finding in report.findings)
        raise InputError(
            f"the states are not those of {str(model_dir)!r}: {found}. Correct --layers, --convention or "
            "--final-hidden, or name the model that they came from"
        )


def _reasons(counts: Counter[str]) -> str:
    found = [f"{n:,} {name}" for name, n in counts.items() if name.startswith("left out")]
    return ", ".join(found) or "no file of this format"


def _header(
    format_name: str,
    spec: Format,
    target: Target,
    model_dir: Path,
    sample: Sample,
    layer_ids: tuple[int, ...] | None,
    layer_shift: int | None,
    stream: str,
    codec: str,
) -> ShardHeader:
    layers = target.num_hidden_layers
    count = sample.aux.shape[1]
    if count == 0:
        ours: tuple[int, ...] = ()
    elif layer_ids is None:
        ours = (2, layers // 2, layers - 3)
        if count != 3:
            raise InputError(
                f"{sample.name}: has states of {count} layers; the default is 3. Name them with --layers"
            )
    else:
        shift = spec.layer_shift if layer_shift is None else layer_shift
        ours = tuple(i + shift for i in layer_ids)
        if len(ours) != count:
            raise InputError(f"--layers names {len(ours)} layers; {sample.name} has states of {count}")
        if list(ours) != sorted(set(ours)) or ours[0] < 0 or ours[-1] > layers:
            raise InputError(
                f"--layers {list(layer_ids)} are layers {list(ours)} as residual streams entering a "
                "layer; expected "
                f"ascending ids from 0 to {layers}"
            )
    from ...target import fingerprint

    weights = fingerprint(target)
    return ShardHeader(
        stream=stream,
        shard=0,
        created_unix_s=0.0,
        target=TargetInfo(
            name=model_dir.resolve().name,
            revision=None,
            architecture=str((target.config.get("architectures") or [""])[0]),
            model_type=str(target.config.get("model_type", "")),
            num_hidden_layers=layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            config_sha256=target.config_sha256,
            tokenizer_sha256=None,
            quantization=None,
            tables_sha256=weights.tables,
            layers_sha256=weights.layers,
        ),
        aux_layer_ids=ours,
        final_hidden="post_norm" if sample.final is not None else "none",
        final_scope="response" if sample.final is not None else "none",
        dtype=sample.dtype,
        codec=codec,
        engine={"imported_from": format_name},
    )


def _final_kind(sample: Sample, target: Target, spec: Format, declared: str) -> str | None:
    """``post_norm`` or ``pre_norm``, measured where the norm is known; None without final states."""
    if sample.final is None:
        return None
    values = to_float(sample.final, sample.dtype)
    measured = measured_final_kind(values, target)
    says = sample.final_hidden
    if declared == "auto" and says is None:
        return measured or spec.final_hidden
    kind = says if declared == "auto" else declared
    if measured is not None and measured != kind and not _norm_keeps(values, target):
        source = f"not {kind}" if declared != "auto" else f"but its file says {kind}"
        raise InputError(
            f"{sample.name}: final states are {measured} by their size, {source}; pass --final-hidden "
            f"{measured}, or check that --target is the model they came from"
        )
    if says not in (None, kind) and measured != kind:
        raise InputError(
            f"{sample.name}: its file says {says}, --final-hidden says {kind}, and the target's norm is of a "
            "kind that cannot tell; leave --final-hidden out, or correct the file"
        )
    return kind


def _check_claim(
    sample: Sample, first: Sample, spec: Format, layer_ids: tuple[int, ...] | None, layer_shift: int | None
) -> None:
    """Refuse files of two kinds in one dump, and layer ids that the file's own word puts in doubt."""
    kinds = [s.final_hidden or spec.final_hidden for s in (first, sample)]
    if kinds[0] != kinds[1]:
        words = [f"says {s.final_hidden}" if s.final_hidden else "says nothing" for s in (first, sample)]
        raise InputError(
            f"the dump mixes final states of two kinds: {first.name} {words[0]}, {sample.name} {words[1]} "
            f"(nothing means {spec.final_hidden} here); import each kind from a folder of its own"
        )
    if layer_ids is not None and layer_shift is None and kinds[0] != spec.final_hidden:
        raise InputError(
            f"{sample.name}: its file says {kinds[0]}, and --from names a format that is "
            f"{spec.final_hidden}, so what --layers counts is not certain; say it with "
            "--convention, or name another --from"
        )


def _norm_keeps(values: np.ndarray, target: Target) -> bool:
    """Whether the norm changes nothing, as with weights of one: both kinds are then the same states."""
    held = values[np.any(values != 0, axis=1)]
    return bool(np.allclose(apply_norm(held, target), held, rtol=_NORM_TOLERANCE, atol=1e-3))


def measured_final_kind(final: np.ndarray, target: Target) -> str | None:
    """Whether states went through the norm, by their size: behind it, ``rms(final / weight)`` is 1."""
    weight = norm_weight(target)
    final = final[np.any(final != 0, axis=1)]  # an export has zeros where no final state was kept
    if weight is None or target.norm_bias is not None or not len(final):
        return None
    rms = np.sqrt(((final / np.where(weight == 0, np.inf, weight)) ** 2).mean(axis=1))
    return "post_norm" if abs(float(np.median(rms)) - 1.0) < _NORM_TOLERANCE else "pre_norm"


def norm_weight(target: Target) -> np.ndarray | None:
    """float32 [H] that the last norm multiplies with; None if its kind is unknown."""
    if target.norm is None or target.norm_kind == "unknown":
        return None
    weight = target.norm.float32()
    return weight + 1.0 if target.norm_kind == "rms_one_plus" else weight


def apply_norm(final: np.ndarray, target: Target) -> np.ndarray:
    """The model's last norm on float32 [rows, H].

    Raises:
        InputError: The norm's kind is unknown.
    """
    weight = norm_weight(target)
    if weight is None:
        raise InputError(
            "the target's last norm is of an unknown kind, so pre-norm states cannot be converted"
        )
    if target.norm_kind == "layer_norm":
        final = final - final.mean(axis=1, keepdims=True)
    bias = target.norm_bias.float32() if target.norm_bias is not None else np.float32(0)
    return final / np.sqrt((final**2).mean(axis=1, keepdims=True) + target.norm_eps) * weight + bias


def _check_sample(sample: Sample, header: ShardHeader, target: Target) -> None:
    rows = len(sample.token_ids)
    shape = (rows, header.num_aux, header.hidden_size)
    if sample.aux.shape != shape or sample.dtype != header.dtype:
        raise InputError(
            f"{sample.name}: states are {sample.dtype} {list(sample.aux.shape)}; expected "
            f"{header.dtype} {list(shape)}"
        )
    if (sample.final is None) != (header.final_hidden == "none") or (
        sample.final is not None and sample.final.shape != (rows, header.hidden_size)
    ):
        raise InputError(f"{sample.name}: its final states do not have the shape of the first sample's")
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= target.vocab_size:
        raise InputError(
            f"{sample.name}: token ids run from {low:,} to {high:,}; the vocabulary is {target.vocab_size:,}"
        )


def _write_sample(
    writer: ShardWriter, sample: Sample, target: Target, norm_of: str | None, counts: Counter[str]
) -> None:
    from ..verify import nonfinite_rows

    total = len(sample.token_ids)
    rows = total - 1
    if rows < 1:
        counts["left out: one token"] += 1
        return
    if len(nonfinite_rows(sample.aux, sample.dtype)):
        counts["left out: not finite"] += 1
        return
    final = sample.final
    if final is not None and norm_of == "pre_norm":
        final = from_float(
            np.ascontiguousarray(apply_norm(to_float(final, sample.dtype), target), np.float32), sample.dtype
        )
    header = writer.header
    spans = mask_spans(sample.loss_mask, total)
    wanted = np.zeros(rows, bool)
    for span in spans:
        if span.kind == "response":
            wanted[max(span.start - 1, 0) : span.stop - 1] = True
    pieces = []
    for start in range(0, rows, header.block_tokens):
        stop = min(start + header.block_tokens, rows)
        at = np.flatnonzero(wanted[start:stop])
        kept, first = None, 0
        if final is not None and len(at):
            first = int(at[0])
            kept = final[start + first : start + int(at[-1]) + 1]
        payload = encode_block(
            header, position=start, aux=sample.aux[start:stop].transpose(1, 0, 2), final=kept, final_row=first
        )
        pieces.append(Piece(start, writer.append_block(payload), 0, stop - start))
    writer.append_record(
        RecordMeta(
            request_id=sample.name[-256:],
            token_ids=sample.token_ids,
            spans=spans,
            pieces=tuple(pieces),
            finish_reason="stop",
            started_unix_s=0.0,
            finished_unix_s=0.0,
            sampling={},
            flags=("imported",) if sample.loss_mask is not None else ("imported", "no_loss_mask"),
        )
    )
    counts.update(records=1, tokens=total, rows=rows)


def mask_spans(mask: np.ndarray | None, total: int) -> tuple[Span, ...]:
    """Spans from a loss mask; without one, everything behind the first token counts as response."""
    response = np.ones(total, bool) if mask is None else mask.copy()
    response[0] = False  # nothing predicts the first token
    edges = [0, *(np.flatnonzero(response[1:] != response[:-1]) + 1).tolist(), total]
    return tuple(Span(a, b, "response" if response[a] else "prompt") for a, b in itertools.pairwise(edges))


# ---- export


def export_shards(
    store: ShardStore,
    out: Path,
    format_name: str,
    *,
    stitched: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Counter[str]:
    """Write records in a neighbour's layout, one file each.

    A neighbour keeps a state for every token, and a shard none for the last one, so each sequence loses its
    last token. Where a final state is not stored (prompt positions, by default) zeros are written; the loss
    mask is 0 there. Records with gaps are left out and counted.

    Args:
        store: The shards.
        out: A new or empty folder.
        format_name: A key of ``FORMATS``.
        stitched: Join the turns of a conversation first, so that each token is trained once.
        progress: Called with the number of sequences done.

    Returns:
        Counts: ``records``, ``tokens``, and ``left out: REASON``.

    Raises:
        InputError: ``out`` is not empty, or the target is missing where the layout needs its norm.
    """
    if format_name not in FORMATS:
        raise InputError(f"format is {format_name!r}; expected one of {', '.join(FORMATS)}")
    spec = FORMATS[format_name]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{str(out)!r} exists and is not an empty folder; name a new one")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    module = importlib.import_module(f".{spec.module}", __package__)
    counts: Counter[str] = Counter()
    samples = _export_samples(store, spec, stitched, counts, progress)
    module.write(samples, out, spec.final_hidden)
    ids = [i - spec.layer_shift for i in store.header.aux_layer_ids]
    note = {
        "format": format_name,
        "layer_ids": ids,
        "residual_in_layer_ids": list(store.header.aux_layer_ids),
        "final_hidden": spec.final_hidden,
        "target": store.header.target.to_json(),
        "counts": dict(counts),
    }
    (out / "specdec_tap_export.json").write_text(json.dumps(note, indent=2) + "\n")
    if not counts["records"]:
        raise InputError(f"nothing to export from {str(store.root)!r}; {_reasons(counts)}")
    return counts


def _export_samples(
    store: ShardStore,
    spec: Format,
    stitched: bool,
    counts: Counter[str],
    progress: Callable[[int], None] | None,
) -> Iterator[Sample]:
    header = store.header
    target = None
    convert = header.final_hidden != "none" and spec.final_hidden != header.final_hidden
    if convert:
        from ...target import load_target

        if store.target_dir is None:
            raise InputError(
                f"this layout keeps {spec.final_hidden} states; converting needs {store.root}/target"
            )
        target = load_target(store.target_dir)
    records: Iterable[Record | Stitched] = stitch(store) if stitched else store
    for record in records:
        rows = record.num_rows
        if record.gaps or rows < 1:
            counts["left out: gaps"] += 1
            continue
        try:
            aux = record.aux()
            final = np.zeros((rows, header.hidden_size), header.bits_dtype)
            held = np.zeros(rows, bool)
            for start, stop in record.final_span:
                final[start:stop] = record.final(start, stop)
                held[start:stop] = True
        except ShardError:
            counts["left out: damaged"] += 1
            continue
        if convert and target is not None and held.any():
            values = to_float(np.ascontiguousarray(final[held]), header.dtype)
            values = (
                apply_norm(values, target) if spec.final_hidden == "post_norm" else _undo_norm(values, target)
            )
            final[held] = from_float(np.ascontiguousarray(values, np.float32), header.dtype)
        mask = np.zeros(rows, bool)
        for span in record.spans:
            if span.kind == "response":
                mask[span.start : span.stop] = True
        # A token is taught by the state before it.
        mask[1:] &= held[:-1] | (header.final_hidden == "none")
        counts.update(records=1, tokens=rows)
        yield Sample(
            name=record.id.replace("/", "-"),
            token_ids=record.token_ids[:rows],
            loss_mask=mask,
            aux=aux,
            final=None if header.final_hidden == "none" else final,
            dtype=header.dtype,
        )
        if progress is not None:
            progress(counts["records"])


def _undo_norm(final: np.ndarray, target: Target) -> np.ndarray:
    """States that the norm turns back into ``final``: their size is lost, and does not matter to an RMS norm.

    Raises:
        InputError: The norm is not an RMS norm, or has a zero weight.
    """
    weight = norm_weight(target)
    if weight is None or target.norm_kind == "layer_norm" or not np.all(weight):
        raise InputError(
            "this layout keeps states before the last norm, and the target's norm cannot be undone; "
            "export to "
            "modelopt or specforge, which keep them behind it"
        )
    return final / weight
