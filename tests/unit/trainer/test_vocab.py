"""Draft vocabulary and its maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_trainer.vocab import automatic_size, choose_draft_ids, mappings

from specdec_tap.errors import ConfigError


@given(st.sets(st.integers(0, 99), min_size=1))
def test_maps_follow_the_engines_convention(kept: set[int]) -> None:
    """B64: offsets, ascending, inside the vocabulary; membership agrees."""
    ids = np.array(sorted(kept))
    d2t, t2d = mappings(ids, 100)
    assert d2t.dtype == np.int64
    assert (np.arange(len(ids)) + d2t == ids).all()
    assert np.flatnonzero(t2d).tolist() == sorted(kept)


def test_whole_vocabulary_is_all_zeros() -> None:
    d2t, t2d = mappings(np.arange(50), 50)
    assert not d2t.any()
    assert t2d.all()


def test_most_used_tokens_win_and_ties_go_to_low_ids() -> None:
    counts = np.array([0, 5, 0, 9, 1, 0])
    assert choose_draft_ids(counts, 4).tolist() == [0, 1, 3, 4]
    assert choose_draft_ids(counts, 3, always=[5]).tolist() == [1, 3, 5]


@pytest.mark.parametrize("size", [0, 7])
def test_impossible_sizes_name_the_limit(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"draft_vocab_size is {size} but the target vocabulary has 6"):
        choose_draft_ids(np.zeros(6, np.int64), size)


def test_automatic_size_follows_traffic_between_its_bounds() -> None:
    def size(seen: int, vocab: int) -> int:
        counts = np.zeros(vocab, np.int64)
        counts[:seen] = 1
        return automatic_size(counts, smallest=8192, largest=32000)

    assert size(10, 300) == 300
    assert size(100, 150000) == 8192
    assert size(5434, 49152) == 8192
    assert size(9000, 150000) == 16384
    assert size(90000, 150000) == 32000
