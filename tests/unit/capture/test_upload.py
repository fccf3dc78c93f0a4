"""Sealed shards go to a real S3 server in the background, and nothing is removed before it is there."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fake_engine import NUM_AUX, FakeRunner, make_header, make_tap, new_request, schedule

from specdec_tap import open_shards
from specdec_tap.capture import upload
from specdec_tap.capture.retention import enforce
from specdec_tap.capture.upload import BackgroundUpload
from specdec_tap.config import TapConfig
from specdec_tap.errors import ConfigError
from specdec_tap.shards import RecordMeta, ShardWriter, Span
from specdec_tap.shards.codec import encode_block

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

HIDDEN = 16


class Store:
    """A moto server that can go away and come back at the same address."""

    def __init__(self) -> None:
        self.server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]
        self.options = {
            "key": "test",
            "secret": "test",
            "endpoint_url": f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1},
        }
        self.bucket = uuid.uuid4().hex
        self.url = f"s3://{self.bucket}/shards"
        self.fs().mkdir(self.bucket)

    def fs(self):
        return fsspec.filesystem("s3", skip_instance_cache=True, **self.options)

    def names(self) -> list[str]:
        return sorted(path.split("/", 1)[1] for path in self.fs().find(self.bucket))

    def leave(self) -> None:
        self.server.stop()

    def come_back(self) -> None:
        self.server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    monkeypatch.setitem(fsspec.config.conf, "s3", made.options)
    for name in ("key", "secret", "endpoint_url"):  # for other processes
        monkeypatch.setenv(f"FSSPEC_S3_{name.upper()}", str(made.options[name]))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    yield made
    made.leave()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "INTERVAL_S", 0.05)
    monkeypatch.setattr(upload, "LAST_TRY_S", 1.0)


def seal(root: Path, stream: str, count: int) -> list[Path]:
    """Shards of one request each, sealed; their writer is gone."""
    header = make_header(HIDDEN).replace(stream=stream)
    with ShardWriter(root, header) as writer:
        for _ in range(count):
            rows = np.full((NUM_AUX, 4, HIDDEN), 0x3F80, np.uint16)
            writer.append_block(encode_block(header, position=0, aux=rows, final=None, final_row=0))
            writer.append_record(
                RecordMeta(
                    request_id="r",
                    token_ids=np.arange(5, dtype=np.int32),
                    spans=(Span(0, 5, "prompt"),),
                    pieces=(),
                    finish_reason="stop",
                    started_unix_s=0.0,
                    finished_unix_s=0.0,
                    sampling={},
                )
            )
            writer.rotate()
    return sorted((root / stream).glob("*.safetensors"))


def wait(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def test_the_writer_process_uploads_what_a_server_captured(store: Store, tmp_path: Path) -> None:
    """The real tap, writer process and S3: when the worker is gone, everything is in the store."""
    tap = make_tap(tmp_path / "shards", hidden_size=HIDDEN, upload_url=store.url)
    runner = FakeRunner("v1", HIDDEN)
    for name in ("a", "b"):
        tap.on_schedule(schedule([new_request(name, [1, 2, 3], max_tokens=1)]))
        tap.on_step(
            runner.step([name], [3], [0], [1, 2, 3], [[4]], torch.randn(NUM_AUX + 1, 3, HIDDEN).bfloat16())
        )
        tap.on_schedule(schedule(finished=[name]))
        tap.control("rotate")
    tap.channel.finish()
    tap.channel.close()
    stream = tap.channel.header.stream
    wait(lambda: store.names() == [f"shards/{stream}/00000{i}.safetensors" for i in (1, 2)])
    with (
        open_shards(store.url, cache_dir=tmp_path / "cache") as there,
        open_shards(tmp_path / "shards") as here,
    ):
        assert [r.meta.request_id for r in there] == [r.meta.request_id for r in here] == ["a", "b"]
        for one, two in zip(there, here, strict=True):
            assert np.array_equal(one.aux(), two.aux())


def test_new_weights_do_not_wait_for_a_store_that_is_away(store: Store, tmp_path: Path) -> None:
    store.leave()
    tap = make_tap(tmp_path / "shards", hidden_size=HIDDEN, upload_url=store.url)
    old = tap.channel.header.stream
    runner = FakeRunner("v1", HIDDEN)
    tap.on_schedule(schedule([new_request("a", [1, 2, 3], max_tokens=1)]))
    tap.on_step(runner.step(["a"], [3], [0], [1, 2, 3], [[4]], torch.ones(NUM_AUX + 1, 3, HIDDEN).bfloat16()))
    tap.on_schedule(schedule(finished=["a"]))
    started = time.monotonic()
    tap.on_weights_changed("next")
    assert time.monotonic() - started < 20, "the last shard is tried for a minute, by the old writer alone"
    assert (tmp_path / "shards" / old / "000001.safetensors").is_file()
    store.come_back()
    wait(lambda: store.names() == [f"shards/{old}/000001.safetensors"])
    tap.channel.finish()
    tap.channel.close()
    status = tmp_path / "shards" / old / ".status.json"
    wait(lambda: json.loads(status.read_text())["upload"]["uploaded_shards"] == 1)
    assert json.loads(status.read_text())["closed"]


def test_a_bucket_that_does_not_exist_is_an_error(store: Store, tmp_path: Path) -> None:
    (shard,) = seal(tmp_path, "own", 1)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    background = BackgroundUpload(tmp_path, "own", "s3://no-such-bucket/shards")
    background.close()
    status = background.status()
    assert status["waiting"] == 2 and "does not exist" in status["last_error"]
    assert not background.has(shard)
    right = BackgroundUpload(tmp_path, "own", store.url)
    right.close()
    assert right.status()["uploaded_shards"] == 1, "a file of the target is no shard"


def test_nothing_is_removed_before_the_store_has_it(store: Store, tmp_path: Path) -> None:
    """The store is away while shards are sealed; the bounds of the folder are kept once it is back."""
    store.leave()
    shards = seal(tmp_path, "dead", 4)
    background = BackgroundUpload(tmp_path, "own", store.url)
    wait(lambda: background.status()["last_error"] is not None)
    assert background.status()["waiting"] == 4 and background.status()["uploaded_shards"] == 0
    bounds = {"max_bytes": 0, "max_age_s": None}
    assert enforce(tmp_path, "own", **bounds, may_go=background.has) == []
    assert all(path.is_file() for path in shards)
    store.come_back()
    wait(lambda: background.status()["uploaded_shards"] == 4)
    assert background.status()["last_error"] is None and background.status()["waiting"] == 0
    assert len(enforce(tmp_path, "own", **bounds, may_go=background.has)) == 4
    background.close()
    assert store.names() == [f"shards/dead/00000{i}.safetensors" for i in range(1, 5)]
    with open_shards(store.url, cache_dir=tmp_path / "cache") as there:
        assert len(there) == 4


def test_what_was_not_sent_is_kept_and_the_next_server_sends_it(store: Store, tmp_path: Path, caplog) -> None:
    store.leave()
    (shard,) = seal(tmp_path, "first", 1)
    BackgroundUpload(tmp_path, "first", store.url).close()
    assert "1 files are not in s3://" in caplog.text and "the next server with this folder" in caplog.text
    assert shard.is_file()
    store.come_back()
    BackgroundUpload(tmp_path, "second", store.url).close()
    assert store.names() == ["shards/first/000001.safetensors"]


def test_a_living_writers_stream_is_left_to_it(store: Store, tmp_path: Path) -> None:
    header = make_header(HIDDEN).replace(stream="other")
    seal(tmp_path, "other", 1)
    with ShardWriter(tmp_path, header):
        background = BackgroundUpload(tmp_path, "own", store.url)
        background.close()
        assert store.names() == []
    BackgroundUpload(tmp_path, "own", store.url).close()
    assert store.names() == ["shards/other/000001.safetensors"]


def test_local_copies_go_on_request_but_for_the_newest(store: Store, tmp_path: Path) -> None:
    seal(tmp_path, "own", 3)
    BackgroundUpload(tmp_path, "own", store.url, remove_local=True).close()
    assert [p.name for p in (tmp_path / "own").glob("*.safetensors")] == ["000003.safetensors"]
    assert len(store.names()) == 3


def test_a_shard_that_was_written_anew_is_not_taken_for_the_one_in_the_store(
    store: Store, tmp_path: Path
) -> None:
    (path,) = seal(tmp_path, "own", 1)
    background = BackgroundUpload(tmp_path, "own", store.url)
    background.close()
    assert background.has(path)
    with path.open("ab") as file:
        file.write(b"x" * 8)
    assert not background.has(path)


def test_wrong_settings_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"upload_url is 'bucket/x'; expected a URL such as s3://bucket/shards"
    ):
        TapConfig(dir=tmp_path, upload_url="bucket/x")
    with pytest.raises(ConfigError, match="upload_remove_local is true but upload_url is not set"):
        TapConfig(dir=tmp_path, upload_remove_local=True)
    with pytest.raises(ConfigError, match=r"the writer process cannot start: .*nosuch://"):
        make_tap(tmp_path / "shards", upload_url="nosuch://bucket/shards")
