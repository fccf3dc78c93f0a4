"""speculators ``hs_I.safetensors`` beside a dataset folder, and the files of vLLM's example connector.

``hidden_states`` [T, n, H]: aux layers in ascending order, then the state before the last norm.
``token_ids`` [T]. The loss mask is in a Hugging Face dataset folder (``input_ids``, ``loss_mask``,
``seq_len``), where row I belongs to ``hs_I.safetensors``; files of the connector have none. Source:
speculators ``check_hidden_states`` and its trainer; vLLM ``ExampleHiddenStatesConnector``.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from .common import Sample, mask_row, token_row

_DTYPES = {"BF16": ("bfloat16", np.uint16), "F16": ("float16", np.uint16), "F32": ("float32", np.uint32)}
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NUMBERED = re.compile(r"hs_([0-9]+)\.safetensors")


def read(source: Path, hidden_size: int) -> Iterator[Sample]:
    """Samples of a folder (files anywhere below it) or one file, numbered files in number order."""
    from ...target import read_safetensors_header

    files = [source] if source.is_file() else [p for p in source.rglob("*.safetensors") if p.is_file()]
    files.sort(key=lambda p: (int(m[1]) if (m := _NUMBERED.fullmatch(p.name)) else -1, p.name))
    masks = _loss_masks(source) if source.is_dir() else None
    for path in files:
        refs = read_safetensors_header(path)
        for key in ("hidden_states", "token_ids"):
            if key not in refs:
                raise InputError(f"{path}: lacks {key!r}; it has {sorted(refs)[:8]}")
        ids = token_row(_read(refs["token_ids"]), str(path))
        states = refs["hidden_states"]
        if states.dtype not in _DTYPES:
            raise InputError(f"{path}: hidden_states are {states.dtype}; expected BF16, F16 or F32")
        dtype, kind = _DTYPES[states.dtype]
        shape = states.shape
        if len(shape) != 3 or shape[0] != len(ids) or shape[1] < 2 or shape[2] != hidden_size:
            raise InputError(
                f"{path}: hidden_states are {list(shape)}; expected [{len(ids):,}, layers + 1, {hidden_size}]"
            )
        bits = _read(states, kind).reshape(shape)
        number = _NUMBERED.fullmatch(path.name)
        mask = None
        if masks is not None and number:
            mask = mask_row(_mask_of(masks, int(number[1]), ids, path), len(ids), str(path))
        yield Sample(path.stem, ids, mask, bits[:, :-1], np.ascontiguousarray(bits[:, -1]), dtype)


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """The dataset in ``out`` itself and ``hidden_states/hs_I.safetensors`` in it: where its trainer looks."""
    assert final_hidden == "pre_norm", "speculators keeps states before the norm"
    rows: list[dict[str, Any]] = []
    folder = out / "hidden_states"
    folder.mkdir(mode=0o700)
    try:
        import pyarrow
        from datasets import Dataset
    except ImportError as err:
        raise InputError(
            "speculators keeps its loss masks in a Hugging Face dataset; pip install datasets"
        ) from err
    for number, sample in enumerate(samples):
        write_states(folder / f"hs_{number}.safetensors", sample)
        rows.append(
            {
                "input_ids": sample.token_ids.tolist(),
                "loss_mask": sample.loss_mask.astype(int).tolist(),
                "seq_len": len(sample.token_ids),
            }
        )
    if rows:
        table = pyarrow.Table.from_pylist(rows)
        # Without a fingerprint, datasets pickles the table to make one, which pyarrow's types may refuse.
        # Its trainer compares tensors, so it wants the rows in that format.
        dataset = Dataset(table, fingerprint=f"specdec-tap-{len(rows)}").with_format("torch")
        dataset.save_to_disk(str(out))


def write_states(path: Path, sample: Sample) -> None:
    """``hidden_states`` ``[T, A + 1, H]``, the final state last, and ``token_ids`` ``[T]``.

    Raises:
        InputError: The sample has no final states.
    """
    if sample.final is None:
        raise InputError("this layout needs final states; these shards have none")
    states = np.ascontiguousarray(np.concatenate([sample.aux, sample.final[:, None]], axis=1))
    ids = sample.token_ids.astype(np.int64)
    _write_safetensors(path, {"hidden_states": (_CODES[sample.dtype], states), "token_ids": ("I64", ids)})


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Bits as they are: NumPy has no bfloat16 that a safetensors writer would take."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (code, values) in tensors.items():
        header[name] = {
            "dtype": code,
            "shape": list(values.shape),
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())


def _read(ref: Any, kind: Any = np.int64) -> np.ndarray:
    if kind is np.int64 and ref.dtype not in ("I64", "I32"):
        raise InputError(f"{ref.path}: {ref.name} is {ref.dtype}; expected I64 or I32")
    kind = np.int32 if kind is np.int64 and ref.dtype == "I32" else kind
    with ref.path.open("rb") as file:
        file.seek(ref.offset)
        data = file.read(ref.nbytes)
    return np.frombuffer(data, kind)


def _loss_masks(source: Path) -> Any:
    """The dataset folder beside or below the files, or None."""
    found = [p.parent for p in source.rglob("dataset_info.json") if (p.parent / "state.json").is_file()]
    if not found:
        return None
    try:
        from datasets import load_from_disk
    except ImportError as err:
        raise InputError(f"{found[0]} holds the loss masks; reading it needs 'pip install datasets'") from err
    return load_from_disk(str(found[0]))


def _mask_of(masks: Any, number: int, ids: np.ndarray, path: Path) -> np.ndarray:
    if number >= len(masks):
        raise InputError(f"{path}: the dataset beside it has {len(masks):,} rows")
    row = masks[number]
    if list(row["input_ids"])[: len(ids)] != ids.tolist():
        raise InputError(f"{path}: its tokens are not those of row {number:,} of the dataset beside it")
    return np.asarray(row["loss_mask"])[: len(ids)]
