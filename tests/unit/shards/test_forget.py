"""Erasing one request leaves the others whole and nothing of its own."""

from __future__ import annotations

import dataclasses

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
    assert "erased 1 records and 2 blocks; 1 blocks stay" in capsys.readouterr().out
    assert main(["shards", "forget", str(tmp_path), "--request-id", "a"]) == 2
    assert "no record of request 'a'" in capsys.readouterr().err
    with open_shards(tmp_path) as store, pytest.raises(InputError, match="no record"):
        forget(store, ["s0/000007/0"])
