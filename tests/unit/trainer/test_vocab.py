"""Draft vocabulary and its maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_trainer.vocab import choose_draft_ids, draft_size, loss_size, mappings

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


def test_small_vocabularies_are_drafted_whole_and_large_ones_in_part() -> None:
    assert draft_size(49152, largest=32000, full_limit=65536) == 49152
    assert draft_size(151936, largest=32000, full_limit=65536) == 32000
    assert draft_size(151936, largest=200000, full_limit=65536) == 151936


def test_loss_leaves_room_for_twice_the_tokens_seen() -> None:
    counts = np.zeros(100000, np.int64)
    for seen, size in ((10, 8192), (4096, 8192), (5434, 16384), (20000, 65536)):
        counts[:seen] = 1
        assert loss_size(counts) == size
