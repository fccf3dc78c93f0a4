"""SpecForge offline data: ``.ckpt`` dicts, or gzip streams of them (``.ckpt.gz``).

``input_ids`` [T], ``loss_mask`` [T], ``hidden_state`` [1, T, H] (post-norm final state), ``aux_hidden_state``
[1, T, 3 x H]. Files are ``rows_A-B/data_I.ckpt``. Source: SpecForge ``_OFFLINE_EAGLE3_KEYS``.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ...errors import InputError
from ..reader import bits_to_torch
from .common import Sample, field, load_torch, mask_row, to_bits, token_row

MAX_UNPACKED_BYTES = 32 << 30
FILES_PER_FOLDER = 2000


def read(source: Path, hidden_size: int) -> Iterator[Sample]:
    """Samples of a folder (recursively) or one file, in name order."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*.ckpt*") if p.is_file())
    for path in files:
        data = load_torch(_unzipped(path), str(path))
        ids = token_row(field(data, "input_ids", str(path)), str(path))
        aux, dtype = to_bits(field(data, "aux_hidden_state", str(path)))
        final, _ = to_bits(field(data, "hidden_state", str(path)))
        if aux.shape[-1] % hidden_size or aux.size != len(ids) * aux.shape[-1]:
            raise InputError(
                f"{path}: aux_hidden_state is {list(aux.shape)}; expected [1, {len(ids):,}, layers x "
                f"{hidden_size}]"
            )
        yield Sample(
            name=f"{path.parent.name}/{path.name.split('.')[0]}",
            token_ids=ids,
            loss_mask=mask_row(field(data, "loss_mask", str(path)), len(ids), str(path)),
            aux=aux.reshape(len(ids), -1, hidden_size),
            final=final.reshape(-1, hidden_size),
            dtype=dtype,
        )


def write(samples: Iterable[Sample], out: Path, final_hidden: str) -> None:
    """One ``.ckpt`` a sample, 2,000 to a folder, as its own script does."""
    import torch

    assert final_hidden == "post_norm", "SpecForge keeps states behind the norm"
    for number, sample in enumerate(samples):
        low = number // FILES_PER_FOLDER * FILES_PER_FOLDER
        folder = out / f"rows_{low}-{low + FILES_PER_FOLDER}"
        folder.mkdir(mode=0o700, exist_ok=True)
        rows = len(sample.token_ids)
        if sample.final is None:
            raise InputError("SpecForge's layout needs final states; these shards have none")
        data = {
            "input_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
            "hidden_state": bits_to_torch(sample.final, sample.dtype)[None],
            "aux_hidden_state": bits_to_torch(sample.aux.reshape(rows, -1), sample.dtype)[None],
        }
        torch.save(data, folder / f"data_{number}.ckpt")


def _unzipped(path: Path) -> Path | io.BytesIO:
    if path.suffix != ".gz":
        return path
    unpacked = io.BytesIO()
    # A gzip stream does not say how much it unpacks to: stop at a hundred times its size, a real one is 1.3.
    limit = min(MAX_UNPACKED_BYTES, 100 * path.stat().st_size + (1 << 20))
    try:
        with gzip.open(path) as stream:
            while chunk := stream.read(1 << 20):
                unpacked.write(chunk)
                if unpacked.tell() > limit:
                    raise InputError(f"{path}: unpacks to more than {limit:,} bytes; that is no real dump")
    except (OSError, EOFError, zlib.error) as err:
        raise InputError(f"{path}: is not a whole gzip file ({err})") from err
    unpacked.seek(0)
    return unpacked
