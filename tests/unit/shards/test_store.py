"""A folder of many shards: headers only, few descriptors, shards that come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header, random_states, write_request

from specdec_tap.cli import main
from specdec_tap.errors import ShardError
from specdec_tap.shards import ShardWriter, open_shards, stitch
from specdec_tap.shards.frames import HEADER_AREA_BYTES
from specdec_tap.shards.index import summarise
from specdec_tap.shards.source import MAX_OPEN_FILES, LocalSource
from specdec_tap.shards.verify import verify_shards


def many_shards(root: Path, count: int, records: int = 2) -> None:
    writer = ShardWriter(root, make_header(hidden_size=4, aux_layer_ids=(2,)))
    for shard in range(count):
        for record in range(records):
            write_request(writer, 3, 5, seed=shard * records + record, request_id=f"{shard}-{record}")
        writer.rotate()
    writer.close()


def test_opening_reads_headers_only_and_needs_few_descriptors(tmp_path, monkeypatch):
    many_shards(tmp_path, MAX_OPEN_FILES + 40)
    read: list[int] = []
    real = LocalSource.read
    monkeypatch.setattr(
        LocalSource, "read", lambda self, at, length: read.append(length) or real(self, at, length)
    )
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_shards(tmp_path) as store:
        assert set(read) == {HEADER_AREA_BYTES} and len(read) == MAX_OPEN_FILES + 40
        summary = summarise(store)
        assert summary["num_records"] == 2 * (MAX_OPEN_FILES + 40) and len(read) == MAX_OPEN_FILES + 40
        for number in np.random.default_rng(0).permutation(len(store)):
            record = store[int(number)]
            assert record.meta.request_id == f"{number // 2}-{number % 2}"
            assert record.aux().shape == (7, 1, 4)
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= MAX_OPEN_FILES + 2
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


@pytest.mark.matrix
def test_listing_1000_shards_of_100_000_records_takes_less_than_2_s(tmp_path, monkeypatch):
    many_shards(tmp_path, 1000, 100)
    read: list[int] = []
    real = LocalSource.read
    with monkeypatch.context() as patched:
        patched.setattr(
            LocalSource, "read", lambda self, at, length: read.append(length) or real(self, at, length)
        )
        open_shards(tmp_path).close()
    assert read == [HEADER_AREA_BYTES] * 1000
    for action in ("stats", "ls"):
        begun = time.perf_counter()
        assert main(["shards", action, str(tmp_path), "--json"]) == 0
        assert time.perf_counter() - begun < 2.0


def test_records_that_lost_a_part_with_a_removed_shard_are_left_out_and_counted(tmp_path):
    """Retention removes the oldest shards; by number, a record whose prefix was stored there has a gap."""
    header = make_header()
    writer = ShardWriter(tmp_path, header)
    meta, _, _ = write_request(writer, 65, 10)
    writer.rotate()
    second, _, _ = write_request(writer, 65, 30, seed=1)
    shared = dataclasses.replace(
        second, request_id="shared", pieces=(meta.pieces[0], *second.pieces[1:]), token_ids=second.token_ids
    )
    writer.append_record(shared)
    writer.close()
    (tmp_path / "s0" / "000001.safetensors").unlink()
    with open_shards(tmp_path) as store:
        assert len(store) == 2
        record = store[1]
        assert record.gaps == [(0, 64)] and record.removed_rows == 64
        assert record.aux(64).shape == (30, 3, 16) and record.final_span == [(64, 94)]
        assert next(s for s in stitch([record])).gaps == [(0, 64)]
        assert [r.id for r in store] == [store[0].id] and store.cut == {record.id}
    report = verify_shards(tmp_path)
    assert report.ok and report.counts["num_removed_rows"] == 64
    assert report.counts["warning blocks_removed"] == 1


def open_names() -> set[str]:
    names = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another test's file that was closed just now
            names.add(str(fd.readlink()))
    return names


def test_following_lets_go_of_removed_shards(tmp_path):
    """A trainer that follows a server must not keep the disk space of what retention removed."""
    many_shards(tmp_path, 3)
    with open_shards(tmp_path, follow=True) as store:
        assert all(record.aux().shape[0] == 7 for record in store)
        (tmp_path / "s0" / "000001.safetensors").unlink()
        removed = f"{tmp_path}/s0/000001.safetensors (deleted)"
        assert removed in open_names()
        assert store.refresh() == 0 and len(store) == 6
        assert removed not in open_names()
        with pytest.raises(ShardError, match="000001"):
            _ = store[0]
        assert store[2].aux().shape[0] == 7


def test_a_shard_missing_in_the_middle_is_an_error(tmp_path):
    header = make_header()
    writer = ShardWriter(tmp_path, header)
    write_request(writer, 5, 10)
    writer.rotate()
    meta, _, _ = write_request(writer, 5, 10, seed=1)
    writer.rotate()
    writer.append_record(meta)
    writer.close()
    (tmp_path / "s0" / "000002.safetensors").unlink()
    report = verify_shards(tmp_path)
    assert {f.code for f in report.findings if f.level == "error"} == {"lost_block"}


def test_one_file_or_one_stream_can_be_opened(tmp_path):
    many_shards(tmp_path, 3)
    assert len(open_shards(tmp_path / "s0")) == 6
    with open_shards(tmp_path / "s0" / "000002.safetensors") as store:
        assert [r.meta.request_id for r in store] == ["1-0", "1-1"] and len(store.shards) == 1


def test_command_line_lists_shows_and_judges(tmp_path, capsys):
    many_shards(tmp_path, 2)
    assert main(["shards", "ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [s["num_records"] for s in listed["shards"]] == [2, 2] and listed["skipped"] == []
    assert main(["shards", "ls", str(tmp_path), "--records", "--limit", "3", "--json"]) == 0
    assert [r["id"] for r in json.loads(capsys.readouterr().out)["records"]] == [
        "s0/000001/0",
        "s0/000001/1",
        "s0/000002/0",
    ]
    assert main(["shards", "show", str(tmp_path), "s0/000002/1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["request_id"] == "1-1" and shown["pieces"][0]["positions"] == [0, 7]
    assert main(["shards", "show", str(tmp_path), "1"]) == 0
    assert "0-1" in capsys.readouterr().out
    assert main(["shards", "stats", str(tmp_path)]) == 0
    assert "requests" in capsys.readouterr().out
    assert main(["shards", "verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["shards", "show", str(tmp_path), "s0/000009/0"]) == 2
    assert "no record 's0/000009/0'" in capsys.readouterr().err
    assert main(["shards", "ls", str(tmp_path / "nothing")]) == 2
    data = bytearray((tmp_path / "s0" / "000001.safetensors").read_bytes())
    data[HEADER_AREA_BYTES + 700] ^= 1
    (tmp_path / "s0" / "000001.safetensors").write_bytes(data)
    assert main(["shards", "verify", str(tmp_path)]) == 1
    assert main(["shards", "repair", str(tmp_path)]) == 0


def test_captured_text_cannot_drive_the_terminal(tmp_path, capsys):
    with ShardWriter(tmp_path, make_header()) as writer:
        write_request(writer, 3, 5, request_id="\x1b]0;owned\x07\x1b[2J")
    for action in (["ls", str(tmp_path), "--records"], ["show", str(tmp_path), "0"]):
        assert main(["shards", *action]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_ids_of_records_are_stable_while_shards_are_sealed(tmp_path):
    writer = ShardWriter(tmp_path, make_header())
    store = open_shards(tmp_path, follow=True)
    for seed in range(4):
        write_request(writer, 3, 5, seed=seed, request_id=str(seed))
        if seed % 2:
            writer.rotate()
        store.refresh()
    writer.close()
    store.refresh()
    assert [(r.id, r.meta.request_id) for r in store] == [
        ("s0/000001/0", "0"),
        ("s0/000001/1", "1"),
        ("s0/000002/0", "2"),
        ("s0/000002/1", "3"),
    ]
    assert all(i.sealed for i in store.shards)
    aux, _ = random_states(make_header(), 7, 3)
    assert np.array_equal(store[3].aux(), aux.transpose(1, 0, 2))
