"""The tap with its real writer process, fed with steps as vLLM's two runners leave them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace as Object

import numpy as np
import pytest
import torch
from helpers.fake_engine import NUM_AUX, FakeRunner, make_tap, new_request, schedule

from specdec_tap import open_shards
from specdec_tap.errors import ConfigError
from specdec_tap.vllm_plugin.tap import parse_spans

HIDDEN = 16
V1 = FakeRunner("v1", HIDDEN)


@pytest.fixture(params=["v1", "v2"])
def runner(request):
    return FakeRunner(request.param, HIDDEN)


@pytest.fixture
def start(tmp_path):
    """Makes taps that are let go of at the end."""
    taps = []

    def make(**settings):
        taps.append(make_tap(tmp_path / "shards", hidden_size=HIDDEN, **settings))
        return taps[-1]

    yield make
    for tap in taps:
        tap.channel.close()


def counts(tap) -> dict[str, int]:
    """All outcomes, summed over worker and writer; checks that they add up."""
    status = tap.status()
    out: dict[str, int] = {}
    for side in ("worker", "writer"):
        for name, value in status[side].items():
            out[name] = out.get(name, 0) + value
    ended = sum(v for k, v in out.items() if k == "requests_sealed" or k.startswith(("dropped_", "skipped_")))
    assert out["requests_started"] == ended
    return {k: v for k, v in out.items() if v and k != "hook_ns"}


def wait(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def writer_pid(tap, tmp_path) -> int:
    path = tmp_path / "shards" / tap.channel.header.stream / ".status.json"
    wait(path.exists)
    return json.loads(path.read_text())["pid"]


def one_request(tap, runner, name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), response=(4, 5), **fields):
    """Prefill, decode, finish; returns the states that were fed, float32 ``[NUM_AUX + 1, rows, H]``."""
    tap.on_schedule(schedule([new_request(name, list(prompt), max_tokens=len(response), **fields)]))
    fed = []
    tokens, first = list(prompt), 0
    for sampled in response:
        rows = len(tokens) - first
        states = torch.randn(NUM_AUX + 1, rows, HIDDEN).bfloat16()
        tap.on_step(runner.step([name], [rows], [first], tokens[first:], [[sampled]], states))
        fed.append(states)
        first = len(tokens)
        tokens.append(sampled)
        tap.on_schedule(schedule())
    tap.on_schedule(schedule(finished=[name]))
    return torch.cat(fed, dim=1).float().numpy()


def test_rows_arrive_in_the_shards_and_padding_does_not(start, runner, tmp_path):
    tap = start()
    fed = one_request(tap, runner)
    tap.channel.finish()
    (record,) = open_shards(tmp_path / "shards")
    assert record.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert np.array_equal(record.aux_float(), fed[:NUM_AUX].transpose(1, 0, 2))
    assert record.final_span == [(2, 4)]
    assert np.array_equal(record.final_float(2, 4), fed[NUM_AUX, 2:])
    assert counts(tap)["requests_sealed"] == 1


def test_only_the_rows_of_captured_requests_are_copied(start, runner, tmp_path):
    tap = start()
    refusing = new_request("no", [7, 7], extra_args={"specdec_tap": 0})
    tap.on_schedule(schedule([refusing, new_request("yes", [1, 2]), new_request("also", [3])]))
    states = torch.randn(NUM_AUX + 1, 5, HIDDEN).bfloat16()
    step = runner.step(["no", "yes", "also"], [2, 2, 1], [0, 0, 0], [7, 7, 1, 2, 3], [[9], [8], [6]], states)
    tap.on_step(step)
    tap.on_schedule(schedule(finished=["no", "yes", "also"]))
    tap.channel.finish()
    records = {record.meta.request_id: record for record in open_shards(tmp_path / "shards")}
    assert set(records) == {"yes", "also"}
    assert np.array_equal(records["yes"].aux_float()[:, 0], states[0, 2:4].float().numpy())
    assert records["also"].token_ids.tolist() == [3, 6]
    got = counts(tap)
    del got["stored_bytes"]
    assert got == {
        "requests_started": 3, "requests_announced": 2, "announced_seen": 2, "skipped_consent": 1, "rows": 3,
        "steps": 1, "steps_handled": 1, "requests_sealed": 2, "tokens": 5, "response_tokens": 2,
        "rows_stored": 3, "raw_bytes": 3 * 4 * HIDDEN * 2, "controls_done": 1, "shards_sealed": 1,
    }  # fmt: skip


def test_what_a_prefill_chunk_sampled_means_nothing(start, runner, tmp_path):
    tap = start()
    tap.on_schedule(schedule([new_request("a", [1, 2, 3, 4])]))
    tap.on_step(runner.step(["a"], [3], [0], [1, 2, 3], [[77]], unfinished=[True]))
    tap.on_schedule(schedule())
    tap.on_step(runner.step(["a"], [1], [3], [4], [[5]]))
    tap.on_schedule(schedule(finished=["a"]))
    tap.channel.finish()
    (record,) = open_shards(tmp_path / "shards")
    assert record.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_rejected_drafts_are_not_stored(start, runner, tmp_path):
    tap = start(limits={"max_columns": 4})
    tap.on_schedule(schedule([new_request("a", [1, 2])]))
    states = torch.randn(NUM_AUX + 1, 5, HIDDEN).bfloat16()
    tap.on_step(runner.step(["a"], [5], [0], [1, 2, 8, 9, 9], [[8, 7]], states))  # 8 accepted, then 7
    tap.on_schedule(schedule(finished=["a"]))
    tap.channel.finish()
    (record,) = open_shards(tmp_path / "shards")
    assert record.token_ids.tolist() == [1, 2, 8, 7]
    assert np.array_equal(record.aux_float()[:, 0], states[0, :3].float().numpy())


@pytest.mark.parametrize(
    ("wish", "consent", "captured"),
    [(None, "opt_out", True), (0, "opt_out", False), ("0", "opt_out", False), (False, "opt_out", False),
     (1, "opt_out", True), (None, "opt_in", False), (1, "opt_in", True), ("true", "opt_in", True),
     (0.0, "opt_in", False)],
)  # fmt: skip
def test_consent_is_asked_of_each_request(start, wish, consent, captured):
    tap = start(consent=consent)
    extra = None if wish is None else {"specdec_tap": wish}
    one_request(tap, V1, extra_args=extra)
    tap.channel.finish()
    assert ("requests_sealed" if captured else "skipped_consent") in counts(tap)


def test_the_rate_is_the_share_of_requests_and_can_be_changed(start):
    tap = start(sample_rate=0.3)
    names = [f"r{i}" for i in range(2000)]
    tap.on_schedule(schedule([new_request(name, [1]) for name in names]))
    assert 500 < tap.status()["worker"]["requests_announced"] < 700
    assert tap.control("rate", rate=0.0)["sample_rate"] == 0.0
    tap.on_schedule(schedule([new_request(f"s{i}", [1]) for i in range(100)]))
    tap.on_schedule(schedule(finished=names))
    tap.channel.finish()
    assert 1300 + 100 < counts(tap)["skipped_sample_rate"] < 1500 + 100


def test_pausing_lets_running_requests_end_and_takes_no_new_ones(start):
    tap = start()
    tap.on_schedule(schedule([new_request("a", [1])]))
    assert tap.control("pause")["paused"] is True
    tap.on_schedule(schedule([new_request("b", [1])]))
    tap.on_step(V1.step(["a", "b"], [1, 1], [0, 0], [1, 1], [[2], [2]]))
    tap.on_schedule(schedule(finished=["a", "b"]))
    tap.control("resume")
    one_request(tap, V1, "c")
    tap.channel.finish()
    assert counts(tap)["skipped_paused"] == 1
    assert counts(tap)["requests_sealed"] == 2


def test_flush_and_rotate_say_when_they_are_done(start, tmp_path):
    tap = start()
    one_request(tap, V1)
    sent = tap.control("rotate")["controls_sent"]
    wait(lambda: tap.status()["controls_done"] >= sent)
    assert list((tmp_path / "shards").glob("*/000001.safetensors"))
    tap.control("flush")


def test_wrong_control_is_refused(start):
    tap = start()
    with pytest.raises(ConfigError, match="action is 'stop'; expected one of 'pause', 'resume', 'rate'"):
        tap.control("stop")
    with pytest.raises(ConfigError, match=r"rate is 1\.5; expected a number from 0 to 1"):
        tap.control("rate", rate=1.5)
    with pytest.raises(ConfigError, match="rate is None; expected a number from 0 to 1"):
        tap.control("rate")


@pytest.mark.parametrize(
    "fields",
    [{"mm_features": [Object()]}, {"prompt_embeds": torch.zeros(1)}, {"sampling_params": None}],
)
def test_requests_whose_positions_are_not_tokens_are_skipped_and_counted(start, fields):
    tap = start()
    tap.on_schedule(schedule([new_request("a", [1, 2], **fields)]))
    tap.channel.finish()
    assert counts(tap)["skipped_unsupported"] == 1


@pytest.mark.parametrize("name", ["../../evil", "a/b", "x" * 4096, "\U0001f600\u0000\n", "", "\ud800"])
def test_a_request_id_is_data_and_never_part_of_a_path(start, name, tmp_path):
    tap = start(sample_rate=0.999999)
    one_request(tap, V1, name)
    tap.channel.finish()
    assert counts(tap)["requests_sealed"] == 1
    (record,) = open_shards(tmp_path / "shards")
    assert record.meta.request_id == name[:256].replace("\ud800", record.meta.request_id)
    assert {p.name for p in tmp_path.iterdir()} == {"shards"}


def test_a_client_with_very_many_stop_tokens_hurts_nobody(start):
    tap = start()
    one_request(tap, V1, stop_token_ids=list(range(1000, 200_000)))
    tap.channel.finish()
    assert counts(tap)["requests_sealed"] == 1


def test_the_engines_own_stop_tells_why_a_request_ended(start, tmp_path):
    tap = start()
    one_request(tap, V1, "eos", response=(4, 5), eos_token_id=5)
    tap.on_schedule(schedule([new_request("more", [1], max_tokens=9)]))
    tap.on_step(V1.step(["more"], [1], [0], [1], [[2]]))
    tap.on_schedule(schedule(finished=["more"]))
    tap.channel.finish()
    reasons = {r.meta.request_id: r.meta.finish_reason for r in open_shards(tmp_path / "shards")}
    assert reasons == {"eos": "stop", "more": "abort"}


def test_adapters_are_recorded_and_share_nothing(start, tmp_path):
    tap = start()
    prompt = tuple(range(1, 34))
    one_request(tap, V1, "plain", prompt)
    lora = Object(lora_name="tune", lora_int_id=1, lora_path="x")
    tap.on_schedule(schedule([new_request("adapted", list(prompt), max_tokens=1, lora_request=lora)]))
    tap.on_step(V1.step(["adapted"], [1], [32], [33], [[4]]))  # as if the cache had given it 32 rows
    tap.on_schedule(schedule(finished=["adapted"]))
    tap.channel.finish()
    record = next(r for r in open_shards(tmp_path / "shards") if r.meta.request_id == "adapted")
    assert record.meta.lora == "tune"
    assert record.gaps == [(0, 32)]


def test_a_failing_hook_costs_the_running_requests_and_nothing_else(start):
    tap = start()
    tap.on_schedule(schedule([new_request("a", [1])]))
    tap.on_step(lambda: 1 / 0)
    tap.on_schedule(schedule(finished=["a"]))
    one_request(tap, V1, "b")
    tap.channel.finish()
    assert counts(tap)["dropped_hook_error"] == 1
    assert counts(tap)["requests_sealed"] == 1
    assert counts(tap)["hook_errors"] == 1


def test_a_failing_announcement_costs_that_request_only(start):
    tap = start()
    broken = new_request("broken", [1, "x"])
    tap.on_schedule(schedule([broken, new_request("a", [1])]))
    tap.on_step(V1.step(["broken", "a"], [2, 1], [0, 0], [1, 1, 1], [[2], [2]]))
    tap.on_schedule(schedule(finished=["broken", "a"]))
    tap.channel.finish()
    assert counts(tap)["dropped_hook_error"] == 1
    assert counts(tap)["requests_sealed"] == 1


def test_a_tap_that_keeps_failing_turns_itself_off_and_says_so_once(start, caplog, monkeypatch):
    monkeypatch.setattr("specdec_tap.vllm_plugin.tap.logger.propagate", True)
    tap = start()
    tap.on_schedule(schedule([new_request("a", [1])]))
    for _ in range(30):
        tap.no_states()
    assert tap.status()["active"] is False
    one_request(tap, V1, "b")
    tap.channel.finish()
    assert counts(tap)["hook_errors"] == 20
    assert counts(tap)["requests_started"] == 1
    messages = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert messages == [
        "capture failed in no_states; what it may have spoilt is dropped, serving continues",
        "capture is off for this process: capture failed 20 times; serving continues",
    ]


def test_requests_without_any_step_do_not_look_like_a_quiet_server(start):
    """A vLLM that renamed the hooked method served on, and nothing was captured."""
    tap = start()
    for i in range(40):
        tap.on_schedule(schedule([new_request(f"r{i}", [1])], finished=[f"r{i - 1}"]))
    assert tap.status()["active"] is False
    tap.channel.finish()


def test_the_writer_is_not_pinned_like_the_worker(start, tmp_path, monkeypatch):
    """vLLM pins its workers on a CPU, their threads and by the environment: a writer that began on a busy
    worker's core took half a minute, one that stayed there lost nine tenths of all requests."""
    before = os.sched_getaffinity(0)
    pinned = {min(before)}
    os.sched_setaffinity(0, pinned)
    libgomp = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    assert libgomp.exists()
    monkeypatch.setenv("LD_PRELOAD", str(libgomp))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(min(before)))
    try:
        writer = writer_pid(start(), tmp_path)
        allowed = os.sched_getaffinity(os.getppid())
        assert os.sched_getaffinity(writer) == (allowed - pinned or allowed)
        assert os.sched_getaffinity(0) == pinned
    finally:
        os.sched_setaffinity(0, before)


