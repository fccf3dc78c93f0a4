"""Model-Optimizer dumps: one ``.pt`` dict a conversation.

``input_ids`` [T], ``hidden_states`` [T, H] (the final state), ``aux_hidden_states`` [T, k x H] in ascending
layer order, ``loss_mask`` [T], ``conversation_id``, and ``hidden_states_prenorm``: whether the final state is
before the norm. Its scripts leave that out, and its reader then takes False. Source: Model-Optimizer
``compute_hidden_states_hf.py`` and ``OfflineSupervisedDataset``.
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
        prenorm = data.get("hidden_states_prenorm")
        if prenorm is not None and not isinstance(prenorm, bool):
            raise InputError(
                f"{path}: hidden_states_prenorm is {str(prenorm)[:80]!r} ({type(prenorm).__name__}); "
                "expected True or False. Write it as a bool, or leave it out"
            )
        yield Sample(
            name=str(data.get("conversation_id", path.stem)),
            token_ids=ids,
            loss_mask=None if mask is None else mask_row(mask, len(ids), str(path)),
            aux=aux.reshape(len(aux), -1, hidden_size),
            final=final,
            dtype=dtype,
            final_hidden=None if prenorm is None else "pre_norm" if prenorm else "post_norm",
        )


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """One file a sample; ``hidden_states_prenorm`` says what the final state is."""
    import torch

    for sample in samples:
        if sample.final is None:
            raise InputError("Model-Optimizer's layout needs final states; these shards have none")
        rows = len(sample.token_ids)
        data = {
            "input_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
            "hidden_states": bits_to_torch(sample.final, sample.dtype),
            "aux_hidden_states": bits_to_torch(sample.aux.reshape(rows, -1), sample.dtype),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "conversation_id": sample.name,
            "hidden_states_prenorm": final_hidden == "pre_norm",
        }
        torch.save(data, out / f"{sample.name}.pt")
