"""Truncation, flipped bytes, killed writers, full disks, hostile files: an error with a name, never wrong
data."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard
from shardkit import make_header, random_states, write_request

from specdec_tap.errors import (
    CorruptShardError,
    IncompatibleShardsError,
    IncompleteShardError,
    InputError,
    ShardError,
    ShardWriteError,
    UnsupportedFormatError,
)
from specdec_tap.shards import ShardWriter, decode_block, encode_block, open_shards
from specdec_tap.shards.frames import (
    FRAME_HEAD_BYTES,
    HEADER_AREA_BYTES,
    INDEX,
    RECORD,
    Totals,
    pack_frame_head,
    pack_header_area,
    unpack_header_area,
)
from specdec_tap.shards.records import MAX_FRAMES, decode_index, decode_record, encode_record
from specdec_tap.shards.repair import abandoned_journals, is_locked, rebuild_sealed, seal_journal
from specdec_tap.shards.verify import verify_shards

HERE = Path(__file__).parent


def small_shard(root: Path, *, seal: bool = True, requests: int = 2) -> Path:
    """A few KB: tiny states, several blocks and records."""
    header = make_header(hidden_size=4, aux_layer_ids=(2,), block_tokens=8)
    writer = ShardWriter(root, header)
    for seed in range(requests):
        write_request(writer, 5, 9, seed=seed)
    if seal:
        writer.close()
        return root / "s0" / "000001.safetensors"
    path = writer.path
    # Let go without sealing, as a killed process does: the lock dies with the descriptor.
    os.close(writer._fd)
    os.close(writer._lock_fd)
    writer._closed = True
    return path


def contents(path: Path) -> list[tuple[list[int], bytes]]:
    with open_shards(path, follow=True) as store:
        return [(r.token_ids.tolist(), r.aux().tobytes()) for r in store]


def test_truncation_at_every_byte_of_a_sealed_shard_is_refused(tmp_path):
    path = small_shard(tmp_path)
    whole = path.read_bytes()
    # The header area is mostly spaces; every byte behind it, and a sample inside it.
    for size in [*range(0, HEADER_AREA_BYTES, 97), *range(HEADER_AREA_BYTES, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="no readable shard"):
            open_shards(path)


def test_truncation_at_every_byte_of_a_journal_gives_only_whole_records(tmp_path):
    path = small_shard(tmp_path, seal=False, requests=3)
    whole = path.read_bytes()
    truth = contents(path)
    assert len(truth) == 3
    seen = set()
    for size in range(HEADER_AREA_BYTES - 5, len(whole)):
        path.write_bytes(whole[:size])
        found = contents(path)
        assert found == truth[: len(found)]
        seen.add(len(found))
        if size % 7 == 0:
            copy = path.with_name("000009.open")
            copy.write_bytes(whole[:size])
            try:
                report = seal_journal(copy)
            except IncompleteShardError:
                assert not found
                copy.unlink()
                continue
            assert report.num_records == len(found)
            report.path.unlink()
    assert seen == {0, 1, 2}


def test_any_flipped_byte_is_noticed(tmp_path):
    path = small_shard(tmp_path, requests=1)
    whole = bytearray(path.read_bytes())
    assert verify_shards(tmp_path).ok
    rng = random.Random(0)
    positions = {*range(0, HEADER_AREA_BYTES, 201), *range(0, 1600, 2), *range(HEADER_AREA_BYTES, len(whole))}
    for at in sorted(positions):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert not verify_shards(tmp_path).ok, f"flip at byte {at} of {len(whole)} went unnoticed"


def test_damaged_block_fails_alone_and_names_the_file(tmp_path):
    path = small_shard(tmp_path, requests=3)
    truth = contents(path)
    with open_shards(tmp_path) as store:
        offset = int(next(store.files()).index()[0]["offset"][2])
    data = bytearray(path.read_bytes())
    data[offset + 60] ^= 1
    path.write_bytes(data)
    with open_shards(tmp_path) as store:
        assert store[0].aux().tobytes() == truth[0][1] and store[2].aux().tobytes() == truth[2][1]
        with pytest.raises(CorruptShardError, match=r"000001\.safetensors: block 2: checksum") as err:
            store[1].aux()
        assert err.value.path == path and err.value.offset == offset


def test_damaged_record_is_skipped_named_and_counted(tmp_path):
    path = small_shard(tmp_path, requests=3)
    with open_shards(tmp_path) as store:
        offset = int(next(store.files()).index()[1]["offset"][1])
    data = bytearray(path.read_bytes())
    data[offset + 50] ^= 1
    path.write_bytes(data)
    with open_shards(tmp_path) as store:
        assert [r.id for r in store] == ["s0/000001/0", "s0/000001/2"]
        assert [str(p.path) for p in store.skipped] == [str(path)]
        assert "record 1" in store.skipped[0].message


def test_repair_keeps_blocks_around_damage_and_saves_what_it_cuts(tmp_path):
    path = small_shard(tmp_path, seal=False, requests=4)
    truth = contents(path)
    data = bytearray(path.read_bytes())
    with open_shards(tmp_path) as store:
        blocks, records = next(store.files()).index()
    data[int(blocks["offset"][1]) + 50] ^= 1  # payload: its length is still known
    data[int(records["offset"][2]) + 3] ^= 1  # head: nothing behind it can be numbered
    path.write_bytes(data)
    report = seal_journal(path)
    assert report.damaged_frames == 1 and report.num_records == 2
    assert report.tail_path is not None and report.tail_path.stat().st_size == report.cut_bytes > 0
    with open_shards(tmp_path) as store:
        assert store[1].aux().tobytes() == truth[1][1]
        with pytest.raises(ShardError):
            store[0].aux()


def test_rebuild_restores_a_shard_with_a_damaged_index_or_header(tmp_path):
    path = small_shard(tmp_path, requests=3)
    whole, truth = path.read_bytes(), contents(path)
    for at in (20, 5000, len(whole) - 3):
        data = bytearray(whole)
        data[at] ^= 4
        path.write_bytes(data)
        assert not verify_shards(tmp_path).ok
        rebuild_sealed(path)
        assert path.read_bytes() == whole and contents(path) == truth


def start_writer(root: Path) -> tuple[int, int]:
    """Fork a process that writes requests for ever and acknowledges each; ``(pid, pipe to read from)``."""
    reader, pipe = os.pipe()
    pid = os.fork()
    if pid:
        os.close(pipe)
        return pid, reader
    try:
        header = make_header(hidden_size=64)
        writer = ShardWriter(root, header, max_shard_bytes=300_000, fsync_interval_s=0.05)
        for number in range(10**6):
            write_request(writer, 20, 50, seed=number % 7, request_id=str(number))
            os.write(pipe, b"%d\n" % number)
    finally:
        os._exit(1)


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.matrix)])
def test_kill_at_random_moments_loses_nothing_acknowledged(tmp_path, kills):
    """The parent kills the writer after a random time; every acknowledged request must still be readable."""
    rng = random.Random(1)
    total = 0
    for _ in range(kills):
        pid, pipe = start_writer(tmp_path)
        first = os.read(pipe, 2)
        assert first == b"0\n", "the writer did not start"
        time.sleep(rng.uniform(0, 0.25))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(pipe, "rb") as acknowledgements:
            acknowledged = 1 + len(acknowledgements.read().split())
        # Before repair, with the abandoned journal, and after.
        for repair in (False, True):
            if repair:
                for path in abandoned_journals(tmp_path):
                    seal_journal(path)
            with open_shards(tmp_path, follow=True) as store:
                assert len(store) - total in (acknowledged, acknowledged + 1)
                for number in range(total, total + acknowledged):
                    record = store[number]
                    assert record.meta.request_id == str(number - total)
                    aux, _ = random_states(make_header(hidden_size=64), 69, (number - total) % 7)
                    assert np.array_equal(record.aux(), aux.transpose(1, 0, 2))
                count = len(store)
        total = count
        assert not list(abandoned_journals(tmp_path))
    assert verify_shards(tmp_path).ok


def test_file_size_limit_in_the_middle_of_a_frame_leaves_a_valid_journal(tmp_path):
    """RLIMIT_FSIZE stops a write half way, as a full disk does; lifting it lets the writer go on."""
    script = """
        import json, resource, signal, sys
        sys.path.insert(0, sys.argv[2])
        from shardkit import make_header, write_request
        from specdec_tap.errors import ShardWriteError
        from specdec_tap.shards import ShardWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = ShardWriter(sys.argv[1], make_header(hidden_size=64))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_001, hard))
        good = failed = 0
        for number in range(30):
            try:
                write_request(writer, 20, 50, seed=number, request_id=str(number))
                good += 1
            except ShardWriteError as err:
                assert isinstance(err, OSError) and "File too large" in str(err), err
                failed += 1
                if failed == 3:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert failed == 3, failed
        writer.close()
        print(json.dumps([good, failed]))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(HERE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    good, failed = json.loads(out.stdout)
    assert good == 27 and failed == 3
    with open_shards(tmp_path) as store:
        assert len(store) == good
        for record in store:
            aux, _ = random_states(make_header(hidden_size=64), 69, int(record.meta.request_id))
            assert np.array_equal(record.aux(), aux.transpose(1, 0, 2))
    assert verify_shards(tmp_path).ok


def test_a_shard_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Power-cut order: the file is synced, then renamed, then the folder is synced; for a new journal too."""
    order = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd):
        order.append(("sync", Path(f"/proc/self/fd/{fd}").readlink().name))
        real_fsync(fd)

    def rename(path, to):
        order.append(("rename", path.name, Path(to).name))
        return real_rename(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    writer = ShardWriter(tmp_path, make_header())
    write_request(writer, 5, 9)
    writer.close()
    assert order == [
        ("sync", ".000001.creating"), ("rename", ".000001.creating", "000001.open"), ("sync", "s0"),
        ("sync", "000001.open"), ("rename", "000001.open", "000001.safetensors"), ("sync", "s0"),
    ]  # fmt: skip


def test_failing_disk_while_sealing_leaves_a_journal_that_goes_on(tmp_path, monkeypatch):
    """The INDEX does not fit: the writer reports it, keeps the journal, and seals once there is room."""
    writer = ShardWriter(tmp_path, make_header())
    write_request(writer, 5, 9)
    real, broken = os.pwritev, True

    def pwritev(fd, buffers, offset, *rest):
        if broken and fd == writer._fd:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset, *rest)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for _ in range(2):
        with pytest.raises(ShardWriteError, match=r"cannot seal.*No space left on device; free some space"):
            writer.rotate()
        assert len(contents(tmp_path)) == 1
    broken = False
    write_request(writer, 5, 9, seed=1)
    writer.close()
    assert len(contents(tmp_path)) == 2 and verify_shards(tmp_path).ok


def test_min_free_bytes_is_kept(tmp_path):
    writer = ShardWriter(tmp_path, make_header(), min_free_bytes=1 << 60)
    with pytest.raises(ShardWriteError, match="min_free_bytes"):
        write_request(writer, 5, 9)
    writer.close()


def test_abandoned_journal_is_sealed_by_the_next_writer(tmp_path):
    path = small_shard(tmp_path, seal=False)
    assert not is_locked(path)
    truth = contents(tmp_path)
    with ShardWriter(tmp_path, make_header()) as writer:
        assert writer.shard == 2 and is_locked(writer.path)
    assert not path.exists() and contents(tmp_path / "s0" / "000001.safetensors") == truth


def test_numbers_are_never_used_twice(tmp_path):
    small_shard(tmp_path).unlink()
    with ShardWriter(tmp_path, make_header()) as writer:
        assert writer.shard == 2


def test_files_are_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        root = tmp_path / "shards"
        small_shard(root)
        small_shard(root / "journal", seal=False)
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


# ---- hostile files


@pytest.fixture
def small_memory():
    """Fail the test if anything takes more than 1 GiB beyond what is mapped now."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize("length", [0, 1, 8, 16376, 16377, 2**31, 2**60, 2**64 - 1])
def test_absurd_header_lengths_are_refused(tmp_path, small_memory, length):
    path = small_shard(tmp_path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 0, length)
    if length == 16376:
        data[8:9] = b"["
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"000001\.safetensors"):
        open_shards(tmp_path)


