"""Checkpoints of one config and one answer, but with a rotated residual stream, are told apart (B27)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.tiny import make_llama, rotate_llama

from specdec_tap.cli import main
from specdec_tap.errors import ConfigError, IncompatibleShardsError, InputError
from specdec_tap.extract import target_info
from specdec_tap.shards import open_shards
from specdec_tap.target import fingerprint, load_target, save_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there, who are you? " * 4}]
TRAIN = ["--epochs", "1", "--batch-tokens", "128", "--held-out", "0", "--device", "cpu", "--dtype", "float32"]


def capture(model: Path, shards: Path) -> Path:
    """Shards as the tap writes them, with the model's fingerprint in their header."""
    chats = shards.with_suffix(".jsonl")
    chats.write_text("".join(json.dumps({"id": f"c{i}", "messages": CHAT}) + "\n" for i in range(4)))
    assert main(["extract", str(model), str(chats), "--backend", "hf", "--out", str(shards)]) == 0
    return shards


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("rotated")
    plain = make_llama(root / "plain", hidden_size=32, tied=False, dtype="float32")
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    return {"plain": plain, "rotated": rotate_llama(root / "rotated", plain)}


@pytest.fixture(scope="module")
def shards(models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shards")
    return {name: capture(model, root / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def drafter(shards, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", str(shards["plain"]), "--out", str(out), *TRAIN]) == 0
    return out / "drafter"


def test_the_twins_answer_alike_and_only_their_fingerprints_differ(models):
    ids = torch.arange(5, 45)[None]
    logits = []
    for folder in models.values():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            logits.append(model(ids).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    plain, rotated = (target_info(folder) for folder in models.values())
    assert plain.config_sha256 == rotated.config_sha256
    assert plain.tables_sha256 != rotated.tables_sha256
    assert plain.layers_sha256 != rotated.layers_sha256


def test_a_fine_tune_of_the_layers_alone_is_told_apart(models, tmp_path):
    from safetensors.torch import load_file, save_file

    tuned = shutil.copytree(models["plain"], tmp_path / "tuned")
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] += 1e-3
    save_file(weights, tuned / "model.safetensors")
    ours, theirs = (fingerprint(load_target(folder)) for folder in (models["plain"], tuned))
    assert ours.differs(theirs) == "layers"


def test_neither_files_nor_a_target_folder_change_the_fingerprint(models, tmp_path):
    """A checkpoint in several files, and the copy of its tables beside the shards."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)
    model.save_pretrained(tmp_path / "split", max_shard_size="40KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    save_target(models["plain"], tmp_path / "target")
    want = fingerprint(load_target(models["plain"]))
    assert fingerprint(load_target(tmp_path / "split")) == want
    assert fingerprint(load_target(tmp_path / "target")) == want


def test_tables_alone_are_compared_where_nothing_else_is_known(models, tmp_path):
    """As in a target/ folder of an earlier version, or the copy of a checkpoint on the hub."""
    save_target(models["plain"], tmp_path / "target")
    info = json.loads((tmp_path / "target" / "target.json").read_text())
    del info["layers_sha256"]
    (tmp_path / "target" / "target.json").write_text(json.dumps(info))
    old = fingerprint(load_target(tmp_path / "target"))
    assert old.layers is None
    assert old.differs(fingerprint(load_target(models["plain"]))) is None
    assert old.differs(fingerprint(load_target(models["rotated"]))) == "embedding, head or final norm"


def test_little_is_read_of_a_large_checkpoint(tmp_path):
    """4 GB of 1,002 tensors, in a file with holes."""
    hidden, vocab = 1024, 1 << 17
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": [hidden, 2048] for i in range(1000)}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {
        "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1000, "tie_word_embeddings": True,
        "model_type": "llama",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(tmp_path)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    assert fingerprint(target).layers is not None
    assert (tmp_path / "model.safetensors").stat().st_size > 4e9
    assert bytes_read() - before < 3e6


def test_shards_of_both_do_not_mix(shards, tmp_path):
    mixed = tmp_path / "mixed"
    for name, folder in shards.items():
        (stream,) = [path for path in folder.iterdir() if path.is_dir() and path.name != "target"]
        shutil.copytree(stream, mixed / f"{name}-{stream.name}")
    with pytest.raises(IncompatibleShardsError, match=r"do not belong together: .*target\.tables_sha256 is"):
        open_shards(mixed)


def test_shards_without_a_fingerprint_mix_with_those_that_have_one(shards):
    """Those of earlier versions."""
    from specdec_tap.shards.reader import header_differences

    with open_shards(shards["plain"]) as store:
        header = store.header
    old = header.to_json()
    del old["target"]["tables_sha256"], old["target"]["layers_sha256"]
    old = type(header).from_json(old)
    assert old.target.tables_sha256 is None
    assert header_differences(header, old) == {}


def test_verify_warns_of_the_twin(shards, models, capsys):
    assert main(["shards", "verify", str(shards["plain"]), "--target", str(models["plain"])]) == 0
    assert "fingerprints differ" not in capsys.readouterr().out
    main(["shards", "verify", str(shards["plain"]), "--target", str(models["rotated"])])
    assert "has another embedding, head or final norm than the model that the" in capsys.readouterr().out


def test_training_with_the_twin_as_target_is_refused(shards, models, tmp_path, capsys):
    command = ["train", str(shards["plain"]), "--out", str(tmp_path / "run"), *TRAIN]
    assert main([*command, "--target", str(models["rotated"])]) == 2
    said = capsys.readouterr().err
    assert "has another embedding, head or final norm than the model that the shards were captured" in said
    assert "pass --target with the checkpoint that was served" in said


def test_going_on_with_the_twins_drafter_is_warned_of(shards, drafter, tmp_path, capsys):
    for name, warned in (("plain", False), ("rotated", True)):
        command = ["train", str(shards[name]), "--init-from", str(drafter), "--out", str(tmp_path / name)]
        assert main([*command, *TRAIN]) == 0
        said = capsys.readouterr().err
        assert ("was trained for a model with another embedding, head or final norm" in said) is warned


def test_a_drafter_is_checked_against_its_target(drafter, models, tmp_path, capsys):
    assert main(["export", str(drafter), "--check", "--target", str(models["plain"])]) == 0
    assert main(["export", str(drafter), "--check", "--target", str(models["rotated"])]) == 1
    assert "it was trained for a model with another embedding, head or final norm" in capsys.readouterr().out
    for layout in ("sglang", "speculators"):  # the fingerprint goes with it
        out = tmp_path / layout
        command = [
            "export",
            str(drafter),
            "--format",
            layout,
            "--out",
            str(out),
            "--target-name",
            "org/model",
        ]
        assert main(command) == 0
        assert main(["export", str(out), "--check", "--target", str(models["rotated"])]) == 1


def test_a_server_refuses_the_folder_of_the_twin(models, shards):
    from specdec_tap.vllm_plugin.attach import check_same_target

    check_same_target(shards["plain"] / "target", target_info(models["plain"]))
    with pytest.raises(
        ConfigError, match="holds shards of other weights than rotated's: its target/ has another embedding"
    ):
        check_same_target(shards["plain"] / "target", target_info(models["rotated"]))
    with pytest.raises(InputError, match="holds the tensors of another target"):
        save_target(models["rotated"], shards["plain"] / "target")


def test_a_server_says_that_its_drafter_learnt_the_twins_states(models, drafter, caplog):
    from specdec_tap.vllm_plugin.attach import check_drafter_is_for

    config = SimpleNamespace(**json.loads((drafter / "config.json").read_text()))
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(drafter), hf_config=config))
    with caplog.at_level(logging.WARNING, logger="vllm.specdec_tap"):
        check_drafter_is_for(target_info(models["plain"]), speculative)
        check_drafter_is_for(target_info(models["plain"]), None)  # a server without a drafter
        assert not caplog.records
        check_drafter_is_for(target_info(models["rotated"]), speculative)
    assert "was trained for a model with another embedding, head or final norm than rotated" in caplog.text


def test_new_weights_do_not_keep_the_checkpoints_fingerprint(tmp_path):
    import dataclasses

    from helpers.fake_engine import make_tap

    tap = make_tap(tmp_path / "shards")
    header = tap.channel.header
    tap.channel.header = header.replace(
        target=dataclasses.replace(header.target, tables_sha256="1" * 64, layers_sha256="2" * 64)
    )
    tap.on_weights_changed("reload1")
    target = tap.channel.header.target
    assert (target.revision, target.tables_sha256, target.layers_sha256) == ("reload1", None, None)
    tap.close()
