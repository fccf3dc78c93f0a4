"""Real shards in folders and stores: what training reads of them, and what it leaves alone."""

from __future__ import annotations

import json
import pickle
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from shard_feed import append_records
from specdec_trainer import checkpoint, loop
from specdec_trainer.config import TrainConfig
from specdec_trainer.export import check_drafter
from specdec_trainer.run import run
from trainer_fakes import tiny_target

from specdec_tap.cli import main
from specdec_tap.errors import InputError
from specdec_tap.shards import open_shards

SETTINGS = {"ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32", "batch_tokens": 90, "held_out": 0.2}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path, target: Path) -> Path:
    append_records(tmp_path / "shards", target, first=0, count=16, pause_s=0.0)
    return tmp_path / "shards"


def go(shards: Path | str, target: Path | None, out: Path, *, resume: bool = False, **changes):
    said: list[str] = []
    result = run(
        TrainConfig(**{"max_steps": 4, **SETTINGS, **changes}), shards, out=out, target_path=target,
        resume=resume, say=said.append, tensorboard=False,
    )  # fmt: skip
    return result, said


def test_trains_from_a_url(shards: Path, target: Path, tmp_path: Path) -> None:
    """The command line, shards and target in a store, to an exported drafter; the folder gives the same."""
    fsspec = pytest.importorskip("fsspec")
    name = uuid.uuid4().hex
    memory = fsspec.filesystem("memory")
    try:
        memory.put(str(shards), f"/{name}/shards", recursive=True)
        memory.put(str(target), f"/{name}/model", recursive=True)
        flags = [
            f for k, v in {"max_steps": 4, **SETTINGS}.items() for f in (f"--{k.replace('_', '-')}", str(v))
        ]
        numbers = {}
        for out, source, model in (
            ("far", f"memory://{name}/shards", f"memory://{name}/model"),
            ("near", str(shards), str(target)),
        ):
            argv = [
                "train",
                source,
                "--target",
                model,
                "--out",
                str(tmp_path / out),
                "--device",
                "cpu",
                *flags,
            ]
            assert main([*argv, "--json", str(tmp_path / f"{out}.json")]) == 0
            assert check_drafter(tmp_path / out / "drafter") == []
            numbers[out] = json.loads((tmp_path / f"{out}.json").read_text())
        assert numbers["far"]["steps"] == 4
        for key in ("tokens", "simulated_acceptance_length"):
            assert numbers["far"][key] == numbers["near"][key]
    finally:
        memory.store.clear()


def weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.newest(out / "checkpoints")[0])[0]


def test_a_resumed_run_keeps_to_the_records_it_started_with(
    shards: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B77: what came since, in a new stream, changes nothing, and is said; what went is an error."""
    go(shards, target, tmp_path / "straight", max_steps=6)
    original = loop.train_step

    def stopping(config, objective, *rest):
        if rest[-3].step + 1 == 4:
            raise KeyboardInterrupt
        return original(config, objective, *rest)

    monkeypatch.setattr(loop, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        go(shards, target, tmp_path / "broken", max_steps=6, save_interval=1e-6)
    monkeypatch.undo()
    append_records(shards, target, first=16, count=5, pause_s=0.0)
    _, said = go(shards, target, tmp_path / "broken", max_steps=6, resume=True)
    assert any(
        s.startswith("5 records came after this run began and are left out; start a new") for s in said
    )
    want, got = weights(tmp_path / "straight"), weights(tmp_path / "broken")
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    shutil.rmtree(shards / "feed-0")
    with pytest.raises(InputError, match=r"started with 16 records, of which .* now holds 0, and a resumed"):
        go(shards, target, tmp_path / "broken", max_steps=8, resume=True)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


def test_links_strange_names_and_pickles_are_left_alone(shards: Path, target: Path, tmp_path: Path) -> None:
    """B122, B124: nothing outside is read, nothing is deleted, nothing is unpickled, and it is said."""
    append_records(tmp_path / "outside", target, first=30, count=3, pause_s=0.0)
    outside, stream = tmp_path / "outside" / "feed-30", shards / "feed-0"
    (file,) = outside.glob("*.safetensors")
    (shards / "linked-stream").symlink_to(outside, target_is_directory=True)
    (stream / "000007.safetensors").symlink_to(file)
    (stream / "manifest.json").write_text(json.dumps({"shards": ["../../outside/feed-30/" + file.name]}))
    (stream / "a..000008.safetensors").write_bytes(file.read_bytes())
    for folder in (shards, stream):
        (folder / "data_0.pt").write_bytes(pickle.dumps(Evil(tmp_path / "proof")))
    before = {
        p: p.read_bytes() for root in (shards, tmp_path / "outside") for p in root.rglob("*") if p.is_file()
    }
    result, said = go(shards, target, tmp_path / "run", held_out=0.0)
    facts = next(json.loads(x) for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert facts["training"]["records"] == 16
    (left_out,) = (s for s in said if "are left out" in s)
    assert left_out.startswith(f"5 entries of {str(shards)!r} are left out, such as: {stream}")
    named = {p.path.name for p in open_shards(shards).skipped}
    assert named == {
        "linked-stream", "000007.safetensors", "manifest.json", "a..000008.safetensors", "data_0.pt"
    }  # fmt: skip
    assert check_drafter(result.drafter) == []
    assert {p: p.read_bytes() for p in before} == before
    assert (shards / "linked-stream").is_symlink()
    assert not (tmp_path / "proof").exists()