def test_foreign_safetensors_is_named_and_left_alone(tmp_path, small_memory):
    from safetensors.numpy import save_file

    small_shard(tmp_path)
    foreign = tmp_path / "s0" / "000002.safetensors"
    save_file({"x": np.zeros(10000, np.float32)}, foreign)
    before = foreign.read_bytes()
    with open_shards(tmp_path) as store:
        assert len(store) == 2
        assert [p.path for p in store.skipped] == [foreign]
        assert "not a shard" in store.skipped[0].message
    assert foreign.read_bytes() == before


def test_symlinks_pipes_and_other_names_are_not_followed(tmp_path):
    secret = tmp_path / "secret" / "000001.safetensors"
    secret.parent.mkdir()
    shutil.move(small_shard(tmp_path / "elsewhere"), secret)
    root = tmp_path / "shards"
    small_shard(root)
    (root / "s0" / "000002.safetensors").symlink_to(secret)
    (root / "linked").symlink_to(secret.parent)
    os.mkfifo(root / "s0" / "000003.open")
    (root / "s0" / "payload.pt").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with open_shards(root) as store:
        assert len(store) == 2 and [i.shard for i in store.shards] == [1]
        problems = {p.path.name: p.message for p in store.skipped}
    assert set(problems) == {"000002.safetensors", "linked", "000003.open", "payload.pt"}
    assert "symbolic link" in problems["000002.safetensors"]
    assert "not a regular file" in problems["000003.open"]
    assert secret.is_file()


