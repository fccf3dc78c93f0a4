"""Shards in a store: ranges instead of files, uploads that survive a store that is away."""

from __future__ import annotations

import shutil
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
from shardkit import make_header, random_states, write_request

from specdec_tap.cli import main
from specdec_tap.errors import InputError, ShardError
from specdec_tap.shards import ShardWriter, open_shards, remote
from specdec_tap.shards.remote import Uploader
from specdec_tap.shards.verify import verify_shards

fsspec = pytest.importorskip("fsspec")


def local_shards(root: Path, shards: int = 3) -> None:
    writer = ShardWriter(root, make_header())
    for seed in range(2 * shards):
        write_request(writer, 20, 60, seed=seed, request_id=str(seed))
        if seed % 2:
            writer.rotate()
    writer.close()
    (root / "target").mkdir(exist_ok=True)
    (root / "target" / "config.json").write_text("{}")


@pytest.fixture
def memory_url():
    url = f"memory://{uuid.uuid4().hex}/shards"
    yield url
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def s3_url():
    """A real S3 server on this machine."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    old = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
    }
    fs = fsspec.filesystem("s3", **fsspec.config.conf["s3"])
    bucket = uuid.uuid4().hex
    fs.mkdir(bucket)
    yield f"s3://{bucket}/shards"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(old)
    server.stop()


@pytest.mark.parametrize("kind", ["memory_url", "file", "s3_url"])
def test_uploaded_shards_read_like_local_ones(tmp_path, kind, request):
    local_shards(tmp_path / "shards")
    url = f"file://{tmp_path}/store" if kind == "file" else request.getfixturevalue(kind)
    uploader = Uploader(tmp_path / "shards", url)
    report = uploader.run_once()
    assert len(report.uploaded) == 4 and not report.failed
    assert uploader.run_once().uploaded == []
    assert Uploader(tmp_path / "shards", url).run_once().already_there == 4
    with open_shards(url, cache_dir=tmp_path / "cache") as store:
        assert [r.meta.request_id for r in store] == ["0", "1", "2", "3", "4", "5"]
        for seed, record in enumerate(store):
            aux, _ = random_states(make_header(), 79, seed)
            assert np.array_equal(record.aux(), aux.transpose(1, 0, 2))
        assert (store.target_dir / "config.json").read_text() == "{}"
    assert all(p.stat().st_mode & 0o77 == 0 for p in (tmp_path / "cache").rglob("*"))


def test_reading_fetches_ranges_and_keeps_them(tmp_path, memory_url, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK_BYTES", 1 << 17)
    header = make_header(hidden_size=512)
    with ShardWriter(tmp_path / "shards", header) as writer:
        for seed in range(12):
            write_request(writer, 20, 60, seed=seed)
    Uploader(tmp_path / "shards", memory_url).run_once()
    size = (tmp_path / "shards" / "s0" / "000001.safetensors").stat().st_size
    fetched: list[int] = []
    kind = type(fsspec.filesystem("memory"))
    real = kind.cat_file

    def cat_file(self, path, start=None, end=None, **kwargs):
        fetched.append(end - start)
        return real(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(kind, "cat_file", cat_file)
    with open_shards(memory_url, cache_dir=tmp_path / "cache") as store:
        assert sum(fetched) == 1 << 16, "opening reads the header only"
        store[5].aux()
        assert sum(fetched) < size / 2
        seen = len(fetched)
        store[5].aux()
    with open_shards(memory_url, cache_dir=tmp_path / "cache") as store:
        store[5].aux()
        assert len(fetched) == seen, "a second reader is served from the cache"


def test_the_cache_stays_inside_its_size(tmp_path):
    cache = remote.RangeCache(tmp_path, 1000)
    for number in range(50):
        cache.put(f"r{number}", bytes(100))
    assert sum(p.stat().st_size for p in (tmp_path / "ranges").iterdir()) <= 1000
    assert cache.get("r49") == bytes(100)


class Away:
    """Makes a file system's uploads fail while ``broken`` is set."""

    def __init__(self, monkeypatch, only: str = "") -> None:
        self.broken = True
        kind = type(fsspec.filesystem("memory"))
        real = kind.put_file

        def put_file(fs, local, path, *args, **kwargs):
            if self.broken and only in path:
                raise ConnectionError("the store is away")
            return real(fs, local, path, *args, **kwargs)

        monkeypatch.setattr(kind, "put_file", put_file)


