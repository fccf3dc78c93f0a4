"""Reading what the writers say about themselves."""

import json
import os

import pytest

from specdec_tap.capture.status import StatusReader, current, of_server, total


@pytest.fixture
def reader(tmp_path):
    return StatusReader(tmp_path / "shards")


def test_counters_become_public_names_and_ratios(reader, put_status):
    put_status(
        "a",
        worker={"requests_started": 10, "skipped_consent": 1, "dropped_ring_full": 2, "given_up": 2,
                "steps": 50, "rows": 900, "hook_ns": 2_500_000_000},
        writer={"requests_sealed": 6, "dropped_ring_full": 1, "dropped_io_error": 1, "tokens": 600,
                "rows_stored": 300, "rows_reused": 100, "raw_bytes": 3000, "stored_bytes": 1500,
                "steps_handled": 47},
        live_requests=1, ring_used_bytes=1 << 24,
    )  # fmt: skip
    (status,) = reader.read()
    out = status.to_json()
    assert out["num_started"] == 10
    assert out["num_dropped"] == 4
    # One reason can be counted by the worker and by the writer.
    assert {k: v for k, v in out["dropped"].items() if v} == {"ring_full": 3, "io_error": 1}
    assert (out["num_skipped"], out["skipped"]["consent"]) == (1, 1)
    assert out["num_lag_steps"] == 3
    assert out["dedupe_fraction"] == 0.25
    assert out["stored_fraction"] == 0.5
    assert out["bytes_per_token"] == 2.5
    assert out["ring_fill_fraction"] == 0.25
    assert out["hook_s"] == 2.5
    assert json.loads(json.dumps(out)) == out


@pytest.mark.parametrize(
    ("values", "state", "reason"),
    [
        ({}, "capturing", None),
        ({"closed": True}, "closed", "the server ended"),
        ({"age_s": 11}, "stale", "no news from the writer process 4242 for 11 s"),
        ({"paused": True}, "paused", "/specdec_tap/pause"),
        ({"active": False, "worker": {"hook_errors": 20}}, "off", "failed 20 times"),
    ],
)
def test_state_says_why(reader, put_status, values, state, reason):
    put_status("a", **values)
    (status,) = reader.read()
    assert status.state == state
    assert reason is None if status.reason is None else reason in status.reason


def test_total_divides_once_after_summing(reader, put_status):
    put_status("a", dp_rank=0, writer={"rows_stored": 100, "rows_reused": 0, "tokens": 1, "stored_bytes": 10})
    put_status("b", dp_rank=1, writer={"rows_stored": 0, "rows_reused": 300, "tokens": 3, "stored_bytes": 10})
    sums = total(reader.read())
    assert sums["dedupe_fraction"] == 0.75
    assert sums["bytes_per_token"] == 5.0
    assert total([])["num_started"] == 0


def test_a_restarted_writer_counts_once(reader, put_status):
    """Its counters go on from the ring, so adding the old stream's would count everything twice."""
    put_status("a-old", server_id="x", started_unix_s=1.0, age_s=60, writer={"tokens": 500})
    put_status("a-new", server_id="x", started_unix_s=2.0, writer={"tokens": 700})
    put_status("other", server_id="y", writer={"tokens": 9})
    statuses = reader.read()
    assert [s.stream for s in of_server(statuses, "x")] == ["a-new"]
    assert [s.stream for s in current(statuses)] == ["a-new", "other"]


def test_ranks_of_one_server_are_all_current(reader, put_status):
    for rank in range(3):
        put_status(f"r{rank}", server_id="x", dp_rank=rank)
    assert [s.dp_rank for s in of_server(reader.read(), "x")] == [0, 1, 2]


def test_ended_and_long_dead_streams_are_not_current(reader, put_status):
    put_status("closed", server_id="x", closed=True)
    put_status("killed", server_id="y", age_s=700)
    put_status("stuck", server_id="z", age_s=60)
    assert [(s.stream, s.state) for s in current(reader.read())] == [("stuck", "stale")]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"closed": 1}', "[" * 100_000, '{"worker": 3}'])
def test_a_broken_file_is_a_named_problem_and_the_others_are_read(reader, put_status, tmp_path, text):
    put_status("good")
    put_status("bad")
    (tmp_path / "shards" / "bad" / ".status.json").write_text(text)
    assert [s.stream for s in reader.read()] == ["good"]
    assert list(reader.problems) == ["bad"]


def test_links_and_fifos_are_not_followed(reader, put_status, tmp_path):
    put_status("good")
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    for name in ("link", "fifo", "linked-folder"):
        (tmp_path / "shards" / name).mkdir()
    (tmp_path / "shards" / "link" / ".status.json").symlink_to(secret)
    os.mkfifo(tmp_path / "shards" / "fifo" / ".status.json")
    (tmp_path / "shards" / "linked-folder").rmdir()
    (tmp_path / "shards" / "linked-folder").symlink_to(tmp_path / "shards" / "good")
    assert [s.stream for s in reader.read()] == ["good"]
    assert set(reader.problems) == {"link", "fifo"}


def test_unchanged_files_are_not_parsed_again_and_changed_ones_are(reader, put_status):
    put_status("a", writer={"tokens": 1})
    first = reader.read()[0].writer
    assert reader.read()[0].writer == first
    put_status("a", writer={"tokens": 2})
    assert reader.read()[0].writer["tokens"] == 2


def test_a_folder_that_does_not_exist_has_no_streams(tmp_path):
    assert StatusReader(tmp_path / "none").read() == []
