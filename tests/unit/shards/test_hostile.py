"""Files whose checksums are right and whose fields are not: a consistent value or an error with a name."""

from __future__ import annotations

import json
import resource
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - what it maps is not what a file costs
from forge import CHANGES, Forged, change_index, change_totals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardkit import make_header, write_request

from specdec_tap.errors import CorruptShardError, ShardError, SpecdecTapError
from specdec_tap.shards import ShardWriter, open_shards, stitch
from specdec_tap.shards.frames import FRAME_HEAD_BYTES, MAGIC, unpack_frame_head
from specdec_tap.shards.index import shard_row, summarise
from specdec_tap.shards.layout import parse_json
from specdec_tap.shards.repair import rebuild_sealed, seal_journal
from specdec_tap.shards.samples import SampleReader
from specdec_tap.shards.verify import verify_shards

ROOM = 512 << 20
"""Most memory beyond what is mapped: the shards here are a few KB."""
KINDS = [("bfloat16", "lossless"), ("float16", "lossless"), ("float32", "lossless"), ("bfloat16", "fp8"),
         ("bfloat16", "int8")]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[tuple[str, str], Forged]:
    """Small shards in pieces: three blocks and two records, one block shared; a target of their size."""
    shards = {}
    for dtype, codec in KINDS:
        root = tmp_path_factory.mktemp(f"{dtype}-{codec}")
        header = make_header(dtype=dtype, codec=codec, block_tokens=8)
        with ShardWriter(root, header) as writer:
            write_request(writer, 5, 9)
            write_request(writer, 4, 5, seed=1)
        shards[dtype, codec] = Forged.of(root / "s0" / "000001.safetensors")
    return shards


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Head and embedding of a model that the shards could be of."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("target")
    rng = np.random.default_rng(0)
    tables = {
        name: rng.standard_normal((100, 16), np.float32)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(tables | {"model.norm.weight": np.ones(16, np.float32)}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
              "vocab_size": 100,
              "num_hidden_layers": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bounded():
    """At most ``ROOM``: beyond it allocations fail, and no reader may raise MemoryError."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, old[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    resource.setrlimit(resource.RLIMIT_AS, old)


class Refusals:
    """Runs steps that may each be refused, by an error that names the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, err, trace) -> bool:
        if isinstance(err, SpecdecTapError):
            assert str(self.root) in str(err) or "s0/000001/" in str(err), f"the error names no file: {err!r}"
            assert str(err).replace("\n", "").isprintable(), f"an error for a terminal: {err!r}"
            return True
        return False


def read_everything(root: Path) -> int:
    """Everything that readers do; how many records could be read whole."""
    refused, whole = Refusals(root), 0
    with open_shards(root, follow=True) as store:
        rows = [shard_row(info) for info in store.shards]
        json.dumps([rows, [str(p) for p in store.skipped]], allow_nan=False)
        if store.shards:
            json.dumps(summarise(store), allow_nan=False, ensure_ascii=False).encode()
        for record in store:
            with refused:
                whole += read_record(record)
        for number in range(len(store) if len(store) < 100 else 0):
            with refused:
                assert store[number].meta.num_tokens >= 1
        with refused:
            for sequence in stitch(store):
                with refused:
                    read_record(sequence)
        for problem in store.skipped:
            assert str(root) in str(problem) and str(problem).isprintable()
    with refused:
        reader = SampleReader(root)
        for number in range(min(len(reader), 100)):
            with refused:
                sample = reader[number]
                assert len(sample["aux_bits"]) == len(sample["state_mask"]) == len(sample["input_ids"]) - 1
    return whole


def read_record(record) -> bool:
    """Read one record; whether it is whole and what it gives fits together."""
    meta, header, rows = record.meta, record.header, record.num_rows
    json.dumps([meta.request_id, meta.lora, meta.sampling, meta.flags, meta.started_unix_s], allow_nan=False,
               ensure_ascii=False).encode()  # fmt: skip
    assert rows == len(record.token_ids) - 1 and int(record.token_ids.min()) >= 0
    at = 0
    for span in record.spans:
        assert at <= span.start < span.stop <= rows + 1
        at = span.stop
    at = 0
    for start, stop in [*record.gaps, (rows, rows)]:
        assert at <= start <= stop <= rows
        assert record.aux(at, start).shape == (start - at, header.num_aux, header.hidden_size)
        at = stop
    for start, stop in record.final_span:
        assert record.final(start, stop).shape == (stop - start, header.hidden_size)
    if record.gaps:
        with pytest.raises(ShardError):
            record.aux()
    return True


def frames_of(data: bytes) -> set[bytes]:
    """All frames that are whole, wherever they are."""
    found, at = set(), data.find(MAGIC)
    while at >= 0:
        try:
            head = unpack_frame_head(data[at : at + FRAME_HEAD_BYTES], at)
            if head.kind in (2, 3) and len(data) >= at + FRAME_HEAD_BYTES + head.payload_bytes:
                found.add(data[at : at + FRAME_HEAD_BYTES + head.payload_bytes])
        except ShardError:
            pass
        at = data.find(MAGIC, at + 1)
    return found


def judge(root: Path, path: Path, target: Path) -> None:
    """Read, verify and repair one file."""
    before = path.read_bytes()
    whole = read_everything(root)
    with Refusals(root):
        report = verify_shards(root, target_dir=target)
        structural = {f.code for f in report.findings if f.level == "error"}
        structural -= {
            "tokens_disagree",
            "tokens_improbable",
            "norm_mismatch",
            "aux_shifted",
            "not_finite",
            "zero_row",
        }
        about_shards = [f for f in report.findings if not f.code.startswith("target_")]
        unnamed = [f for f in about_shards if str(root) not in f.where and "s0/000001" not in f.where]
        assert not unnamed, unnamed
        json.dumps(report.to_json(), allow_nan=False)
        if not structural:
            num_records, num_cut = (report.counts[f"num_records{x}"] for x in ("", "_with_removed_rows"))
            assert whole == num_records - num_cut
            with open_shards(root, follow=True) as store:
                assert len(store) == num_records and not store.skipped
    assert path.read_bytes() == before
    with Refusals(root):
        (seal_journal if path.suffix == ".open" else rebuild_sealed)(path)
    after = b"".join(p.read_bytes() for p in sorted(path.parent.iterdir()))
    lost = frames_of(before) - frames_of(after)
    assert not lost, f"repair lost {len(lost)} frames"
    read_everything(root)


def forged(path: Path, shard: Forged, draw) -> None:
    """Write ``shard`` with one change, or with two, the first of what says how many there are and where."""
    shard = shard.copy()
    if draw(st.booleans()):
        draw(st.sampled_from([change_totals, change_index]))(shard, draw)
    draw(st.sampled_from(CHANGES))(shard, draw)
    shard.write(path)


EXAMPLES = [120, pytest.param(5000, marks=pytest.mark.matrix)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["000001.safetensors", "000001.open"])
def test_any_field_changed_is_read_consistently_or_refused_by_name(
    tmp_path, good, target, bounded, name, examples
):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 1000,  # the default run tries the same files each time
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data):
        root = tmp_path / "shards"
        shutil.rmtree(root, ignore_errors=True)
        path = root / "s0" / name
        path.parent.mkdir(parents=True)
        shard = good[data.draw(st.sampled_from(KINDS))]
        forged(path, shard, data.draw)
        judge(root, path, target)

    check()


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_json_that_no_writer_writes_is_refused(text):
    with pytest.raises(CorruptShardError, match="header is not valid JSON"):
        parse_json(text, "header")
    with pytest.raises(CorruptShardError, match="header is not valid JSON"):
        parse_json(text.encode(), "header")


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"a": "\ud800"}'])
def test_half_a_character_becomes_a_question_mark(text):
    assert parse_json(text, "header") == {"a": "?"}
    assert parse_json(text.encode("utf-8", "surrogatepass"), "header")["a"].strip("?") == ""
    assert parse_json('{"a": "\\ud83d\\ude00"}', "header") == {"a": "😀"}
