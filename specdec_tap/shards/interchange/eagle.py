"""EAGLE-1 ``ge_data``: ``.ckpt`` dicts with ``input_ids`` [T], ``hidden_state`` [T, H] (post-norm),
``loss_mask`` [T].

Source: SafeAILab/EAGLE ``eagle/train/main.py``. There are no aux states, so such shards train EAGLE-1
    drafters only.
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
    files = [source] if source.is_file() else sorted(source.rglob("*.ckpt"))
    for path in files:
        data = load_torch(path, str(path))
        ids = token_row(field(data, "input_ids", str(path)), str(path))
        final, dtype = to_bits(field(data, "hidden_state", str(path)))
        yield Sample(
            name=f"{path.parent.name}/{path.stem}",
            token_ids=ids,
            loss_mask=mask_row(field(data, "loss_mask", str(path)), len(ids), str(path)),
            aux=np.empty((len(ids), 0, hidden_size), final.dtype),
            final=final.reshape(-1, hidden_size),
            dtype=dtype,
        )


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """One ``data_I.ckpt`` a sample, in folder ``0``."""
    import torch

    assert final_hidden == "post_norm", "EAGLE keeps states behind the norm"
    folder = out / "0"
    folder.mkdir(mode=0o700)
    for number, sample in enumerate(samples):
        if sample.final is None:
            raise InputError("EAGLE's layout needs final states; these shards have none")
        data = {
            "input_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
            "hidden_state": bits_to_torch(sample.final, sample.dtype),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
        }
        torch.save(data, folder / f"data_{number}.ckpt")
