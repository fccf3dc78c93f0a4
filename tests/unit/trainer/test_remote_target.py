"""Targets on the hub or at a URL: only the tensors that training needs are read."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trainer_fakes import TARGET_CONFIG, tiny_target

from specdec_tap.errors import InputError
from specdec_tap.remote_target import local_target
from specdec_tap.target import Checkpoint, load_target

fsspec = pytest.importorskip("fsspec")


def big_checkpoint(path: Path) -> Path:
    """Two files with an index; most bytes are a layer that training never reads."""
    tiny_target(path)
    (path / "model.safetensors").unlink()
    shape = (TARGET_CONFIG["vocab_size"], TARGET_CONFIG["hidden_size"])
    rng = np.random.default_rng(1)
    files = {
        "model-1.safetensors": {
            "model.language_model.embed_tokens.weight": rng.standard_normal(shape).astype(np.float32),
            "model.language_model.layers.0.mlp.up_proj.weight": np.zeros((1000, 1000), np.float32),
        },
        "model-2.safetensors": {
            "model.language_model.norm.weight": np.ones(shape[1], np.float32),
            "lm_head.weight": rng.standard_normal(shape).astype(np.float32),
        },
        "model-3.safetensors": {"model.language_model.layers.1.mlp.up_proj.weight": np.zeros(9, np.float32)},
    }
    for name, tensors in files.items():
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "tokenizer.json").write_text("{}")
    return path


def upload(folder: Path) -> str:
    url = f"memory://{uuid.uuid4().hex}/model"
    fs, root = fsspec.core.url_to_fs(url)
    for file in folder.iterdir():
        fs.pipe_file(f"{root}/{file.name}", file.read_bytes())
    return url


def test_only_the_needed_tensors_are_copied(tmp_path: Path) -> None:
    source = big_checkpoint(tmp_path / "m")
    copy = local_target(upload(source), tmp_path / "cache")
    mine, theirs = load_target(copy), load_target(source)
    for name in ("embed", "head", "norm"):
        assert np.array_equal(getattr(mine, name).float32(), getattr(theirs, name).float32())
    assert mine.config_sha256 == theirs.config_sha256
    assert [f.name for f in mine.files] == ["tokenizer.json"]
    # The third file holds nothing of use; the first is as large as it was, but its 4 MB layer is a hole.
    assert not (copy / "model-3.safetensors").exists()
    first = (copy / "model-1.safetensors").stat()
    assert first.st_size == (source / "model-1.safetensors").stat().st_size
    assert first.st_blocks * 512 < 200_000
    assert {path.stat().st_mode & 0o777 for path in copy.iterdir()} == {0o600}


def test_a_packed_head_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """The index of the copy keeps only what may be needed; without the head it would look tied."""
    source = big_checkpoint(tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model-2.safetensors")
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight")[:, :2].view(np.int32).copy()
    save_file(tensors, source / "model-2.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight_packed"] = index["weight_map"].pop("lm_head.weight")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"output head .*'lm_head\.weight_packed', dtype I32"):
        local_target(upload(source), tmp_path / "cache")


def test_a_copy_is_made_once(tmp_path: Path) -> None:
    url = upload(big_checkpoint(tmp_path / "m"))
    copy = local_target(url, tmp_path / "cache")
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm(root, recursive=True)
    assert local_target(url, tmp_path / "cache") == copy


def test_single_file_checkpoints_work_too(tmp_path: Path) -> None:
    source = tiny_target(tmp_path / "m")
    copy = load_target(local_target(upload(source), tmp_path / "cache"))
    assert np.array_equal(copy.head.float32(), load_target(source).head.float32())


def test_holes_cannot_be_read_as_tensors(tmp_path: Path) -> None:
    """A layer that was not copied must be missing, not zero."""
    source = tiny_target(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    layer = "model.layers.7.self_attn.o_proj.weight"
    save_file({**tensors, layer: np.ones((16, 16), np.float32)}, source / "model.safetensors")
    assert layer in Checkpoint(source)
    copy = Checkpoint(local_target(upload(source), tmp_path / "cache"))
    assert layer not in copy
    assert "lm_head.weight" in copy


def test_what_is_not_there_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"cannot read the target at 'memory://nothing/here'.*check the name"
    ):
        local_target("memory://nothing/here", tmp_path / "cache")
    folder = big_checkpoint(tmp_path / "m")
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"'memory://.*': its index lists 'model-2\.safetensors', which is not"
    ):
        local_target(upload(folder), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_hub_id_is_looked_for_in_the_hubs_cache_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    tiny_target(snapshot)
    refs = tmp_path / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert local_target("org/tiny", tmp_path / "cache") == snapshot


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    assert local_target(str(tmp_path)) == tmp_path
    assert local_target("no-such-folder") == Path("no-such-folder")
