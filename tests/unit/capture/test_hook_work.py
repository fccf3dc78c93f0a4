"""The hook's work in Python does not grow with the rows of a step.

Counted in calls and in operations of the interpreter: unlike times, a busy machine does not move them.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.fake_engine import NUM_AUX, FakeRunner, make_tap, new_request, schedule

HIDDEN = 16
MAX_ROWS = 4096


class Steps:
    """A tap with ``num_requests`` running ones, every ``skip``-th not captured."""

    def __init__(self, folder: Any, runner: str, num_requests: int, skip: int = 0) -> None:
        limits = {"max_rows": MAX_ROWS, "max_requests": 512, "max_columns": 8, "max_model_len": 1 << 16}
        self.tap = make_tap(folder, hidden_size=HIDDEN, limits=limits)
        self.runner = FakeRunner(runner, HIDDEN)
        self.ids = [f"r{i}" for i in range(num_requests)]
        extra = [{"specdec_tap": 0} if skip and i % skip == 0 else None for i in range(num_requests)]
        new = [new_request(name, [1] * 8192, extra_args=e) for name, e in zip(self.ids, extra, strict=True)]
        self.tap.on_schedule(schedule(new))
        self.first = 0

    def work(self, rows_each: int, columns: int = 1) -> Counter[str]:
        """Both hooks on one step of so many rows a request: functions called, operations of each function."""
        number = len(self.ids)
        step = self.runner.step(
            list(self.ids), [rows_each] * number, [self.first] * number, [1] * rows_each * number,
            [[1] * columns] * number, torch.zeros(NUM_AUX + 1, rows_each * number, HIDDEN).bfloat16(),
            unfinished=[True] * number,
        )  # fmt: skip
        self.first += rows_each
        nothing_new = schedule()
        found: Counter[str] = Counter()

        def count(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                found[f"call of {frame.f_code.co_qualname}"] += 1
            elif event == "c_call":
                found[f"call of {getattr(arg, '__qualname__', arg)}"] += 1

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            found[frame.f_code.co_qualname] += event == "opcode"
            return trace

        tap, counters = self.tap, self.tap.ring.worker
        number_before = counters.get("steps")
        pump, tap.channel.pump = tap.channel.pump, lambda: None  # when the socket takes messages is chance
        sys.setprofile(count)
        sys.settrace(trace)
        try:
            tap.on_schedule(nothing_new)
            tap.on_step(step)
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            tap.channel.pump = pump
        pump()
        assert (counters.get("steps"), counters.get("hook_errors")) == (number_before + 1, 0)
        return found


@pytest.fixture
def steps(tmp_path):
    made = []

    def make(*args: Any, **kwargs: Any) -> Steps:
        made.append(Steps(tmp_path / f"shards{len(made)}", *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.tap.active = False
        one.tap.channel.close()


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("skip", [0, 4], ids=["all captured", "some not captured"])
def test_work_does_not_grow_with_rows(steps, runner, skip):
    """Eight requests with 8 and with 128 rows each: 64 rows and 1,024."""
    some = steps(runner, 8, skip)
    some.work(8)  # the first step of a batch looks the requests up
    few, many = some.work(8), some.work(128)
    assert sum(few.values()) > 100
    assert many == few


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_work_does_not_grow_with_drafts(steps, runner):
    some = steps(runner, 8)
    some.work(1)
    assert some.work(8, columns=8) == some.work(1)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_decode_step_of_256_requests_is_as_much_work_as_one_of_8(steps, runner):
    """While the batch stays the same; a request that comes or goes costs a look-up of each, once."""
    counts = []
    for number in (8, 256):
        some = steps(runner, number)
        some.work(1)
        counts.append(some.work(1))
    assert counts[0] == counts[1]


def test_a_loop_over_rows_would_be_seen(steps, monkeypatch):
    from specdec_tap.vllm_plugin import staging

    some = steps("v1", 8)
    gather = staging.gather_states

    def slow(*args: Any) -> None:
        kept = [row for row in range(args[0].layout.num_rows) if row >= 0]
        gather(*args)
        assert kept

    monkeypatch.setattr(staging, "gather_states", slow)
    some.work(8)
    assert sum(some.work(128).values()) > sum(some.work(8).values()) + 960
