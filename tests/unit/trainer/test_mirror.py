"""A run folder in an object store: what is there after a run, and that a run goes on from there."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from specdec_trainer.config import TrainConfig
from specdec_trainer.export import check_drafter
from specdec_trainer.mirror import Mirror
from specdec_trainer.run import run
from trainer_fakes import learnable_store, tiny_target

from specdec_tap.errors import InputError

fsspec = pytest.importorskip("fsspec")

SETTINGS = {
    "batch_tokens": 90, "ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32", "save_interval": 1e-6,
    "keep_checkpoints": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def files(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(n.removeprefix(root + "/") for n in fs.find(root))


def test_a_run_in_a_store_resumes_where_there_is_no_local_copy(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tmp_path / "m")

    def go(steps: int, *, resume: bool = False):
        return run(
            TrainConfig(**SETTINGS, max_steps=steps), Path("shards"), out=url, target_path=target,
            store=learnable_store(target), tensorboard=False, resume=resume,
        )  # fmt: skip

    go(3)
    assert {"log.jsonl", "config.json", "drafter/model.safetensors", "loss.png"} <= set(files(url))
    # Pruned checkpoints are gone there too.
    assert [n for n in files(url) if n.startswith("checkpoints/")] == [
        "checkpoints/step-000000003.safetensors"
    ]
    with pytest.raises(InputError, match=r"is not empty; choose another --out, or go on with --resume"):
        go(3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert go(5, resume=True).state.step == 5
    assert "checkpoints/step-000000005.safetensors" in files(url)
    fs, root = fsspec.core.url_to_fs(url)
    fs.get(f"{root}/drafter", str(tmp_path / "back"), recursive=True)
    assert check_drafter(tmp_path / "back") == []


def test_only_what_changed_is_copied(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url)
    mirror.fetch(resume=False)
    (mirror.folder / "a").write_text("1")
    (mirror.folder / ".part").write_text("torn")
    assert mirror.sync() == 1
    assert mirror.sync() == 0
    (mirror.folder / "a").write_text("22")
    assert mirror.sync() == 1
    assert files(url) == ["a"]


def test_a_store_that_cannot_be_written_to_is_named_at_the_end(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    mirror = Mirror(f"file://{tmp_path}/store")
    mirror.fetch(resume=False)
    (mirror.folder / "a").write_text("1")
    blocked.rename(tmp_path / "store")  # a file where the folder should be
    mirror.start()
    mirror.changed()
    with pytest.raises(InputError, match=r"cannot write to 'file://.*the run is whole in '"):
        mirror.close()
    assert (mirror.folder / "a").read_text() == "1"


def test_a_local_run_that_was_not_copied_is_kept(tmp_path: Path, url: str) -> None:
    """The store was away when the run ended: resuming must not replace the only copy by an older one."""
    first = Mirror(url)
    first.fetch(resume=False)
    (first.folder / "checkpoints").mkdir()
    (first.folder / "checkpoints" / "step-000000001.safetensors").write_text("old")
    first.sync()
    (first.folder / "checkpoints" / "step-000000002.safetensors").write_text("new")
    again = Mirror(url)
    again.fetch(resume=True)
    assert (again.folder / "checkpoints" / "step-000000002.safetensors").read_text() == "new"
    again.start()
    again.close()
    assert "checkpoints/step-000000002.safetensors" in files(url)
    # Now the URL has everything, and the local copy is free to go.
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(root, recursive=True)
    Mirror(url).fetch(resume=False)
    assert not list(again.folder.rglob("*.safetensors"))
    (again.folder / "step-000000001.safetensors").write_text("")
    with pytest.raises(
        InputError, match=r"holds an earlier run for .*not copied to its end; go on with --res"
    ):
        Mirror(url).fetch(resume=False)
