"""Model-Optimizer dumps: one ``.pt`` dict a conversation.

``input_ids`` [T], ``hidden_states`` [T, H] (the final state), ``aux_hidden_states`` [T, k x H] in ascending
layer order, ``loss_mask`` [T], ``conversation_id``, and ``hidden_states_prenorm`` if the final state is
before the norm. Source: Model-Optimizer ``compute_hidden_states_hf.py`` and ``OfflineSupervisedDataset``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ...errors import InputError
from ..reader import bits_to_torch
from .common import Sample, field, load_torch, mask_row, to_bits, token_row


def read(source: Path, hidden_size: int) -> Iterator[Sample]:
    """Samples of a folder (recursively) or one file, in name order."""
    files = [source] if source.is_file() else sorted(source.rglob("*.pt"))
    for path in files:
        data = load_torch(path, str(path))
        ids = token_row(field(data, "input_ids", str(path)), str(path))
        aux, dtype = to_bits(field(data, "aux_hidden_states", str(path)))
        final, _ = to_bits(field(data, "hidden_states", str(path)))
        if aux.ndim != 2 or aux.shape[1] % hidden_size:
            raise InputError(
                f"{path}: aux_hidden_states are {list(aux.shape)}; expected [T, layers x {hidden_size}]"
            )
        mask = data.get("loss_mask")
        yield Sample(
            name=str(data.get("conversation_id", path.stem)),
            token_ids=ids,
            loss_mask=None if mask is None else mask_row(mask, len(ids), str(path)),
            aux=aux.reshape(len(aux), -1, hidden_size),
            final=final,
            dtype=dtype,
        )


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """One file a sample; ``hidden_states_prenorm`` says what the final state is."""
    import torch

    for sample in samples:
        rows = len(sample.token_ids)
        data = {
            "input_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
            "aux_hidden_states": bits_to_torch(sample.aux.reshape(rows, -1), sample.dtype),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "conversation_id": sample.name,
            "hidden_states_prenorm": final_hidden == "pre_norm",
        }
        if sample.final is not None:
            data["hidden_states"] = bits_to_torch(sample.final, sample.dtype)
        torch.save(data, out / f"{sample.name}.pt")
