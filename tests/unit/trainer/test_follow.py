"""Training beside a server: a process appends to live journals while this one trains on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_trainer import checkpoint, data, follow, runlog
from specdec_trainer.config import TrainConfig
from specdec_trainer.run import run
from trainer_fakes import FakeStore, learnable_store, tiny_target

from specdec_tap.errors import ConfigError, InputError
from specdec_tap.shards import open_shards

SETTINGS = {
    "batch_tokens": 90, "ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32", "held_out": 0.2,
    "log_steps": 1, "eval_steps": 3, "eval_records": 4, "follow_start": 200, "follow_idle": 4.0,
}  # fmt: skip

WRITER = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from shard_feed import append_records
append_records(Path({out!r}), Path({target!r}), first={first}, count={count}, pause_s={pause_s})
"""


def writer(out: Path, target: Path, *, first: int = 0, count: int, pause_s: float) -> subprocess.Popen:
    """A process that captures ``count`` records, one every ``pause_s`` seconds."""
    code = WRITER.format(
        paths=[str(Path(__file__).parent)], out=str(out), target=str(target), first=first, count=count,
        pause_s=pause_s,
    )  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    return tmp_path / "shards"


def go(shards: Path, target: Path, out: Path, *, resume: bool = False, **changes):
    config = TrainConfig(**{**SETTINGS, **changes})
    return run(
        config, shards, out=out, target_path=target, live=True, resume=resume, tensorboard=False
    )  # fmt: skip


def lines(out: Path, kind: str) -> list[dict]:
    return [x for x in runlog.read_log(out) if x["kind"] == kind]


def rows_by_side(shards: Path) -> tuple[int, int]:
    """``(rows to train on, held-out records)`` of finished shards."""
    store = open_shards(shards)
    training, held = data.split(store, SETTINGS["held_out"])
    return sum(store[i].num_rows for i in training), len(held)


def test_trains_on_every_record_once_while_they_are_written(
    shards: Path, target: Path, tmp_path: Path
) -> None:
    process = writer(shards, target, count=60, pause_s=0.1)
    try:
        follow.open_live(shards, 60.0)  # the process has started
        result = go(shards, target, tmp_path / "run")
    finally:
        assert process.wait(30) == 0
    rows, held = rows_by_side(shards)
    assert result.state.tokens == rows
    logged = lines(tmp_path / "run", "train")
    assert logged[0]["followed_records"] < logged[-1]["followed_records"] == 60
    assert logged[-1]["dropped_documents"] == 0
    evals = lines(tmp_path / "run", "eval")
    assert len(evals) > 1
    # The window holds the newest held-out records, not all of them.
    assert held > SETTINGS["eval_records"]
    per_record = 30 - 2 - 5
    assert evals[-1]["rows"] <= SETTINGS["eval_records"] * (per_record + 5)
    assert (result.drafter / "model.safetensors").is_file()


def test_ctrl_c_while_waiting_saves_and_a_resumed_run_skips_what_was_used(
    shards: Path, target: Path, tmp_path: Path
) -> None:
    assert writer(shards, target, count=20, pause_s=0.0).wait(30) == 0
    out = tmp_path / "run"

    def press_when_all_is_used() -> None:
        while not ((out / "log.jsonl").is_file() and '"train"' in (out / "log.jsonl").read_text()):
            time.sleep(0.05)
        time.sleep(1.0)  # the backlog is used up: training waits for records
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_when_all_is_used, daemon=True).start()
    first = go(shards, target, out, follow_idle=None)
    assert first.interrupted
    # What is exported is the newest state.
    saved, _ = checkpoint.read(checkpoint.newest(out / "checkpoints")[0])
    exported = load_file(first.drafter / "model.safetensors")
    assert torch.equal(exported["fc.weight"], saved["model.fc.weight"].bfloat16())
    used, _ = rows_by_side(shards)
    # A record or two may be short of a full batch when the wish to stop comes.
    assert used - 90 < first.state.tokens <= used

    assert writer(shards, target, first=20, count=20, pause_s=0.0).wait(30) == 0
    second = go(shards, target, out, resume=True)
    everything, _ = rows_by_side(shards)
    assert second.state.tokens == everything


def test_the_oldest_records_are_dropped_when_traffic_is_faster(target: Path) -> None:
    store = GrowingStore(learnable_store(target, records=40))
    feed = follow.Feed(store, TrainConfig(**SETTINGS | {"follow_backlog": 100, "held_out": 0.0}), 40)
    store.grow(40)
    feed.refresh()
    assert [s.record for s in feed.waiting()] == [37, 38, 39]
    assert (feed.dropped, feed.backlog_rows) == (37, 87)
    assert feed.seen.records == 40


def test_held_out_conversations_are_a_window_of_the_newest(target: Path) -> None:
    store = GrowingStore(learnable_store(target, records=40))
    feed = follow.Feed(store, TrainConfig(**SETTINGS | {"held_out": 0.5}), 40)
    store.grow(20)
    feed.refresh()
    before = [s.record for s in feed.window()]
    store.grow(20)
    feed.refresh()
    after = [s.record for s in feed.window()]
    assert len(before) == len(after) == SETTINGS["eval_records"]
    assert min(after) > max(before)
    trained = {s.record for s in feed.waiting()}
    assert not trained & {*before, *after}


def test_a_batch_waits_until_it_is_full_or_traffic_is_quiet(target: Path) -> None:
    store = GrowingStore(learnable_store(target, records=4))
    now = [0.0]
    config = TrainConfig(**SETTINGS | {"held_out": 0.0, "batch_tokens": 60, "follow_idle": 3.0})
    feed = follow.Feed(store, config, 40, clock=lambda: now[0])
    store.grow(3)

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    sizes = [len(batch) for batch in feed.batches(Clock(), None)]
    assert sizes == [2, 1]
    assert now[0] >= 3.0


def test_following_nothing_and_with_several_processes_is_refused(shards: Path) -> None:
    with pytest.raises(InputError, match=r"no record was captured into .* in 0\.1 seconds; serve with the"):
        follow.open_live(shards, 0.1)
    with pytest.raises(ConfigError, match=r"--follow trains in one process, this run has 2"):
        follow.check_processes(2)


class GrowingStore(FakeStore):
    """Shows more of its records when asked to."""

    def __init__(self, records: FakeStore) -> None:
        super().__init__()
        self.coming = list(records)

    def grow(self, count: int) -> None:
        self.extend(self.coming[:count])
        del self.coming[:count]

    def refresh(self) -> int:
        return 0


def test_helper_store_is_learnable(shards: Path, target: Path) -> None:
    """What the writer process captures reads back as what it meant to write."""
    assert writer(shards, target, count=3, pause_s=0.0).wait(30) == 0
    store, meant = open_shards(shards), learnable_store(target, records=3)
    for i in range(3):
        assert np.array_equal(store[i].token_ids, meant[i].token_ids)
        assert np.array_equal(store[i].aux_float(), meant[i]._aux)
