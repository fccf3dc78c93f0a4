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


def draft_size(vocab: int, *, largest: int, full_limit: int) -> int:
    """Draft vocabulary for a target of ``vocab`` tokens: all of them up to ``full_limit``, else
    ``largest``."""
    return vocab if vocab <= full_limit else min(vocab, largest)


def loss_size(counts: np.ndarray, *, smallest: int = 8192) -> int:
    """Rows that the training loss is taken over: room for twice the tokens that were seen, a power of two."""
    seen = int((counts > 0).sum())
    return max(smallest, 1 << max(0, 2 * seen - 1).bit_length())


def mappings(draft_ids: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """``(d2t int64 offsets [V], t2d bool [target vocab])`` of ascending target ids."""
    d2t = draft_ids - np.arange(len(draft_ids), dtype=np.int64)
    t2d = np.zeros(vocab, dtype=bool)
    t2d[draft_ids] = True
    return d2t, t2d
