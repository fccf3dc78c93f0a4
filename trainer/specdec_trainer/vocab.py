"""The draft vocabulary: which target tokens the drafter can propose, chosen from traffic.

``d2t`` holds offsets (target id = draft id + d2t[draft id]) and ``t2d`` membership, as every engine expects.
"""

from __future__ import annotations

import numpy as np

from specdec_tap.errors import ConfigError


def choose_draft_ids(counts: np.ndarray, size: int, always: list[int] | None = None) -> np.ndarray:
    """The ``size`` most used tokens, ascending.

    Ties, and tokens never seen, go to the lowest ids: byte-pair vocabularies number frequent merges first.

    Args:
        counts: How often each target token was generated, int64 ``[target vocab]``.
        size: Draft vocabulary, 1 to the target's.
        always: Ids that must be in it (end of sequence).

    Raises:
        ConfigError: ``size`` is out of range.
    """
    vocab = len(counts)
    if not 1 <= size <= vocab:
        raise ConfigError(
            f"draft_vocab_size is {size:,} but the target vocabulary has {vocab:,}; choose 1 to {vocab:,}"
        )
    weighted = counts.astype(np.int64, copy=True)
    for token in always or []:
        if 0 <= token < vocab:
            weighted[token] = np.iinfo(np.int64).max
    order = np.argsort(-weighted, kind="stable")
    return np.sort(order[:size]).astype(np.int64)


def automatic_size(counts: np.ndarray, *, smallest: int, largest: int) -> int:
    """A draft vocabulary for this traffic: a power of two with some room beside the tokens that were seen.

    A larger one is worse, not better: rows that training never sees as an answer are guessed too often.

    Args:
        counts: How often each target token was generated, ``[target vocab]``.
        smallest: Lower bound; target vocabularies up to this size are drafted whole.
        largest: Upper bound.
    """
    if len(counts) <= smallest:
        return len(counts)
    seen = int((counts > 0).sum())
    size = 1 << max(0, seen + seen // 4 - 1).bit_length()
    return min(len(counts), max(smallest, min(largest, size)))


def mappings(draft_ids: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """``(d2t int64 offsets [V], t2d bool [target vocab])`` of ascending target ids."""
    d2t = draft_ids - np.arange(len(draft_ids), dtype=np.int64)
    t2d = np.zeros(vocab, dtype=bool)
    t2d[draft_ids] = True
    return d2t, t2d
