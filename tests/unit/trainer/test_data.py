"""Which rows train, in which order, and on which side of the split."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_trainer import data
from specdec_trainer.batch import pack, run_left
from specdec_trainer.run import check_supervised
from trainer_fakes import FakeRecord, FakeStore, random_record

from specdec_tap.errors import InputError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def weights(record) -> list[int]:
    return np.flatnonzero(data.row_weights(record, 0.0)[0]).tolist()


def test_supervised_rows_of_a_ten_token_sample() -> None:
    """B58: the answer is tokens 4..8; row t predicts token t+2, so rows 2..6 carry loss at step 0."""
    record = FakeRecord(
        range(10), [(0, 4, "prompt"), (4, 9, "response")], np.zeros((9, 3, 8)), np.zeros((9, 8))
    )
    assert weights(record) == [2, 3, 4, 5, 6]
    document = data.load_document(FakeStore([record]), data.Stretch(0, 0, 9, 5))
    batch = pack([document])
    # Step k: chains 2..6-k, reading token t+k+1, compared with the token after it.
    assert batch.run_left.tolist() == [4, 3, 2, 1, 0]
    assert batch.tokens[batch.rows].tolist() == [3, 4, 5, 6, 7]
    assert batch.labels.tolist() == [4, 5, 6, 7, 8]


def test_answer_at_position_0_and_answer_at_the_end() -> None:
    """B58: no row can predict tokens 0 and 1; the last token is predicted by row T-3."""
    start = FakeRecord(
        range(6), [(0, 3, "response"), (3, 6, "prompt")], np.zeros((5, 3, 8)), np.zeros((5, 8))
    )
    assert weights(start) == [0]
    end = FakeRecord(range(6), [(0, 3, "prompt"), (3, 6, "response")], np.zeros((5, 3, 8)), np.zeros((5, 8)))
    assert weights(end) == [1, 2, 3]


def test_shortest_records() -> None:
    for tokens in (1, 2, 3):
        record = random_record(rng(), 0, tokens)
        assert weights(record) == ([0] if tokens == 3 else [])


def test_gap_rows_are_no_input_and_split_the_document() -> None:
    record = random_record(rng(), 4, 10, gaps=[(0, 3), (7, 9)])
    survey = data.survey(FakeStore([record]), [0], vocab_size=23, max_length=100)
    # Rows 3..6 and 9..12; rows 7 and 8 are missing, so nothing after them in the first stretch.
    assert [(s.start, s.stop, s.supervised) for s in survey.stretches] == [(3, 7, 4), (9, 13, 3)]
    assert survey.generated == 10
    assert survey.supervised == 7
    assert survey.skipped["after rows that were not captured"] == 3


def test_long_documents_are_split_and_keep_their_positions() -> None:
    record = random_record(rng(), 2, 20)
    store = FakeStore([record])
    survey = data.survey(store, [0], vocab_size=23, max_length=8)
    assert [(s.start, s.stop) for s in survey.stretches] == [(0, 8), (8, 16), (16, 21)]
    assert survey.supervised == 20
    batch = pack([data.load_document(store, s) for s in survey.stretches])
    assert batch.positions.tolist() == list(range(21))
    assert batch.starts.tolist() == [0, 8, 16]


def test_states_and_teachers_of_a_document_are_those_of_their_positions() -> None:
    record = random_record(rng(1), 3, 7, gaps=[(0, 2)])
    store = FakeStore([record])
    (stretch,) = data.survey(store, [0], vocab_size=23, max_length=100).stretches
    document = data.load_document(store, stretch)
    np.testing.assert_array_equal(document.aux.numpy(), record._aux[2:9])
    np.testing.assert_array_equal(document.tokens, record.token_ids[3:10])
    rows = np.flatnonzero(document.weight)
    np.testing.assert_array_equal(document.final.numpy(), record._final[2 + rows + 1])
    np.testing.assert_array_equal(document.labels[rows], record.token_ids[2 + rows + 2])
    assert document.first_position == 2


def test_no_supervised_token_stops_with_counts() -> None:
    """B57: nothing to learn is an error before step 1, and says where the tokens went."""
    store = FakeStore([random_record(rng(), 4, 6, final_span=[]), random_record(rng(), 5, 0)])
    survey = data.survey(store, [0, 1], vocab_size=23, max_length=100)
    with pytest.raises(InputError, match=r"0 supervised tokens.*2 records, 15 tokens, 6 of them generated.*"
                                         r"6 without the target's final state"):  # fmt: skip
        check_supervised(survey)


def test_few_supervised_tokens_are_warned_of_with_numbers() -> None:
    """B57: under 2 % the run goes on, and says so."""
    said: list[str] = []
    for prompt, response in ((990, 10), (97, 3)):
        store = FakeStore([random_record(rng(), prompt, response)])
        check_supervised(data.survey(store, [0], vocab_size=23, max_length=5000), said.append)
    assert len(said) == 1
    assert said[0].startswith("warning: only 10 of 1,000 tokens (1.00%) are supervised; below 2 %")


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    record = random_record(rng(), 2, 5)
    record.token_ids[3] = 99
    survey = data.survey(FakeStore([record]), [0], vocab_size=23, max_length=100)
    assert survey.skipped["outside the target's vocabulary"] == 5
    assert not survey.stretches


def test_prompt_tokens_can_be_trained_without_teacher() -> None:
    record = random_record(rng(), 6, 4)
    weight, has_final, _ = data.row_weights(record, 0.25)
    assert weight.tolist() == [0.25, 0.25, 0.25, 0.25, 1, 1, 1, 1, 0]
    assert has_final.tolist() == [False] * 4 + [True] * 4 + [False]


def test_states_that_are_not_finite_name_the_record() -> None:
    good, bad = random_record(rng(0), 3, 6, id="s/1/0"), random_record(rng(1), 3, 6, id="s/1/7")
    bad._aux[4, 1, 2] = np.nan
    store = FakeStore([good, bad])
    survey = data.survey(store, [0, 1], vocab_size=23, max_length=100)
    with pytest.raises(InputError, match=r"record s/1/7 holds aux states that are not finite"):
        data.load_document(store, survey.stretches[1])
    dataset = data.Dataset(store, survey)
    assert dataset.load([0, 1]).record_ids == ("s/1/0",)
    assert sum(dataset.bad_records.values()) == 1
    assert dataset.load([1]).record_ids == ("s/1/0",)  # another process trains this step too
    assert [batch.record_ids for batch in dataset.spread_out()] == [("s/1/0",)]
    good._aux[4, 1, 2] = np.nan
    with pytest.raises(InputError, match=r"none of the 1 records of a batch can be read"):
        dataset.load([1])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 64), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_document_once(lengths: list[int], batch_tokens: int, epoch: int) -> None:
    documents = [data.Stretch(i, 0, n, 1) for i, n in enumerate(lengths)]
    batches = data.epoch_batches(documents, batch_tokens=batch_tokens, seed=3, epoch=epoch)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= batch_tokens for b in batches)
    assert batches == data.epoch_batches(documents, batch_tokens=batch_tokens, seed=3, epoch=epoch)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_run_left_counts_successors(mask: list[bool], lengths: list[int]) -> None:
    document = np.repeat(np.arange(len(lengths)), lengths)
    mask = (mask * len(document))[: len(document)]
    rows = np.flatnonzero(mask)
    expected = []
    for row in rows:
        n = 0
        while row + n + 1 < len(mask) and mask[row + n + 1] and document[row + n + 1] == document[row]:
            n += 1
        expected.append(n)
    assert run_left(rows, document[rows]).tolist() == expected


def test_split_is_by_conversation_and_stable() -> None:
    """B59: turns and repeats of one conversation share a side; new records move no old one."""
    g = rng(5)
    store = FakeStore()
    for i in range(60):
        first = random_record(g, 5, 6, id=f"s/1/{2 * i}")
        turn = FakeRecord(
            np.concatenate((first.token_ids, g.integers(0, 23, 8))),
            [(0, 5, "prompt"), (5, 11, "response"), (11, 15, "prompt"), (15, 19, "response")],
            np.zeros((18, 3, 8)), np.zeros((18, 8)), id=f"s/1/{2 * i + 1}",
        )  # fmt: skip
        store += [first, turn]
    training, held = data.split(store, 0.3)
    assert sorted(training + held) == list(range(120))
    assert {i // 2 for i in training}.isdisjoint({i // 2 for i in held})
    earlier = data.split(FakeStore(store[:80]), 0.3)
    assert [i for i in training if i < 80] == earlier[0]
    assert 10 < len(held) < 70


def test_split_of_few_records_leaves_neither_side_empty() -> None:
    store = FakeStore([random_record(rng(i), 4, 4) for i in range(3)])
    for fraction in (0.001, 0.999):
        training, held = data.split(store, fraction)
        assert training
        assert held
    assert data.split(store, 0.0) == ([0, 1, 2], [])


def test_prefetcher_passes_errors_on_and_can_be_closed() -> None:
    def make(i: int) -> int:
        if i == 2:
            raise InputError("damaged")
        return i

    seen = []
    with pytest.raises(InputError, match="damaged"):
        for item in data.Prefetcher(make, [0, 1, 2, 3]):
            seen.append(item)
    assert seen == [0, 1]
    endless = data.Prefetcher(lambda i: i, range(10**6), depth=1)
    next(iter(endless))
    endless.close()
    assert not endless._feeder.is_alive()


def test_several_workers_decode_at_a_time_and_keep_the_order() -> None:
    together = threading.Barrier(3)  # passes only when three batches are decoded at once

    def make(i: int) -> int:
        together.wait(20)
        return i

    prefetcher = data.Prefetcher(make, range(6), workers=3)
    assert list(prefetcher) == [0, 1, 2, 3, 4, 5]
    prefetcher.close()


def test_greedy_tokens_are_remembered_by_document() -> None:
    store = FakeStore([random_record(rng(i), 3, 5 + i) for i in range(4)])
    survey = data.survey(store, range(4), vocab_size=23, max_length=100)
    dataset = data.Dataset(store, survey)
    batch = dataset.load([2, 0, 3])
    values = torch.arange(len(batch.taught))
    batch.notes["greedy"] = values
    dataset.remember(batch)
    assert torch.equal(dataset.load([2, 0, 3]).greedy, values)
    assert dataset.load([0]).greedy.tolist() == values[7 : 7 + 5].tolist()
    assert dataset.load([0, 1]).greedy is None


def test_centroids_are_remembered_while_they_fit() -> None:
    """The second pass uses the first one's teacher, and gives the same loss."""
    from specdec_trainer.objective import Eagle3Objective
    from trainer_fakes import make_parts

    parts = make_parts(dtype=torch.float32)
    parts.model.lm_head.weight.requires_grad_(False)
    store = FakeStore([random_record(rng(i), 3, 5 + i) for i in range(4)])
    survey = data.survey(store, range(4), vocab_size=23, max_length=100)
    dataset = data.Dataset(store, survey, cache_bytes=(7 + 5) * 8 * 4)
    objective = Eagle3Objective(parts.model, parts.teacher, steps=2)
    first = dataset.load([2, 0, 3])
    loss = objective.loss(first).total
    dataset.remember(first)
    assert set(dataset.centroid) == {2, 0}
    assert dataset.cache_bytes == 0
    assert dataset.load([2, 3]).centroid is None
    cached = dataset.load([2, 0])
    assert cached.centroid is not None
    apart = objective.loss(cached).total + objective.loss(dataset.load([3])).total
    torch.testing.assert_close(apart, loss)


def test_records_that_lost_a_part_with_a_removed_shard_teach_nothing() -> None:
    store = FakeStore([random_record(rng(), 4, 8), random_record(rng(), 4, 8)])
    whole = data.survey(store, [0, 1], vocab_size=23, max_length=1000)
    store[0].removed_rows = 4
    rest = data.survey(store, [0, 1], vocab_size=23, max_length=1000)
    assert {s.record for s in whole.stretches} == {0, 1} and {s.record for s in rest.stretches} == {1}
    lost = int(data.generated_mask(store[0]).sum())
    assert rest.skipped["in records that lost a part with a removed shard"] == lost > 0
