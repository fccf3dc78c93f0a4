"""Records as training samples: plain dicts of NumPy arrays, the base of both dataset adapters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .layout import ShardHeader
from .reader import Record, ShardStore, open_shards
from .stitch import Stitched, stitch


class SampleReader:
    """Records of a folder by number, from any process: pickled or forked, it opens the files anew."""

    def __init__(self, path: Path | str, *, stitched: bool = False, final: bool = True) -> None:
        """Remember what to open; nothing is read yet.

        Args:
            path: As for ``open_shards``: a folder, a file or a URL.
            stitched: One sample a conversation instead of one a request. Reads every record's tokens on
                first use.
            final: Read final states too.
        """
        self.path = str(path)
        self.stitched = stitched
        self.final = final
        self._pid = -1
        self._store: ShardStore | None = None
        self._records: ShardStore | list[Stitched] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pid": -1, "_store": None, "_records": []}

    def _open(self) -> ShardStore | list[Stitched]:
        # A forked worker must not share file caches or locks with its parent.
        if self._store is None or self._pid != os.getpid():
            self._store, self._pid = open_shards(self.path), os.getpid()
            self._records = list(stitch(self._store)) if self.stitched else self._store
        return self._records

    @property
    def header(self) -> ShardHeader:
        """What all shards agree on."""
        self._open()
        assert self._store is not None, "just opened"
        return self._store.header

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One sample: ``record_id`` and arrays of T tokens and T - 1 rows.

        ``input_ids`` int64 [T]; ``loss_mask`` bool [T], true at response tokens; ``aux_bits`` [T - 1, A, H],
        raw bits of the shard's dtype; ``state_mask`` bool [T - 1], false in gaps, where the states are zeros;
        with ``final`` also ``final_bits`` [T - 1, H] and ``final_mask`` bool [T - 1].

        Raises:
            IndexError: Out of range.
            ShardError: The record is damaged; names the file.
        """
        record: Record | Stitched = self._open()[number]
        header, rows = record.header, record.num_rows
        loss_mask = np.zeros(record.num_tokens, bool)
        for span in record.spans:
            if span.kind == "response":
                loss_mask[span.start : span.stop] = True
        aux = np.zeros((rows, header.num_aux, header.hidden_size), header.bits_dtype)
        held = np.ones(rows, bool)
        for start, stop in record.gaps:
            held[start:stop] = False
        for start, stop in ranges(held):
            aux[start:stop] = record.aux(start, stop)
        sample = {
            "record_id": record.id,
            "input_ids": record.token_ids.astype(np.int64),
            "loss_mask": loss_mask,
            "aux_bits": aux,
            "state_mask": held,
        }
        if self.final:
            final = np.zeros((rows, header.hidden_size), header.bits_dtype)
            final_mask = np.zeros(rows, bool)
            for start, stop in record.final_span:
                final[start:stop] = record.final(start, stop)
                final_mask[start:stop] = True
            sample |= {"final_bits": final, "final_mask": final_mask}
        return sample


def ranges(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges where a bool array is true.

    Example:
        >>> ranges(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
