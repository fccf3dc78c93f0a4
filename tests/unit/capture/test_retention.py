"""The folder stays inside its bounds, and what dead writers left is ended."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from helpers.fake_engine import FakeRunner, make_header, make_tap, new_request, schedule

from specdec_tap import open_shards
from specdec_tap.capture.retention import Ages, end_dead_streams, enforce, write_status
from specdec_tap.shards.writer import ShardWriter


@pytest.fixture
def put(tmp_path):
    """Make files that look like shards; returns their path."""

    def make(name: str, *, size: int = 100, age_s: float = 0.0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    return make


def left(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.glob("*/*") if not p.name.startswith(".")}


def test_the_oldest_sealed_shards_go_first_until_the_folder_fits(put, tmp_path):
    for i in range(5):
        put(f"own/00000{i + 1}.safetensors", age_s=50 - i)
    removed = enforce(tmp_path, "own", max_bytes=250, max_age_s=None)
    assert [(r.stream, r.shard, r.num_bytes) for r in removed] == [
        ("own", 1, 100),
        ("own", 2, 100),
        ("own", 3, 100),
    ]
    assert left(tmp_path) == {"own/000004.safetensors", "own/000005.safetensors"}


def test_shards_that_are_too_old_go_whatever_the_size(put, tmp_path):
    put("own/000001.safetensors", age_s=100)
    put("own/000002.safetensors", age_s=10)
    assert [r.shard for r in enforce(tmp_path, "own", max_bytes=None, max_age_s=60)] == [1]


class Clock:
    """A machine's clock that is set now and then, and what really passes."""

    def __init__(self) -> None:
        self.wall, self.steady = time.time(), 500.0

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def ages(self) -> Ages:
        return Ages(lambda: self.wall, lambda: self.steady)


DAY = 86_400.0


def test_a_clock_set_forward_makes_no_shard_older(put, tmp_path):
    """A year ahead and back again, as a wrong time server does it; then the shards go when they are due."""
    clock = Clock()
    ages = clock.ages()

    def removed() -> list[int]:
        return [r.shard for r in enforce(tmp_path, "own", max_bytes=None, max_age_s=DAY, ages=ages)]

    def made(number: int) -> None:
        os.utime(put(f"own/{number:06d}.safetensors"), (clock.wall, clock.wall))

    made(1)
    clock.sleep(DAY / 2)
    made(2)
    assert removed() == []
    clock.wall += 365 * DAY
    assert removed() == []
    made(3)
    clock.sleep(DAY / 2 + 60)
    assert removed() == [1]  # 2 is half a day old, 3 too
    clock.wall -= 365 * DAY
    assert removed() == []
    clock.sleep(DAY / 2 + 60)
    assert removed() == [2]
    clock.wall += 365 * DAY
    assert removed() == [3]  # written under that date, and by now a day old


def test_a_clock_that_was_wrong_at_the_start_is_put_right(put, tmp_path):
    """A machine without a battery begins in 1970; its disk has shards of yesterday and of last year."""
    clock = Clock()
    today, clock.wall = clock.wall, 60.0
    ages = clock.ages()
    put("own/000001.safetensors", age_s=2 * DAY)
    put("own/000002.safetensors", age_s=DAY / 2)
    os.utime(put("own/000003.safetensors"), (clock.wall, clock.wall))
    bounds = {"max_bytes": None, "max_age_s": DAY, "ages": ages}
    assert enforce(tmp_path, "own", **bounds) == []
    clock.sleep(30)
    clock.wall = today
    assert [r.shard for r in enforce(tmp_path, "own", **bounds)] == [1]
    clock.sleep(DAY * 0.75)
    assert [r.shard for r in enforce(tmp_path, "own", **bounds)] == [2]
    clock.sleep(DAY / 2)
    assert [r.shard for r in enforce(tmp_path, "own", **bounds)] == [3]


def test_small_steps_of_the_clock_are_nothing(caplog):
    clock = Clock()
    ages = clock.ages()
    for step in (2.0, -2.0, 0.5, -3600.0):  # set back: files seem younger, and stay
        clock.sleep(60)
        clock.wall += step
        ages.look()
    assert ages.of(clock.wall - 10) == pytest.approx(10)
    assert not caplog.records


def test_the_writer_keeps_its_shards_when_the_clock_is_set_forward(tmp_path, monkeypatch):
    """The real writer process, whose clock a module on its path sets forward by a year."""
    path, flag, root = tmp_path / "path", tmp_path / "set", tmp_path / "shards"
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        f"import os, time\nreal = time.time\n"
        f"time.time = lambda: real() + {365 * DAY} * os.path.exists({str(flag)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
    tap, run = make_tap(root, hidden_size=16, max_age_s=3600), FakeRunner("v1", 16)
    for number in range(2):  # the files' own times stay right: later ones would look a year old
        tap.on_schedule(schedule([new_request(f"r{number}", [1, 2], max_tokens=1)]))
        tap.on_step(run.step([f"r{number}"], [2], [0], [1, 2], [[3]]))
        tap.on_schedule(schedule(finished=[f"r{number}"]))
        tap.control("rotate")
        deadline = time.monotonic() + 60
        while tap.status()["writer"]["shards_sealed"] <= number:  # the folder is looked at then
            assert time.monotonic() < deadline
            time.sleep(0.01)
        flag.touch()
    stream = tap.channel.header.stream
    status = json.loads((root / stream / ".status.json").read_text())
    assert status["updated_unix_s"] > time.time() + 364 * DAY
    tap.channel.finish()
    assert [r.meta.request_id for r in open_shards(root)] == ["r0", "r1"]