def test_renamed_shard_is_refused(tmp_path):
    path = small_shard(tmp_path)
    path.rename(path.with_name("000005.safetensors"))
    with pytest.raises(InputError, match="number 5 by its name and 1 by its header"):
        open_shards(tmp_path)


def zstd_bomb(size: int) -> bytes:
    """A few KB that unpack to ``size`` bytes, size declared."""
    compressor = zstandard.ZstdCompressor(level=19).compressobj(size=size)
    chunk = bytes(1 << 20)
    return b"".join(compressor.compress(chunk) for _ in range(size >> 20)) + compressor.flush()


def test_zip_bombs_are_refused_before_any_memory_is_taken(small_memory):
    bomb = zstd_bomb(2 << 30)
    assert len(bomb) < 300_000
    header = make_header(hidden_size=1024)
    aux, _ = random_states(header, 64)
    good = encode_block(header, position=0, aux=aux)
    head = good[:32]
    with pytest.raises(CorruptShardError, match="by its own account"):
        decode_block(header, head + struct.pack("<BI", 1, len(bomb)) + bomb)
    record = struct.pack("<HHIIII", 1, 0, 100, 10, 0, 0)
    with pytest.raises(CorruptShardError, match="by its own account"):
        decode_record(record + bomb)
    with pytest.raises(CorruptShardError, match="INDEX head"):
        decode_index(struct.pack("<HHIII", 1, 0, 2**31, 2**31, 0) + bomb, 1000)
    undeclared = zstandard.ZstdCompressor().compressobj()
    data = undeclared.compress(bytes(1 << 20)) + undeclared.flush()
    with pytest.raises(CorruptShardError, match="by its own account"):
        decode_record(record + data)


