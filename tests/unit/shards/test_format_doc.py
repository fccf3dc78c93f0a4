"""docs/format.md is the truth: its reader reads the golden files, its bytes are theirs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec_tap.shards import ShardHeader, open_shards
from specdec_tap.shards.verify import verify_shards

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "v1"
DOC = (ROOT / "docs" / "format.md").read_text()
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def as_json(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("stream", sorted(EXPECTED))
def test_golden_shards_decode_to_what_they_always_did(stream):
    expected = EXPECTED[stream]
    with open_shards(GOLDEN, streams=[stream]) as store:
        assert not store.skipped and len(store) == len(expected["records"])
        assert store.header == ShardHeader.from_json(expected["header"])
        for record, truth in zip(store, expected["records"], strict=True):
            meta = dataclasses.asdict(record.meta)
            meta["token_ids"] = meta["token_ids"].tolist()
            assert as_json(meta) == truth["meta"]
            assert as_json([record.id, record.gaps, record.final_span]) == [
                truth["id"],
                truth["gaps"],
                truth["final_span"],
            ]
            assert record.aux(0, record.meta.pieces[-1].stop).tolist() == truth["aux_bits"]
            assert [record.final(a, b).tolist() for a, b in record.final_span] == truth["final_bits"]


@pytest.mark.parametrize("stream", [s for s in sorted(EXPECTED) if "lossless" in s])
def test_golden_states_follow_their_formula(stream):
    sys.path.insert(0, str(GOLDEN.parent))
    try:
        from make_v1 import states
    finally:
        sys.path.pop(0)
    dtype = stream.split("-")[0]
    with open_shards(GOLDEN, streams=[stream]) as store:
        bits = states(2, 39, store.header.hidden_size, dtype)
        assert np.array_equal(store[0].aux(), bits[:2].transpose(1, 0, 2))
        assert np.array_equal(store[0].final(19, 39), bits[2, 19:])


@pytest.mark.parametrize("stream", ["bfloat16-lossless", "bfloat16-lossless-compact"])
def test_the_reader_in_the_document_reads_the_golden_file(stream):
    (code,) = re.findall(r"```python\n(import json.*?)```", DOC, re.S)
    scope: dict[str, object] = {}
    exec(compile(code, "docs/format.md", "exec"), scope)
    header, blocks, records = scope["read_shard"](GOLDEN / stream / "000001.safetensors")
    expected = EXPECTED[stream]
    assert header == expected["header"]
    truth = expected["records"][0]
    assert records[0]["token_ids"].tolist() == truth["meta"]["token_ids"]
    aux = np.concatenate([b[1] for b in blocks])
    final = np.concatenate([b[3] for b in blocks])
    assert aux.tolist() == truth["aux_bits"] and [final.tolist()] == truth["final_bits"]
    assert [b[0] for b in blocks] == [0, 32] and len(code.splitlines()) < 160


def test_every_byte_in_the_worked_examples_is_in_the_golden_file_they_name():
    parts = re.split(r"`tests/golden/v1/([^`]*safetensors)`", DOC)
    lines = 0
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        data = (GOLDEN / name).read_bytes()
        for offset, shown in re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} )+)", text, re.M):
            lines += 1
            assert data[int(offset, 16) :].startswith(bytes.fromhex(shown)), (name, offset)
    assert lines == len(re.findall(r"^[0-9a-f]{8}  ", DOC, re.M)) >= 18


def test_golden_shards_verify(tmp_path):
    """All but the infinity that is in them on purpose."""
    for stream in EXPECTED:
        folder = tmp_path / stream
        shutil.copytree(GOLDEN / stream, folder / stream)
        report = verify_shards(folder)
        assert {f.code for f in report.findings if f.level == "error"} == {"not_finite"}


def test_header_fields_are_all_documented():
    for field in dataclasses.fields(ShardHeader):
        assert f"`{field.name}`" in DOC, field.name


def test_the_examples_in_shards_md_run(tmp_path, monkeypatch):
    from shardkit import make_header, write_request

    from specdec_tap.shards import ShardWriter

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with ShardWriter(tmp_path / "shards", make_header()) as writer:
        write_request(writer, 10, 20)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "shards.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/shards.md", "exec"), {})


def test_every_action_is_in_shards_md():
    import argparse

    from specdec_tap.cli import shards

    parser = argparse.ArgumentParser()
    shards.add_arguments(parser)
    (actions,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    text = (ROOT / "docs" / "shards.md").read_text()
    for name in actions.choices:
        assert re.search(rf"`[^`]*\b{name}\b", text), name
