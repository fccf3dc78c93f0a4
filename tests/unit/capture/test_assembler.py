"""Whatever the engine does, a sealed record holds what one unbroken prefill of its tokens would give."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from capture_sim import HIDDEN, NUM_AUX, VOCAB, Engine, Knobs, ListSink, SimRequest, check_record, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_tap.capture.assembler import Assembler, NewRequest
from specdec_tap.shards.layout import bits_dtype
from specdec_tap.shards.records import decode_record, encode_record

OUTCOMES = ("requests_sealed", "skipped_", "dropped_")


class Run:
    """One simulated engine over one assembler, run to its end."""

    def __init__(self, seed: int, knobs: Knobs, *, num_requests: int = 6, **settings: object) -> None:
        self.counts: Counter[str] = Counter()
        self.sink = ListSink()
        settings = {"block_tokens": 16, "granule": min(16, knobs.block_size)} | settings
        self.assembler = Assembler(
            self.sink,
            num_layers=NUM_AUX + 1,
            hidden_size=HIDDEN,
            dtype="bfloat16",
            count=lambda name, n: self.counts.update({name: n}),
            **settings,
        )
        rng = random.Random(seed)
        self.engine = Engine(self.assembler, rng, knobs)
        shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(8, 60))] for _ in range(2)]
        for _ in range(num_requests):
            prompt = rng.choice(shared) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
            self.engine.add(
                tokens=prompt,
                prompt_len=len(prompt),
                max_tokens=rng.randint(1, 40),
                stops=frozenset(rng.sample(range(VOCAB), rng.randint(0, 1))),
                seed=rng.randrange(2),
                lora=rng.choice([None, None, "a"]),
            )
        self.engine.run()

    def record(self, request: SimRequest):
        found = [r for r in self.sink.records if r.request_id == str(request.handle)]
        assert len(found) <= 1
        return found[0] if found else None

    def check(self, *, final_scope: str = "response") -> None:
        engine, counts = self.engine, self.counts
        dropped = {r.handle for r in engine.requests if r.dropped or not r.handle}
        for request in engine.requests:
            record = self.record(request)
            if request.handle in dropped:
                assert record is None
                continue
            response = len(request.tokens) - request.prompt_len
            if record is None:
                assert request.reason == "abort" and response == 0
                continue
            tokens = record.token_ids.tolist()
            if request.reason == "abort":  # a token that the engine had not yet taken may be there too
                assert tokens[: len(request.tokens)] == request.tokens
            else:
                assert tokens == request.tokens
                assert record.finish_reason == request.reason
            aux_at, final_at = check_record(record, self.sink, request.lora)
            gaps = set(range(len(tokens) - 1)) - aux_at
            # A gap is explicit, and only where the cache served rows that nobody kept.
            assert all(request.hits.get(p, set()) & dropped for p in gaps)
            first = request.prompt_len - 1 if final_scope == "response" else 0
            hit = set(request.hits)
            assert final_at >= set(range(first, len(tokens) - 1)) - hit - gaps
            assert [(s.start, s.stop, s.kind) for s in record.spans] == [
                (0, request.prompt_len, "prompt"),
                (request.prompt_len, len(tokens), "response"),
            ]
        ended = sum(n for name, n in counts.items() if name.startswith(OUTCOMES))
        assert engine.counts["announced"] == ended + engine.counts["dropped_by_worker"]
        assert counts["dropped_internal"] == counts["dropped_misaligned"] == 0
        assert counts["gap_rows"] == sum(r.num_tokens - 1 - r.covered_rows for r in self.sink.records)
        assert counts["rows_stored"] + counts["rows_reused"] == sum(r.covered_rows for r in self.sink.records)
        assert self.assembler.num_live == 0


KNOBS = st.builds(
    Knobs,
    block_size=st.sampled_from([8, 16, 32]),
    budget=st.integers(4, 120),
    max_running=st.integers(1, 6),
    max_drafts=st.integers(0, 4),
    asynchronous=st.booleans(),
    counted=st.booleans(),
    cache=st.booleans(),
    preempt=st.sampled_from([0.0, 0.1, 0.3]),
    discard=st.sampled_from([0.0, 0.1, 0.3]),
    abort=st.sampled_from([0.0, 0.05]),
    drop=st.sampled_from([0.0, 0.05]),
    evict=st.sampled_from([0.0, 0.2]),
    uncaptured=st.sampled_from([0.0, 0.3]),
)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(seed=st.integers(0, 1 << 32), knobs=KNOBS, block_tokens=st.sampled_from([8, 16, 24, 64]))
def test_any_order_of_events_gives_the_rows_of_one_unbroken_prefill(seed, knobs, block_tokens):
    Run(seed, knobs, block_tokens=block_tokens).check()


@MANY
@given(seed=st.integers(0, 1 << 32), knobs=KNOBS)
def test_every_position_keeps_its_final_state_when_asked(seed, knobs):
    Run(seed, knobs, final_scope="all").check(final_scope="all")


# -- single cases, each with the fault that it would show -------------------------------------------------


class Direct:
    """Feeds an assembler by hand, one request a step."""

    def __init__(self, **settings: object) -> None:
        self.counts: Counter[str] = Counter()
        self.sink = ListSink()
        settings = {"block_tokens": 16, "dtype": "bfloat16"} | settings
        self.assembler = Assembler(
            self.sink,
            num_layers=NUM_AUX + 1,
            hidden_size=HIDDEN,
            count=lambda name, n: self.counts.update({name: n}),
            **settings,
        )

    def new(self, handle: int, prompt: list[int], **fields: object) -> None:
        self.assembler.on_new(
            NewRequest(
                handle=handle, request_id=f"r{handle}", prompt_token_ids=np.array(prompt, np.int32), **fields
            )
        )

    def step(self, handle: int, tokens: list[int], first: int, sampled: list[int], **faults: object) -> None:
        """Feed ``tokens[first:]``; the rows are those of the whole list."""
        states = rows_of(tokens, None)[:, first:]
        if "bad_row" in faults:
            states[:, faults["bad_row"]] = 0x7FC0  # NaN
        fed = np.array(tokens[first:], np.int32)
        if "wrong_token" in faults:
            fed[faults["wrong_token"]] += 1
        self.assembler.on_step(
            np.array([handle], np.uint64),
            np.array([0, len(fed)], np.int32),
            np.arange(first + faults.get("shift", 0), len(tokens) + faults.get("shift", 0)),
            fed,
            states,
            np.array([[*sampled, -1, -1]], np.int32),
            np.array([len(sampled)], np.int32),
        )

    def one(self, handle: int, prompt: list[int], response: list[int], first: int = 0) -> None:
        """A whole request: prefill from ``first``, then one token a step."""
        self.new(handle, prompt, max_response_tokens=len(response))
        tokens = prompt
        self.step(handle, tokens, first, response[:1])
        for i in range(1, len(response)):
            tokens = [*prompt, *response[:i]]
            self.step(handle, tokens, len(tokens) - 1, response[i : i + 1])
        self.assembler.on_finish(handle)

    @property
    def last(self):
        return self.sink.records[-1]


PROMPT = [1, 2, 3, 4] * 10


def test_a_lone_request_keeps_aux_everywhere_and_final_where_it_trains_a_response():
    run = Direct()
    run.one(1, PROMPT, [0, 1, 2])
    aux_at, final_at = check_record(run.last, run.sink, None)
    assert run.last.token_ids.tolist() == [*PROMPT, 0, 1, 2]
    assert aux_at == set(range(42))
    assert final_at == {39, 40, 41}
    assert run.last.finish_reason == "length"


def test_a_prefix_cache_hit_points_at_the_earlier_requests_blocks():
    run = Direct()
    run.one(1, PROMPT, [0, 1])
    blocks = len(run.sink.blocks)
    run.one(2, [*PROMPT[:32], 0, 0, 0], [1, 1], first=32)
    aux_at, _ = check_record(run.last, run.sink, None)
    assert aux_at == set(range(36))
    assert len(run.sink.blocks) == blocks + 1
    assert run.counts["rows_reused"] == 32
    assert run.counts["gap_rows"] == 0


def test_an_unknown_prefix_is_an_explicit_gap():
    run = Direct()
    run.one(1, PROMPT, [0, 1], first=32)
    aux_at, _ = check_record(run.last, run.sink, None)
    assert aux_at == set(range(32, 41))
    assert run.counts["gap_rows"] == 32


def test_rows_of_a_running_request_can_be_shared_and_survive_its_drop():
    run = Direct(block_tokens=64)
    run.new(1, PROMPT)
    run.step(1, PROMPT, 0, [0])
    run.new(2, [*PROMPT[:32], 0])
    run.step(2, [*PROMPT[:32], 0], 32, [1])
    run.assembler.drop(1, None)
    run.assembler.on_finish(2)
    aux_at, _ = check_record(run.last, run.sink, None)
    assert aux_at == set(range(33))


def test_a_request_that_has_its_last_token_is_not_given_up():
    """The engine reports its end one step later; new weights or a full ring in between cost it nothing."""
    run = Direct()
    for handle, most in ((1, 1), (2, 5)):
        run.new(handle, PROMPT, max_response_tokens=most)
        run.step(handle, PROMPT, 0, [0])
    for handle in (1, 2):
        run.assembler.give_up(handle, "dropped_weights_changed")
    assert [record.token_ids.tolist() for record in run.sink.records] == [[*PROMPT, 0]]
    assert run.last.finish_reason == "length"
    assert run.counts["requests_sealed"] == run.counts["dropped_weights_changed"] == 1


def test_a_clock_that_jumps_back_costs_nothing(monkeypatch):
    clock = iter([2e9, 5.0])
    monkeypatch.setattr("specdec_tap.capture.assembler.time.time", lambda: next(clock))
    run = Direct()
    run.one(1, PROMPT, [0])
    assert (run.last.started_unix_s, run.last.finished_unix_s) == (2e9, 5.0)
    assert decode_record(encode_record(run.last)).finished_unix_s == 5.0


def test_accepted_drafts_after_the_stop_token_are_not_kept():
    run = Direct(block_tokens=8)
    run.new(1, PROMPT[:6], stop_token_ids=frozenset({0}))
    run.step(1, [*PROMPT[:6], 0, 1], 0, [0, 1])  # two drafts were fed, the first is the stop token
    run.assembler.on_finish(1)
    assert run.last.token_ids.tolist() == [*PROMPT[:6], 0]
    assert [len(aux[0]) for _, aux, *_ in run.sink.blocks.values()] == [6]


def test_a_token_that_the_engine_took_back_leaves_no_trace_in_anybodys_record():
    """Its row completed a granule of the index, and the row that replaced it went into the same buffer."""
    run = Direct(block_tokens=64)
    prompt, x, y = PROMPT[:15], 0, 1
    run.one(1, [*prompt, x], [2])  # an earlier request whose cached block really holds x
    run.new(2, prompt)
    run.step(2, prompt, 0, [x])
    run.step(2, [*prompt, x], 15, [3])
    run.step(2, prompt, 0, [y])  # x and 3 were taken back
    run.step(2, [*prompt, y], 15, [4])
    run.one(3, [*prompt, x, 2, 2], [0], first=16)
    check_record(run.last, run.sink, None)
    run.one(4, [*prompt, y, 2, 2], [0], first=16)
    aux_at, _ = check_record(run.last, run.sink, None)
    assert aux_at == set(range(18))
    run.assembler.on_finish(2)
    assert run.last.token_ids.tolist() == [*prompt, y, 4]
    check_record(run.last, run.sink, None)


def test_adapters_never_share_blocks():
    run = Direct()
    run.one(1, PROMPT, [0, 1])
    run.new(2, PROMPT, lora="other", salt=b"other")
    run.step(2, PROMPT, 32, [0])
    run.assembler.on_finish(2)
    assert run.last.lora == "other"
    assert {piece.position for piece in run.last.pieces} == {32}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"bad_row": 3}, "dropped_non_finite"),
        ({"wrong_token": 3}, "dropped_misaligned"),
        ({"shift": 1000}, "dropped_misaligned"),
    ],
)
def test_bad_rows_cost_the_request_and_are_counted(fault, reason):
    run = Direct()
    run.new(1, PROMPT)
    run.step(1, PROMPT, 0, [0], **fault)
    run.assembler.on_finish(1)
    assert not run.sink.records
    assert run.counts == {reason: 1}


@pytest.mark.parametrize(
    ("dtype", "infinity"), [("bfloat16", 0x7F80), ("float16", 0x7C00), ("float32", 0x7F800000)]
)
def test_infinity_is_seen_in_every_dtype_and_the_largest_number_is_not_one(dtype, infinity):
    run = Direct(dtype=dtype)
    for handle, value in ((1, infinity), (2, infinity - 1)):
        run.new(handle, [1])
        rows = np.full((NUM_AUX + 1, 1, HIDDEN), value, bits_dtype(dtype))
        ids, at = np.array([[0]], np.int32), np.array([0, 1], np.int32)
        run.assembler.on_step(
            np.array([handle], np.uint64), at, at[:1].astype(np.int64), ids[0] + 1, rows, ids, at[1:]
        )
        run.assembler.on_finish(handle)
    assert run.counts["dropped_non_finite"] == 1
    assert run.last.request_id == "r2"


def test_a_failing_disk_costs_requests_and_it_recovers():
    run = Direct()
    run.sink.fail = True
    run.one(1, PROMPT, [0, 1])
    run.sink.fail = False
    run.one(2, PROMPT, [0, 1])
    assert run.counts["dropped_io_error"] == 1
    assert run.counts["requests_sealed"] == 1
    assert check_record(run.last, run.sink, None)[0] == set(range(41))


def test_the_window_keeps_prompt_aux_and_only_the_wanted_response_positions():
    run = Direct(response_window=(1, 3))
    run.one(1, PROMPT, [0, 1, 2, 3, 4])
    aux_at, final_at = check_record(run.last, run.sink, None)
    assert run.last.token_ids.tolist() == [*PROMPT, 0, 1, 2]
    assert aux_at == set(range(42))
    assert final_at == {40, 41}


def test_no_final_state_is_kept_when_none_is_wanted():
    run = Direct(final_scope="none")
    run.one(1, PROMPT, [0, 1])
    assert check_record(run.last, run.sink, None)[1] == set()


def test_lengths_outside_the_limits_are_skipped():
    run = Direct(min_tokens=10, max_tokens=20)
    run.one(1, PROMPT[:4], [0])
    run.one(2, PROMPT, [0])
    run.one(3, PROMPT[:12], [0])
    assert run.counts["skipped_length"] == 2
    assert [record.request_id for record in run.sink.records] == ["r3"]


def test_a_request_without_a_response_token_is_skipped_and_its_rows_still_serve_others():
    run = Direct()
    run.new(1, PROMPT)
    run.step(1, PROMPT[:32], 0, [])
    run.assembler.on_finish(1)
    assert run.counts == {"skipped_empty": 1}
    run.one(2, [*PROMPT[:16], 0], [1, 1], first=16)
    assert check_record(run.last, run.sink, None)[0] == set(range(18))


def test_the_end_of_the_worker_seals_what_is_held_as_interrupted():
    run = Direct()
    run.new(1, PROMPT)
    run.step(1, PROMPT, 0, [0])
    run.assembler.on_end()
    assert run.last.finish_reason == "interrupted"
    assert check_record(run.last, run.sink, None)[0] == set(range(40))


def test_the_prefix_index_is_bounded_and_never_forgets_a_running_request():
    run = Direct(max_index_tokens=64)  # four granules
    run.new(1, PROMPT)
    run.step(1, PROMPT, 0, [0])
    for handle in range(2, 12):
        run.one(handle, [handle % VOCAB, handle // VOCAB, *PROMPT[:30]], [0, 1])
        assert run.assembler.num_granules <= 4 + 2
    run.one(20, [*PROMPT[:32], 4], [1], first=32)
    assert run.counts["gap_rows"] == 0
    run.assembler.on_finish(1)
    assert run.assembler.num_granules <= 4


def test_blocks_of_a_removed_shard_become_gaps():
    run = Direct()
    run.one(1, PROMPT, [0, 1])
    run.assembler.forget_shard(1)
    run.one(2, [*PROMPT[:32], 0, 0, 0], [1, 1], first=32)
    assert run.counts["gap_rows"] == 32


def test_buffers_are_used_again():
    run = Direct()
    for handle in range(1, 50):
        run.one(handle, PROMPT[: 1 + handle % 40], [0, 1, 2])
    assert len(run.assembler._spare) == 1


def given_run(tokens: list[int], spans: tuple[tuple[int, int], ...], *, chunk: int = 30, **settings: object):
    """One conversation whose answers are in its prompt, fed in chunks; returns the record and the sink."""
    sink, counts = ListSink(), Counter()
    assembler = Assembler(
        sink, num_layers=NUM_AUX + 1, hidden_size=HIDDEN, dtype="bfloat16",
        count=lambda name, n: counts.update({name: n}), block_tokens=16, **settings,
    )  # fmt: skip
    prompt = np.array(tokens, np.int32)
    assembler.on_new(NewRequest(handle=1, request_id="1", prompt_token_ids=prompt, given_spans=spans))
    states = rows_of(tokens, None)
    for low in range(0, len(tokens), chunk):
        high = min(low + chunk, len(tokens))
        assembler.on_step(
            np.array([1], np.uint64), np.array([0, high - low], np.int32), np.arange(low, high),
            prompt[low:high], states[:, low:high], np.array([[7]], np.int32),
            np.array([int(high == len(tokens))], np.int32),
        )  # fmt: skip
    assembler.on_finish(1)
    return sink.records[0] if sink.records else None, sink, counts


def test_given_answers_become_response_spans_and_the_sampled_token_is_left_out() -> None:
    tokens = list(range(1, 90))
    spans = ((20, 35), (60, 89))
    record, sink, counts = given_run([t % VOCAB for t in tokens], spans)
    assert [(s.start, s.stop, s.kind) for s in record.spans] == [
        (0, 20, "prompt"), (20, 35, "response"), (35, 60, "prompt"), (60, 89, "response"),
    ]  # fmt: skip
    assert record.token_ids.tolist() == [t % VOCAB for t in tokens]
    assert record.flags == ("given_answers",)
    aux, final = check_record(record, sink, None)
    assert aux == set(range(88))
    assert final >= {*range(19, 34), *range(59, 88)}
    assert counts["response_tokens"] == 44


def test_an_interrupted_conversation_with_given_answers_is_not_kept() -> None:
    sink, counts = ListSink(), Counter()
    assembler = Assembler(
        sink, num_layers=NUM_AUX + 1, hidden_size=HIDDEN, dtype="bfloat16",
        count=lambda name, n: counts.update({name: n}),
    )  # fmt: skip
    prompt = np.arange(40, dtype=np.int32) % VOCAB
    assembler.on_new(NewRequest(handle=1, request_id="1", prompt_token_ids=prompt, given_spans=((5, 40),)))
    assembler.on_step(
        np.array([1], np.uint64), np.array([0, 20], np.int32), np.arange(20), prompt[:20],
        rows_of(prompt.tolist(), None)[:, :20], np.array([[-1]], np.int32), np.array([0], np.int32),
    )  # fmt: skip
    assembler.on_end()
    assert not sink.records and counts["skipped_empty"] == 1