def test_a_sparse_shard_whose_index_claims_too_many_frames_is_refused_by_name(tmp_path, small_memory):
    """The file has room for them, header and checksums are right, and on the disk it is a few KB."""
    path = small_shard(tmp_path)
    entries = MAX_FRAMES * 8
    header = unpack_header_area(path.read_bytes()[:HEADER_AREA_BYTES], path.stat().st_size).header
    frames_bytes = entries * FRAME_HEAD_BYTES
    payload = struct.pack("<HHIII", 1, 0, entries, 0, 0) + zstd_bomb(entries * 28)
    frame = pack_frame_head(INDEX, entries, payload) + payload
    path = path.with_name("000002.safetensors")
    totals = Totals(num_blocks=entries)
    with path.open("wb") as file:
        area = pack_header_area(dataclasses.replace(header, shard=2), totals, frames_bytes, len(frame))
        file.write(area)
        file.truncate(HEADER_AREA_BYTES + frames_bytes)
        file.seek(0, os.SEEK_END)
        file.write(frame)
    assert path.stat().st_size > 1 << 31 and path.stat().st_blocks * 512 < 4 << 20
    with open_shards(tmp_path) as store:
        with pytest.raises(
            CorruptShardError, match=r"000002\.safetensors: INDEX head says .*67,108,864 blocks"
        ):
            list(store.files())[1].index()
        assert len(list(store)) == 2  # those of the whole shard
    report = verify_shards(tmp_path)
    assert not report.ok and any("000002" in str(finding) for finding in report.findings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 0),
        ("num_tokens", 2**32 - 1),
        ("num_spans", 2**31),
        ("num_pieces", 2**32 - 1),
        ("json_bytes", 2**32 - 1),
    ],
)
def test_absurd_record_sizes_are_refused(small_memory, field, value):
    fields = {"version": 1, "zero": 0, "json_bytes": 2, "num_tokens": 1, "num_spans": 0, "num_pieces": 0}
    fields[field] = value
    with pytest.raises(CorruptShardError):
        decode_record(
            struct.pack("<HHIIII", *fields.values()) + zstandard.ZstdCompressor().compress(b"{}" + bytes(4))
        )