def test_the_writer_stands_back_whatever_scheduling_group_it_is_in(start, tmp_path):
    """Its session is a scheduling group of its own, in which its niceness alone would mean nothing."""
    writer = writer_pid(start(), tmp_path)
    assert os.getpriority(os.PRIO_PROCESS, writer) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    assert os.sched_getscheduler(writer) == os.SCHED_BATCH
    group = Path(f"/proc/{writer}/autogroup")
    if group.exists():
        assert group.read_text().endswith(" nice 5\n")


def test_a_killed_writer_is_replaced_and_what_it_held_is_counted(start, tmp_path):
    tap = start()
    one_request(tap, V1, "before")
    wait(lambda: tap.status()["writer"]["requests_sealed"] == 1)
    tap.on_schedule(schedule([new_request("during", [1])]))
    tap.on_step(V1.step(["during"], [1], [0], [1], [[2]]))
    stream = tap.channel.header.stream
    os.kill(writer_pid(tap, tmp_path), signal.SIGKILL)
    wait(lambda: tap.channel.lost)
    tap.on_schedule(schedule([new_request("meanwhile", [1])], finished=["during"]))
    wait(lambda: tap.channel._ready is not None)
    one_request(tap, V1, "after")
    tap.channel.finish()
    got = counts(tap)
    assert got["writer_restarts"] == 1
    assert got["dropped_writer_lost"] == 2
    assert got["requests_sealed"] == 2
    assert tap.channel.header.stream != stream
    # The new writer sealed the dead one's journal, so nothing waits for repair.
    wait(lambda: not list((tmp_path / "shards").glob("*/*.open")))
    assert {r.meta.request_id for r in open_shards(tmp_path / "shards")} == {"before", "after"}
    assert json.loads((tmp_path / "shards" / stream / ".status.json").read_text())["closed"] is True


