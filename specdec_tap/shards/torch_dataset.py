"""Shards as a map-style PyTorch ``Dataset``. Importing this module imports torch; nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .reader import bits_to_torch
from .samples import SampleReader


class ShardDataset(Dataset):
    """One sample a record, read from disk when it is asked for; safe with any number of DataLoader workers.

    A sample is a dict: ``record_id``, ``input_ids`` int64 [T], ``loss_mask`` bool [T] (true at response
    tokens), ``aux`` [T - 1, A, H] and ``final`` [T - 1, H] in the shard's dtype, ``state_mask`` and
    ``final_mask`` bool [T - 1], false where a position has no such state and zeros stand for it. Row t is the
    state of position t; the last token was never fed to the model, so it has none.
    """

    def __init__(self, path: Path | str, *, stitched: bool = False, final: bool = True) -> None:
        """Prepare; files are opened in each process that reads.

        Args:
            path: As for ``open_shards``: a folder, a file or a URL.
            stitched: One sample a conversation instead of one a request.
            final: Read final states too.
        """
        self._reader = SampleReader(path, stitched=stitched, final=final)

    @property
    def header(self) -> Any:
        """The ``ShardHeader`` that all shards agree on."""
        return self._reader.header

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """See the class; IndexError out of range, ShardError (names the file) for a damaged record."""
        sample = self._reader[number]
        dtype = self._reader.header.dtype
        out = {"record_id": sample.pop("record_id")}
        for name, value in sample.items():
            bits = name.endswith("_bits")
            out[name.removesuffix("_bits")] = bits_to_torch(value, dtype) if bits else torch.from_numpy(value)
        return out


def pad_samples(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``collate_fn`` of a DataLoader: pads on the right with zeros; ``token_mask`` bool [B, T] marks tokens.

    Masks are false in the padding. ``record_id`` becomes a list.
    """
    batch: dict[str, Any] = {"record_id": [sample["record_id"] for sample in samples]}
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch["token_mask"] = torch.arange(int(lengths.max())) < lengths[:, None]
    for name, value in samples[0].items():
        if isinstance(value, Tensor):
            values = [sample[name] for sample in samples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    return batch
