"""Captured rows against Hugging Face in float32, and what a store holds against what was answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def max_error(records: Iterable[Any], model: Path) -> float:
    """Return the largest relative L2 error of any captured row, aux layers 2, 4, 5 and final state.

    Every record is compared with one unbroken forward of its tokens; gaps are left out.
    """
    import torch
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = 0.0
    for record in records:
        ids = torch.tensor(record.token_ids[:-1].astype(np.int64))[None]
        with torch.inference_mode():
            out = oracle.model(ids, output_hidden_states=True)
        for start, stop in covered(record):
            aux = record.aux_float(start, stop)
            for slot, layer in enumerate((2, 4, 5)):
                worst = max(worst, relative(aux[:, slot], out.hidden_states[layer][0, start:stop].numpy()))
        for start, stop in record.final_span:
            final = out.last_hidden_state[0, start:stop].numpy()
            worst = max(worst, relative(record.final_float(start, stop), final))
    return worst


def covered(record: Any) -> list[tuple[int, int]]:
    """Return the runs of positions between the record's gaps."""
    edges = [0, *(edge for gap in record.gaps for edge in gap), record.num_rows]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest relative L2 error of a row."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


def answers(outputs: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return prompt + response of every answer, in order of their tokens."""
    return sorted(tuple(o["prompt"] + o["tokens"]) for o in outputs)


def sequences(records: Iterable[Any]) -> list[tuple[int, ...]]:
    """Return the tokens of every record, in their order."""
    return sorted(tuple(record.token_ids.tolist()) for record in records)


def final_status(stream: Path) -> dict[str, Any]:
    """Return what a stream's writer said last, once it has sealed all."""
    deadline = time.monotonic() + 60
    while not (status := json.loads((stream / ".status.json").read_text()))["closed"]:
        assert time.monotonic() < deadline, "the writer did not end"
        time.sleep(0.05)
    return status


def wait_until_closed(shards: Path) -> None:
    """Wait for the writers, which outlive their engines until all is sealed."""
    deadline = time.monotonic() + 60
    while list(shards.glob("*/*.open")):
        assert time.monotonic() < deadline, "the writer did not seal"
        time.sleep(0.05)