def test_a_writer_that_dies_while_the_engine_is_idle_is_replaced_before_the_next_request(start, tmp_path):
    tap = start()
    os.kill(writer_pid(tap, tmp_path), signal.SIGKILL)
    wait(lambda: tap.channel._ready is not None)
    one_request(tap, V1)
    tap.channel.finish()
    assert counts(tap)["requests_sealed"] == 1


def test_new_weights_after_a_writer_died_begin_a_stream_of_their_own(start, tmp_path):
    """The writer that was started for the old weights must not write states of the new ones."""
    tap = start()
    tap.on_schedule(schedule([new_request("lost", [1])]))
    os.kill(writer_pid(tap, tmp_path), signal.SIGKILL)
    wait(lambda: tap.channel._ready is not None)
    tap.on_weights_changed("second")
    assert tap.channel._ready is None and not tap.channel.lost
    one_request(tap, V1, "after")
    os.kill(writer_pid(tap, tmp_path), signal.SIGKILL)
    wait(lambda: tap.channel._ready is not None)
    one_request(tap, V1, "last")
    tap.channel.finish()
    assert counts(tap)["dropped_writer_lost"] >= 1
    with open_shards(tmp_path / "shards", ignore_differences=("target.revision",)) as store:
        assert {r.header.target.revision for r in store if r.meta.request_id == "last"} == {"second"}