def test_nothing_is_lost_while_the_store_is_away(tmp_path, memory_url, monkeypatch):
    local_shards(tmp_path / "shards")
    away = Away(monkeypatch)
    uploader = Uploader(tmp_path / "shards", memory_url, remove_local=True)
    for _ in range(3):
        report = uploader.run_once()
        assert len(report.failed) == 3 and report.not_tried == 1
        assert "the store is away" in report.failed[0]
        assert report.removed_locally == 0
    assert len(open_shards(tmp_path / "shards")) == 6
    away.broken = False
    report = uploader.run_once()
    assert len(report.uploaded) == 4 and report.removed_locally == 2
    assert sorted(p.name for p in (tmp_path / "shards" / "s0").glob("*.safetensors")) == [
        "000003.safetensors"
    ]
    assert len(open_shards(memory_url, cache_dir=tmp_path / "cache")) == 6


def test_another_writers_shard_of_the_same_name_stays(tmp_path, memory_url):
    """Two machines import into streams of one name and upload to one URL: neither loses anything."""
    local_shards(tmp_path / "a")
    local_shards(tmp_path / "b")
    assert len(Uploader(tmp_path / "a", memory_url).run_once().uploaded) == 4
    fs, base = fsspec.core.url_to_fs(memory_url)
    before = {path: fs.cat_file(path) for path in fs.find(base)}
    report = Uploader(tmp_path / "b", memory_url, remove_local=True).run_once()
    assert len(report.failed) == 3 and report.removed_locally == 0 and not report.not_tried
    assert "another writer made" in report.failed[0] and memory_url in report.failed[0]
    assert {path: fs.cat_file(path) for path in fs.find(base)} == before
    assert len(open_shards(tmp_path / "b")) == 6


def test_a_rewritten_shard_replaces_what_the_store_has(tmp_path, memory_url):
    local_shards(tmp_path / "shards")
    Uploader(tmp_path / "shards", memory_url).run_once()
    with open_shards(tmp_path / "shards") as store:
        record_id = store[0].id
    assert main(["shards", "forget", str(tmp_path / "shards"), record_id]) == 0
    report = Uploader(tmp_path / "shards", memory_url).run_once()
    assert len(report.uploaded) == 1 and not report.failed
    assert len(open_shards(memory_url, cache_dir=tmp_path / "cache")) == 5
    # A file that was cut short in the store is written again.
    fs, base = fsspec.core.url_to_fs(memory_url)
    cut = f"{base}/{report.uploaded[0]}"
    fs.pipe_file(cut, fs.cat_file(cut)[:1000])
    assert Uploader(tmp_path / "shards", memory_url).run_once().uploaded == report.uploaded


def test_local_shards_go_from_the_front_only(tmp_path, memory_url, monkeypatch):
    """A shard that is missing in the middle would look like damage."""
    local_shards(tmp_path / "shards", 4)
    shutil.rmtree(tmp_path / "shards" / "target")
    away = Away(monkeypatch, only="000002")
    uploader = Uploader(tmp_path / "shards", memory_url, remove_local=True)
    report = uploader.run_once()
    assert len(report.failed) == 1 and report.removed_locally == 1
    assert verify_shards(tmp_path / "shards").ok
    away.broken = False
    assert uploader.run_once().removed_locally == 2
    assert verify_shards(tmp_path / "shards").ok


def test_a_background_uploader_follows_a_writer(tmp_path, memory_url):
    root = tmp_path / "shards"
    writer = ShardWriter(root, make_header())
    stop = threading.Event()
    thread = threading.Thread(target=Uploader(root, memory_url).follow, args=(stop, 0.01))
    thread.start()
    for seed in range(6):
        write_request(writer, 20, 60, seed=seed)
        writer.rotate()
    writer.close()
    stop.set()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(open_shards(memory_url, cache_dir=tmp_path / "cache")) == 6


def test_a_store_that_stays_away_is_an_error_with_the_url(tmp_path, memory_url, monkeypatch):
    local_shards(tmp_path / "shards", 1)
    Uploader(tmp_path / "shards", memory_url).run_once()
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)

    def fail(self, path, **kwargs):
        raise ConnectionError("reset")

    with open_shards(memory_url, cache_dir=tmp_path / "cache") as store:
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
        monkeypatch.setattr(remote.RangeCache, "get", lambda self, name: None)
        with pytest.raises(ShardError, match=r"memory://.*000001\.safetensors: ConnectionError: reset"):
            store[0]


def test_unknown_protocols_and_empty_stores_are_clear(tmp_path, memory_url):
    with pytest.raises(InputError, match="cannot be opened"):
        open_shards("nosuch://bucket/shards")
    with pytest.raises(InputError, match="no readable shard in 'memory://"):
        open_shards(memory_url, cache_dir=tmp_path / "cache")


def test_command_line_and_verify_take_urls(tmp_path, memory_url, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local_shards(tmp_path / "shards")
    (tmp_path / "shards" / "target" / "config.json").unlink()
    assert main(["shards", "upload", str(tmp_path / "shards"), memory_url]) == 0
    assert "uploaded 3 files" in capsys.readouterr().out
    for action in ("ls", "stats", "verify"):
        assert main(["shards", action, memory_url]) == 0
    assert verify_shards(memory_url).ok