def test_a_shard_that_must_stay_keeps_the_later_ones_of_its_stream(put, tmp_path):
    for i in range(1, 4):
        put(f"own/00000{i}.safetensors", age_s=50 - i)
        put(f"dead/00000{i}.safetensors", age_s=40 - i)
    removed = enforce(
        tmp_path, "own", max_bytes=0, max_age_s=None, may_go=lambda p: p.parent.name == "own" or "1" in p.name
    )
    assert {(r.stream, r.shard) for r in removed} == {("own", 1), ("own", 2), ("own", 3), ("dead", 1)}


def test_journals_count_and_stay(put, tmp_path):
    put("own/000001.open", age_s=100, size=1000)
    put("own/000002.safetensors", age_s=1)
    assert [r.shard for r in enforce(tmp_path, "own", max_bytes=500, max_age_s=50)] == [2]
    assert left(tmp_path) == {"own/000001.open"}


def test_a_living_writers_shards_stay_and_a_dead_ones_go(put, tmp_path):
    with ShardWriter(tmp_path, make_header(4).replace(stream="living")):
        put("living/000009.safetensors", age_s=100)
        put("dead/000001.safetensors", age_s=50)
        enforce(tmp_path, "own", max_bytes=0, max_age_s=None)
        assert "living/000009.safetensors" in left(tmp_path)
        assert "dead/000001.safetensors" not in left(tmp_path)


def test_files_that_are_no_shards_are_never_touched(put, tmp_path):
    put("target/target.safetensors", age_s=100)
    put("own/notes.safetensors", age_s=100)
    put("own/000001.safetensors.bak", age_s=100)
    outside = put("000001.safetensors", age_s=100)
    (tmp_path / "own" / "000002.safetensors").symlink_to(outside)
    assert enforce(tmp_path, "own", max_bytes=0, max_age_s=1) == []
    assert outside.exists()


def test_a_dead_writers_journal_is_sealed_and_its_stream_closed(tmp_path):
    writer = ShardWriter(tmp_path, make_header(4).replace(stream="dead"))
    status = tmp_path / "dead" / ".status.json"
    status.write_text(json.dumps({"closed": False, "live_requests": 3, "stream": "dead"}))
    os.close(writer._fd)  # the kernel lets go of a dead writer's locks like this
    os.close(writer._lock_fd)
    assert end_dead_streams(tmp_path) == 1
    assert left(tmp_path) == {"dead/000001.safetensors"}
    assert json.loads(status.read_text()) == {"closed": True, "live_requests": 0, "stream": "dead"}


def test_a_living_writers_journal_is_left_alone(tmp_path):
    with ShardWriter(tmp_path, make_header(4).replace(stream="living")):
        assert end_dead_streams(tmp_path) == 0
        assert left(tmp_path) == {"living/000001.open"}


def test_a_budget_is_kept_to_within_one_shard_and_records_point_at_nothing_that_is_gone(tmp_path):
    """Three megabytes of states through a budget of a quarter of one."""
    root, hidden = tmp_path / "shards", 64
    tap = make_tap(root, hidden_size=hidden, max_shard_bytes=1 << 16, max_bytes=1 << 18)
    run, prefix = FakeRunner("v1", hidden), list(range(1, 65))
    deadline = time.monotonic() + 60
    number = 0
    while tap.status()["writer"]["retired_bytes"] < 1 << 18:
        assert time.monotonic() < deadline
        name, prompt = f"r{number}", [*prefix, *([number % 900 + 1] * 64)]
        hit = 64 if number else 0
        tap.on_schedule(schedule([new_request(name, prompt, max_tokens=1)]))
        tap.on_step(run.step([name], [128 - hit], [hit], prompt[hit:], [[5]]))
        tap.on_schedule(schedule(finished=[name]))
        number += 1
        if number % 8 == 0:
            time.sleep(0.1)
    assert tap.status()["writer"]["records_cut"] > 0  # the requests after the first, whose prefix it stored
    tap.channel.finish()
    sizes = sum(p.stat().st_size for p in root.glob("*/0*"))
    assert sizes < (1 << 18) + (1 << 17)
    store = open_shards(root)
    assert not store.skipped
    assert len(store) > 5
    newest = store[len(store) - 1]
    assert newest.gaps == [(0, 64)]  # the prefix lay in a shard that is gone: an explicit gap
    for record in store:
        for piece in record.pieces:
            record.aux(piece.position, piece.stop)


def test_a_reader_of_the_status_file_never_sees_half_of_it(tmp_path):
    """Thousands of reads while it is replaced, with bodies of unequal length: old or new, never torn."""
    path = tmp_path / ".status.json"
    write_status(path, {"n": 0, "filling": "", "end": 0})
    stop, written = threading.Event(), [0]

    def replace() -> None:
        while not stop.is_set():
            n = written[0] + 1
            write_status(path, {"n": n, "filling": "x" * (n % 7 * 20_000), "end": n})
            written[0] = n

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        last, seen = 0, set()
        deadline = time.monotonic() + 60
        reads = 0
        while reads < 5_000 or (len(seen) < 20 and time.monotonic() < deadline):
            status = json.loads(path.read_bytes())
            assert status["n"] == status["end"] >= last
            assert len(status["filling"]) == status["n"] % 7 * 20_000
            last = status["n"]
            seen.add(last)
            reads += 1
    finally:
        stop.set()
        writer.join()
    assert len(seen) >= 20, "the writer did not run beside the reader"


def test_a_status_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / ".status.json"
    write_status(path, {"n": 1})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        # The disk fills up after a few bytes: what was written so far must not get the name.
        real = os.open
        patch.setattr(os, "open", lambda *a, **k: real("/dev/full", os.O_WRONLY))
        write_status(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 1}