def test_a_stopped_writer_is_not_waited_for_and_whole_requests_are_dropped(start, tmp_path):
    tap = start(ring_bytes=1 << 20, limits={"max_rows": 256, "max_requests": 8})
    pid = writer_pid(tap, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    slowest = 0.0
    try:
        for i in range(60):  # 60 x 200 rows x 128 bytes is more than the ring
            begin = time.perf_counter()
            prompt = [1] * 200
            tap.on_schedule(schedule([new_request(f"r{i}", prompt, max_tokens=1)], finished=[f"r{i - 1}"]))
            tap.on_step(V1.step([f"r{i}"], [200], [0], prompt, [[2]]))
            slowest = max(slowest, time.perf_counter() - begin)
    finally:
        os.kill(pid, signal.SIGCONT)
    tap.on_schedule(schedule(finished=["r59"]))
    tap.channel.finish()
    got = counts(tap)
    assert got["dropped_ring_full"] > 10
    assert got["requests_sealed"] > 10
    assert got["dropped_ring_full"] + got["requests_sealed"] == 60
    assert slowest < 0.5
    store = open_shards(tmp_path / "shards")
    assert len(store) == got["requests_sealed"]
    assert all(not record.gaps for record in store)


def test_a_removed_folder_starts_a_new_stream(start, tmp_path):
    tap = start()
    one_request(tap, V1, "a")
    writer_pid(tap, tmp_path)
    shutil.rmtree(tmp_path / "shards")
    wait(lambda: tap.channel._ready is not None)
    one_request(tap, V1, "b")
    tap.channel.finish()
    assert [r.meta.request_id for r in open_shards(tmp_path / "shards")] == ["b"]
    counts(tap)


def test_a_full_disk_costs_requests_and_leaves_a_valid_journal(tmp_path):
    """On a file system of 3 MB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=False)
    if made.returncode:
        pytest.skip("no right to mount a small file system here")
    try:
        tap, wide = make_tap(tmp_path / "shards", hidden_size=1024), FakeRunner("v1", 1024)
        for i in range(20):
            prompt = [i + 1] * 200
            tap.on_schedule(schedule([new_request(f"r{i}", prompt, max_tokens=1)]))
            tap.on_step(wide.step([f"r{i}"], [200], [0], prompt, [[2]]))
            tap.on_schedule(schedule(finished=[f"r{i}"]))
        wait(lambda: tap.status()["writer"]["dropped_io_error"] > 0)
        tap.channel.finish()
        got = counts(tap)
        assert got["requests_sealed"] + got["dropped_io_error"] == 20
        store = open_shards(tmp_path / "shards")
        assert len(store) == got["requests_sealed"] > 0
        assert all(record.aux().shape == (200, NUM_AUX, 1024) for record in store)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_nan_rows_cost_their_request(start):
    tap = start()
    tap.on_schedule(schedule([new_request("bad", [1]), new_request("good", [1])]))
    states = torch.zeros(NUM_AUX + 1, 2, HIDDEN).bfloat16()
    states[1, 0, 3] = float("nan")
    tap.on_step(V1.step(["bad", "good"], [1, 1], [0, 0], [1, 1], [[2], [2]], states))
    tap.on_schedule(schedule(finished=["bad", "good"]))
    tap.channel.finish()
    assert counts(tap)["dropped_non_finite"] == 1
    assert counts(tap)["requests_sealed"] == 1


def test_other_weights_begin_another_stream(start, tmp_path):
    tap = start()
    one_request(tap, V1, "old")
    tap.on_schedule(schedule([new_request("between", [1])]))
    tap.on_step(V1.step(["between"], [1], [0], [1], [[2]]))
    old = tap.channel.header.stream
    tap.on_weights_changed("reload1")
    one_request(tap, V1, "new")
    tap.channel.finish()
    assert counts(tap)["dropped_weights_changed"] == 1
    new = tap.channel.header.stream
    assert [r.meta.request_id for r in open_shards(tmp_path / "shards", streams=[old])] == ["old"]
    store = open_shards(tmp_path / "shards", streams=[new])
    assert [r.meta.request_id for r in store] == ["new"]
    assert store.header.target.revision == "reload1"


def test_the_end_of_the_worker_seals_what_the_writer_holds(start, tmp_path):
    tap = start()
    one_request(tap, V1, "whole")
    tap.on_schedule(schedule([new_request("cut", [1, 2])]))
    tap.on_step(V1.step(["cut"], [2], [0], [1, 2], [[3]]))
    tap.channel.close()  # what a kill -9 of the worker does to the socket
    wait(lambda: list((tmp_path / "shards").glob("*/000001.safetensors")))
    reasons = {r.meta.request_id: r.meta.finish_reason for r in open_shards(tmp_path / "shards")}
    assert reasons == {"whole": "length", "cut": "interrupted"}


def test_files_and_folders_are_private(start, tmp_path):
    tap = start()
    one_request(tap, V1)
    tap.channel.finish()
    modes = {p.is_dir(): oct(p.stat().st_mode & 0o777) for p in (tmp_path / "shards").rglob("*")}
    assert modes == {True: "0o700", False: "0o600"}


def test_a_ring_that_cannot_hold_one_step_is_refused(start):
    message = r"ring_bytes is 4,096 but one step of 512 tokens takes [0-9,]+; set it to [0-9,]+ or leave it"
    with pytest.raises(ConfigError, match=message):
        start(ring_bytes=4096)


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path):
    (tmp_path / "shards").write_text("a file")
    with pytest.raises(ConfigError, match=r"the writer process cannot start: .*shards"):
        make_tap(tmp_path / "shards")


def test_nothing_grows_with_the_number_of_requests(start):
    tap = start()
    for i in range(300):
        one_request(tap, V1, f"r{i}")
    tap.channel.finish()
    status = tap.status()
    assert status["known_requests"] == status["live_requests"] == status["backlog_messages"] == 0
    assert counts(tap)["requests_sealed"] == 300


@pytest.mark.parametrize("given", [False, True])
def test_given_answers_are_read_only_where_the_setting_says_so(start, tmp_path, given):
    tap = start(given_answers=given)
    one_request(tap, V1, prompt=(1, 2, 3, 4), response=(9,), extra_args={"specdec_tap_spans": "2-4"})
    one_request(tap, V1, "odd", response=(9,), extra_args={"specdec_tap_spans": "2-99"})
    tap.channel.finish()
    record, *others = open_shards(tmp_path / "shards")
    if given:
        assert record.token_ids.tolist() == [1, 2, 3, 4] and record.num_rows == 3
        assert [(s.start, s.stop) for s in record.spans if s.kind == "response"] == [(2, 4)]
        assert record.final_span == [(1, 3)]
        assert not others and counts(tap)["skipped_unsupported"] == 1
    else:
        assert record.token_ids.tolist() == [1, 2, 3, 4, 9]
        assert len(others) == 1


@pytest.mark.parametrize("text", ["0-3", "3-2", "2-9", "1-2,2-2", "x", "2", "1-3,2-4", "-1-3"])
def test_ranges_that_are_none_of_the_prompt_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_spans(text, 8)
