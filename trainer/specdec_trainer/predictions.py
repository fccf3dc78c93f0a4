"""How an exported drafter predicts held-out records, token by token: what ``predictions.jsonl`` holds.

``specdec_tap.runlog`` describes the file. A token counts as right when the drafter's greedy choice is the
token that the target generated, which is also what the dashboard shows as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec_tap.errors import InputError
from specdec_tap.runlog import PredictionsWriter, RecordPredictions, StepPrediction, token_digest

from .batch import Batch
from .data import Dataset, Stretch
from .drafter import Drafter
from .loss import chunk_rows

MAX_RECORDS = 64
MAX_TOKENS = 16_384


def write_predictions(path: Path, model: Drafter, held: Dataset, *, draft_tokens: int, drafter: str) -> int:
    """Predict the first held-out records and write the file.

    Args:
        path: Where the finished file goes.
        model: The drafter, with its tables, on the device to compute on.
        held: Held-out stretches, those of one record side by side.
        draft_tokens: Draft positions.
        drafter: What to show as the drafter's name.

    Returns:
        Records written: at most ``MAX_RECORDS``, fewer where they reach ``MAX_TOKENS``. A damaged record is
        left out.
    """
    model.eval()
    written, tokens = 0, 0
    numbered = enumerate(held.survey.stretches)
    with PredictionsWriter(path, draft_tokens=draft_tokens, drafter=drafter) as out:
        for _, group in itertools.groupby(numbered, key=lambda item: item[1].record):
            stretches = list(group)
            tokens += sum(stretch.supervised for _, stretch in stretches)
            if written == MAX_RECORDS or (written and tokens > MAX_TOKENS):
                break
            try:
                out.write(predict_record(model, held, stretches, draft_tokens))
            except InputError:  # said and counted where the record was evaluated
                continue
            written += 1
    return written


def predict_record(
    model: Drafter, held: Dataset, stretches: Sequence[tuple[int, Stretch]], draft_tokens: int
) -> RecordPredictions:
    """Predict one record.

    Args:
        model: The drafter.
        held: Where to read.
        stretches: The record's stretches with their numbers in ``held``, in order.
        draft_tokens: Draft positions.

    Raises:
        InputError: The record cannot be read.
    """
    device = model.d2t.device
    first = stretches[0][1].start + 2
    length = stretches[-1][1].stop + 2 - first
    correct = [[None] * length for _ in range(draft_tokens)]
    probability = [[None] * length for _ in range(draft_tokens)]
    rank = [[None] * length for _ in range(draft_tokens)]
    name = ""
    for number, _ in stretches:
        batch = held.load([number]).to(device)
        name = batch.record_ids[0]
        at = (batch.positions[batch.rows] + 2 - first).tolist()
        for k, rows, right, given, place in predict(model, batch, draft_tokens):
            for row, *values in zip(rows, right, given, place, strict=True):
                i = at[row]
                correct[k][i], probability[k][i], rank[k][i] = values
    steps = (StepPrediction(*lists) for lists in zip(correct, probability, rank, strict=True))
    digest = token_digest(held.store[stretches[0][1].record].token_ids)
    return RecordPredictions(name, digest, first, tuple(steps))


@torch.no_grad()
def predict(
    model: Drafter, batch: Batch, draft_tokens: int
) -> Iterator[tuple[int, list[int], list[int], list[float], list[int | None]]]:
    """Judge every draft that a server would make in a batch.

    The first token of an answer comes from the prefill, so no chain starts before it.

    Yields:
        Draft position from 0; then, a judged token an entry: supervised row that stands for it, 1 or 0 for
        right or wrong, probability given to it, and its rank (None: not in the draft vocabulary).
    """
    to_draft = torch.full((model.config.vocab_size,), -1, dtype=torch.int64, device=model.d2t.device)
    own = torch.arange(len(model.d2t), device=model.d2t.device)
    to_draft[model.target_ids(own)] = own
    wanted = to_draft[batch.labels]
    starts_chain = torch.from_numpy(~begins_run(batch)).to(own.device)
    for step in model.chains(batch, draft_tokens):
        told = starts_chain[step.rows]
        rows = step.teacher_rows[told]
        correct, probability, rank = judge(model, step.hidden[told], wanted[rows])
        places = [None if r == 0 else r for r in rank.tolist()]
        yield step.index, rows.tolist(), correct.int().tolist(), probability.tolist(), places


def begins_run(batch: Batch) -> np.ndarray:
    """Which supervised rows have no supervised row right before them in their document, bool ``[N]``."""
    out = np.ones(batch.num_supervised, bool)
    out[1:] = (batch.run_left[:-1] == 0).cpu().numpy()
    return out


def judge(model: Drafter, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the head's answer with one token a row; the logits are held for some rows at a time.

    Args:
        model: Its head is used.
        hidden: States before the head ``[n, H]``.
        wanted: Draft id of the token ``[n]``; -1 where the draft vocabulary lacks it.

    Returns:
        ``(greedy choice is it [n] bool, its probability [n] float32, its rank [n] int64, 0 unknown)``.
    """
    head = model.lm_head.weight.to(hidden.dtype)
    size = chunk_rows(len(head), head.device)
    parts = []
    for states, ids in zip(hidden.split(size), wanted.split(size), strict=True):
        logits = (states @ head.T).float()
        known = ids >= 0
        said = logits.gather(1, ids.clamp(min=0)[:, None])
        correct = logits.argmax(-1) == ids
        probability = (said - logits.logsumexp(-1, keepdim=True)).exp()[:, 0]
        better = (logits > said).sum(-1)
        # Of equal logits the greedy choice takes one; the others come after it.
        rank = torch.where(correct, 1, (better + 1).clamp(min=2))
        parts.append((correct, probability * known, rank * known))
    if not parts:
        empty = torch.zeros(0, device=hidden.device)
        return empty.bool(), empty, empty.long()
    correct, probability, rank = (torch.cat(values) for values in zip(*parts, strict=True))
    return correct, probability, rank
