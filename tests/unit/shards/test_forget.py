"""Erasing one request leaves the others whole and nothing of its own."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from shardkit import make_header, write_request

from specdec_tap.cli import main
from specdec_tap.errors import InputError, StreamBusyError
from specdec_tap.shards import Piece, ShardWriter, open_shards
from specdec_tap.shards.forget import forget
from specdec_tap.shards.repair import rebuild_sealed
from specdec_tap.shards.verify import verify_shards


def three_requests(root):
    """Requests a, b, c over two shards; c shares the first block of a."""
    with ShardWriter(root, make_header()) as writer:
        a, aux_a, _ = write_request(writer, 70, 60, seed=1, request_id="a")
        _, aux_b, _ = write_request(writer, 20, 10, seed=2, request_id="b")
        writer.rotate()
        c, aux_c, _ = write_request(writer, 70, 30, seed=3, request_id="c-own")
        shared = (Piece(0, a.pieces[0].block, 0, 64), *c.pieces[1:])
        writer.append_record(dataclasses.replace(c, request_id="c", pieces=shared))
    return aux_a, aux_b, aux_c


def test_a_forgotten_request_is_gone_and_the_rest_is_untouched(tmp_path):
    aux_a, aux_b, aux_c = three_requests(tmp_path)
    path = tmp_path / "s0" / "000001.safetensors"
    size = path.stat().st_size
    with open_shards(tmp_path) as store:
        own = [p.block for p in store[0].meta.pieces][1:]
        report = forget(store, ["s0/000001/0"])
    assert (report.num_records, report.num_blocks, report.kept_blocks) == (1, 2, 1)
    assert report.kept_for == ("s0/000002/1",)  # c, which shares the first block
    assert report.shards == (path,) and path.stat().st_size < size
    with open_shards(tmp_path) as store:
        assert [r.meta.request_id for r in store] == ["b", "c-own", "c"]
        assert np.array_equal(store[0].aux(), aux_b.transpose(1, 0, 2))
        assert np.array_equal(store[1].aux(), aux_c.transpose(1, 0, 2))
        assert np.array_equal(store[2].aux(0, 64), aux_a.transpose(1, 0, 2)[:64])
        blocks, _ = next(store.files()).index()
        assert all(blocks["num_rows"][ref.block] == 0 for ref in own)
    assert b'"request_id":"a"' not in path.read_bytes()
    assert verify_shards(tmp_path).ok
    rebuild_sealed(path)
    assert verify_shards(tmp_path).ok


def test_a_living_writer_is_not_disturbed(tmp_path):
    three_requests(tmp_path)
    before = (tmp_path / "s0" / "000001.safetensors").read_bytes()
    writer = ShardWriter(tmp_path, make_header())
    with open_shards(tmp_path) as store, pytest.raises(StreamBusyError, match="its writer is alive"):
        forget(store, ["s0/000001/0"])
    writer.close()
    assert (tmp_path / "s0" / "000001.safetensors").read_bytes() == before


def test_forgetting_from_the_command_line(tmp_path, capsys):
    three_requests(tmp_path)
    assert main(["shards", "forget", str(tmp_path), "--request-id", "a"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "erased 1 records and 2 blocks; 1 blocks stay because other requests share them:\n  s0/000002/1\n"
    )
    assert main(["shards", "forget", str(tmp_path), "--request-id", "a"]) == 2
    assert "no record of request 'a'" in capsys.readouterr().err
    with open_shards(tmp_path) as store, pytest.raises(InputError, match="no record"):
        forget(store, ["s0/000007/0"])


def test_a_long_list_of_users_is_cut_short_but_in_json(tmp_path, capsys):
    with ShardWriter(tmp_path, make_header()) as writer:
        a, _, _ = write_request(writer, 70, 60, seed=1, request_id="a")
        for number in range(30):
            writer.append_record(dataclasses.replace(a, request_id=f"r{number}"))
    assert main(["shards", "forget", str(tmp_path), "s0/000001/0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1], lines[20], lines[21:]) == (
        "  s0/000001/0", "  s0/000001/19", ["  and 10 more; --json names all"],
    )  # fmt: skip
    assert main(["shards", "forget", str(tmp_path), "s0/000001/0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["kept_for"]) == 29


def test_who_still_uses_a_block_is_named_as_it_can_be_found_afterwards(tmp_path, capsys):
    """d and e use a block of a; their ordinals move up when a and b go."""
    with ShardWriter(tmp_path, make_header()) as writer:
        a, _, _ = write_request(writer, 70, 60, seed=1, request_id="a")
        write_request(writer, 20, 10, seed=2, request_id="b")
        shared = (Piece(0, a.pieces[0].block, 0, 64),)
        for name in ("d", "e"):
            writer.append_record(dataclasses.replace(a, request_id=name, pieces=shared))
    assert main(["shards", "forget", str(tmp_path), "s0/000001/0", "s0/000001/1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept_for"] == ["s0/000001/0", "s0/000001/1"]
    with open_shards(tmp_path) as store:
        assert [store.find(i).meta.request_id for i in told["kept_for"]] == ["d", "e"]
    assert main(["shards", "forget", str(tmp_path), *told["kept_for"]]) == 0
    assert capsys.readouterr().out == (
        "erased 2 records and 1 blocks; 0 blocks stay because other requests share them\n"
    )