def test_absurd_shapes_in_a_header_are_refused(small_memory):
    from specdec_tap.shards.layout import ShardHeader

    good = make_header().to_json()
    for change in (
        {"aux_layer_ids": [5, 4]},
        {"aux_layer_ids": [-1]},
        {"aux_layer_ids": [99]},
        {"aux_layer_ids": list(range(10**6))},
        {"block_tokens": 0},
        {"block_tokens": 2**40},
        {"block_tokens": True},
        {"dtype": "float8"},
        {"codec": "pickle"},
        {"final_hidden": "maybe"},
        {"layer_convention": "residual_out"},
        {"stream": "../../etc"},
        {"stream": "target"},
        {"shard": -1},
        {"engine": {"x": [1]}},
        {"created_unix_s": "now"},
        {"target": good["target"] | {"hidden_size": 2**40}},
        {"target": good["target"] | {"hidden_size": 2**18, "num_hidden_layers": 300}, "block_tokens": 16384},
        {"target": good["target"] | {"vocab_size": -5}},
        {"target": []},
    ):
        with pytest.raises(CorruptShardError):
            ShardHeader.from_json(good | change)
    for name in good:
        with pytest.raises(CorruptShardError, match=name):
            ShardHeader.from_json({k: v for k, v in good.items() if k != name})
    with pytest.raises(UnsupportedFormatError, match="Update specdec-tap"):
        ShardHeader.from_json(good | {"format_version": 2})
    assert ShardHeader.from_json(good | {"new_optional_field": 1}) == make_header()


def test_a_record_that_points_at_the_wrong_block_is_refused(tmp_path):
    header = make_header(hidden_size=4, aux_layer_ids=(2,), block_tokens=8)
    with ShardWriter(tmp_path, header) as writer:
        meta, _, _ = write_request(writer, 5, 20)
        wrong = [meta.pieces[0], meta.pieces[1], meta.pieces[2]]
        wrong[1], wrong[2] = (
            type(wrong[1])(wrong[1].position, wrong[2].block, 0, 8),
            type(wrong[2])(wrong[2].position, wrong[1].block, 0, 8),
        )
        writer.append_record(dataclasses.replace(meta, pieces=tuple(wrong)))
    with open_shards(tmp_path) as store:
        assert len(store[0].aux()) == 24
        with pytest.raises(CorruptShardError, match="is not the one that a record points at"):
            store[1].aux()
    assert not verify_shards(tmp_path).ok


def test_a_frame_in_the_wrong_place_is_noticed(tmp_path):
    """A valid frame copied over another of the same size has the wrong number."""
    path = small_shard(tmp_path, requests=2)
    data = path.read_bytes()
    record = encode_record(open_shards(tmp_path)[0].meta)
    foreign = pack_frame_head(RECORD, 1, record) + record
    path.write_bytes(data[:HEADER_AREA_BYTES] + foreign + data[HEADER_AREA_BYTES + len(foreign) :])
    assert not verify_shards(tmp_path).ok


def test_mixed_targets_are_refused_with_the_differences_listed(tmp_path):
    small_shard(tmp_path)
    with ShardWriter(tmp_path, make_header(stream="s1", name="other", aux_layer_ids=(2, 4, 6))) as writer:
        write_request(writer, 5, 9)
    with pytest.raises(
        IncompatibleShardsError, match=r"aux_layer_ids is \(2,\) and \(2, 4, 6\).*target\.name"
    ):
        open_shards(tmp_path)


def test_empty_and_missing_folders_have_clear_errors(tmp_path):
    with pytest.raises(InputError, match="no readable shard"):
        open_shards(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        open_shards(tmp_path / "nothing")
