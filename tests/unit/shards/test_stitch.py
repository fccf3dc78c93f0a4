"""Turns of one conversation become one sequence."""

from __future__ import annotations

import numpy as np
from shardkit import make_header, write_request

from specdec_tap.shards import ShardWriter, Span, open_shards, stitch


def conversation(tmp_path, turns, header=None):
    """Write turns [(prompt, response)] of one token sequence, each as its own request with its own states."""
    header = header or make_header()
    tokens = np.arange(1000, dtype=np.int32) % 100
    with ShardWriter(tmp_path, header) as writer:
        return [
            write_request(writer, p, r, seed=7 + i, tokens=tokens[: p + r]) for i, (p, r) in enumerate(turns)
        ]


def test_turns_join_with_the_union_of_response_spans(tmp_path):
    written = conversation(tmp_path, [(10, 20), (40, 30), (90, 10)])
    (one,) = stitch(open_shards(tmp_path))
    assert one.num_tokens == 100
    assert one.spans == (
        Span(0, 10, "prompt"),
        Span(10, 30, "response"),
        Span(30, 40, "prompt"),
        Span(40, 70, "response"),
        Span(70, 90, "prompt"),
        Span(90, 100, "response"),
    )
    assert one.gaps == [] and one.final_span == [(9, 29), (39, 69), (89, 99)]
    # Each position comes from the first turn that has it; the states of single records are the truth.
    aux = one.aux()
    assert np.array_equal(aux[:29], written[0][1].transpose(1, 0, 2))
    assert np.array_equal(aux[29:69], written[1][1].transpose(1, 0, 2)[29:])
    assert np.array_equal(aux[69:], written[2][1].transpose(1, 0, 2)[69:])
    for (_, _, final), (start, stop) in zip(written, one.final_span, strict=True):
        assert np.array_equal(one.final(start, stop), final[start:stop])


def test_a_fork_gives_the_shared_turn_to_one_branch_only(tmp_path):
    with ShardWriter(tmp_path, make_header()) as writer:
        shared = np.arange(30, dtype=np.int32)
        write_request(writer, 10, 20, tokens=shared)
        for seed in (1, 2):
            tail = np.full(20, seed, np.int32)
            write_request(writer, 40, 10, seed=seed, tokens=np.concatenate([shared, tail]))
    sequences = list(stitch(open_shards(tmp_path)))
    assert sorted(len(s.records) for s in sequences) == [1, 2]
    responses = sum(s.stop - s.start for q in sequences for s in q.spans if s.kind == "response")
    assert responses == 20 + 10 + 10


def test_unrelated_records_stay_alone(tmp_path):
    with ShardWriter(tmp_path, make_header()) as writer:
        for seed in range(5):
            write_request(writer, 10, 20, seed=seed)
    sequences = list(stitch(open_shards(tmp_path)))
    assert [len(s.records) for s in sequences] == [1] * 5
