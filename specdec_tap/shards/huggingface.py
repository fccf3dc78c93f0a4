"""Shards as a Hugging Face ``datasets`` dataset; the package datasets is imported when a function runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .lossy import to_float
from .reader import open_shards
from .samples import SampleReader

if TYPE_CHECKING:
    import datasets


def generate_samples(
    path: str, *, stitched: bool = False, final: bool = True, states: bool = True, stamp: str = ""
) -> Iterator[dict[str, Any]]:
    """Samples as plain NumPy values, one a record; what ``Dataset.from_generator`` is given.

    Args:
        path: As for ``open_shards``.
        stitched: One sample a conversation instead of one a request.
        final: With ``states``: final states too.
        states: Without them only tokens and masks are read.
        stamp: Not used here; makes ``datasets`` see that the folder has changed.
    """
    reader = SampleReader(path, stitched=stitched, final=final and states)
    for number in range(len(reader)):
        sample = reader[number]
        row = {name: sample[name] for name in ("record_id", "input_ids", "loss_mask")}
        if states:
            row["state_mask"] = sample["state_mask"]
            row["aux"] = to_float(sample["aux_bits"], reader.header.dtype)
            if final:
                row["final_mask"] = sample["final_mask"]
                row["final"] = to_float(sample["final_bits"], reader.header.dtype)
        yield row


def hf_dataset(
    path: Path | str,
    *,
    stitched: bool = False,
    final: bool = True,
    states: bool = True,
    streaming: bool = False,
    cache_dir: Path | None = None,
) -> datasets.Dataset | datasets.IterableDataset:
    """A dataset with ``record_id``, ``input_ids`` [T], ``loss_mask`` [T], and float32 states.

    With ``states``: ``aux`` [T - 1, A, H], ``state_mask`` [T - 1], and with ``final`` also ``final``
    [T - 1, H] and ``final_mask`` [T - 1]; zeros stand where a mask is false. Arrow has no bfloat16, so states
    are float32 there, twice as large as in a bfloat16 model and uncompressed: use ``streaming=True``, which
    writes nothing, or ``states=False`` for more than a few thousand records.

    Args:
        path: As for ``open_shards``: a folder, a file or a URL.
        stitched: One row a conversation instead of one a request.
        final: Final states too.
        states: Aux and final states; False gives tokens and masks only.
        streaming: Return an ``IterableDataset`` that reads the shards as it goes.
        cache_dir: Where ``datasets`` keeps its Arrow files; its own default if None.

    Raises:
        InputError: The package datasets is missing, or there is no readable shard.
    """
    try:
        import datasets
    except ImportError as err:
        raise InputError(
            "a Hugging Face dataset of shards needs the package datasets; pip install datasets"
        ) from err
    with open_shards(path) as store:
        header = store.header
        facts = [(str(i.path), i.file_bytes, i.totals.num_records) for i in store.shards]
    flag = datasets.Value("bool")
    columns: dict[str, Any] = {
        "record_id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int64")),
        "loss_mask": datasets.List(flag),
    }
    if states:
        columns["state_mask"] = datasets.List(flag)
        columns["aux"] = datasets.Array3D((None, header.num_aux, header.hidden_size), "float32")
        if final:
            columns["final_mask"] = datasets.List(flag)
            columns["final"] = datasets.Array2D((None, header.hidden_size), "float32")
    arguments = {
        "path": str(path), "stitched": stitched, "final": final, "states": states,
        "stamp": hashlib.sha256(repr(facts).encode()).hexdigest(),
    }  # fmt: skip
    features = datasets.Features(columns)
    if streaming:
        return datasets.IterableDataset.from_generator(
            generate_samples, features=features, gen_kwargs=arguments
        )
    return datasets.Dataset.from_generator(
        generate_samples,
        features=features,
        gen_kwargs=arguments,
        cache_dir=None if cache_dir is None else str(cache_dir),
    )
