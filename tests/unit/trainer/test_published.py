"""Drafters as others publish them: no layer ids, an embedding of their own, pickled weights, ids too many."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_trainer import build
from specdec_trainer.export import check_drafter, export_drafter, load_drafter
from trainer_fakes import make_parts, tiny_target

from specdec_tap.cli import main
from specdec_tap.errors import InputError
from specdec_tap.target import load_target

DEFAULT = (2, 4, 5)
"""(2, N//2, N-3) for the 8 layers of the tiny target."""
LAYOUTS = pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])


@pytest.fixture
def target(tmp_path: Path):
    return load_target(tiny_target(tmp_path / "model"))


def published(out: Path, layout: str, change=lambda config: None, **more) -> Path:
    """A drafter folder in a layout; ``change`` edits its config."""
    sizes = {"hidden_size": 16, "vocab_size": 40, "draft_vocab_size": 30, "aux_layer_ids": DEFAULT}
    parts = make_parts(dtype=torch.float32, **sizes | more)
    export_drafter(parts.model, out, format=layout, target_name="org/model")
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def forget_layers(config: dict) -> None:
    for part in (config, config.get("eagle_config", {})):
        part.pop("eagle_aux_hidden_state_layer_ids", None)


def add_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path)


@LAYOUTS
def test_without_layer_ids_the_engines_default_is_meant(tmp_path: Path, target, layout: str) -> None:
    folder = published(tmp_path / "d", layout, forget_layers)
    assert build.warm_start(folder, target, DEFAULT).config.aux_layer_ids == DEFAULT
    with pytest.raises(InputError, match=r"reads layers \[2, 4, 5\], the shards hold \[1, 2, 3\]"):
        build.warm_start(folder, target, (1, 2, 3))


@LAYOUTS
def test_layer_ids_are_kept_where_they_are_given(tmp_path: Path, target, layout: str) -> None:
    folder = published(tmp_path / "d", layout, aux_layer_ids=(1, 3, 6))
    assert build.warm_start(folder, target, (1, 3, 6)).config.aux_layer_ids == (1, 3, 6)


@LAYOUTS
def test_the_check_says_when_a_config_names_no_layers(
    tmp_path: Path, target, layout: str, capsys: pytest.CaptureFixture
) -> None:
    folder = published(tmp_path / "d", layout, forget_layers)
    assert main(["export", str(folder), "--check"]) == 0
    said = capsys.readouterr().out
    assert "names no aux layers (eagle_aux_hidden_state_layer_ids): vLLM will take its default" in said
    assert "(2, N//2, N-3), N is the target's number of layers" in said
    assert main(["export", str(folder), "--check", "--target", str(target.path)]) == 0
    assert "(2, N//2, N-3), here [2, 4, 5]" in capsys.readouterr().out
    # Written anew it would name layers, and they must not be guessed.
    with pytest.raises(InputError, match=r"names no aux layers .*name the target \(--target\)"):
        load_drafter(folder)
    out = tmp_path / "again"
    assert main(["export", str(folder), "--out", str(out), "--target", str(target.path)]) == 0
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    capsys.readouterr()
    assert main(["export", str(out), "--check"]) == 0
    assert "note" not in capsys.readouterr().out


@LAYOUTS
def test_an_embedding_of_its_own_is_not_dropped(tmp_path: Path, target, layout: str) -> None:
    """The target's own rows, in the dtype of the drafter, are no reason to stop; others are."""
    folder = published(tmp_path / "d", layout)
    embed = target.embed.torch().bfloat16()
    add_tensor(folder, "embed_tokens.weight", embed)
    build.warm_start(folder, target, DEFAULT)
    embed = embed.clone()
    embed[7, 3] += 1
    name = "model.embed_tokens.weight" if layout == "vllm" else "embed_tokens.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("embed_tokens.weight")
    save_file({**tensors, name: embed}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"embed_tokens\.weight of its own \(1 of 40 rows differ\)"):
        build.warm_start(folder, target, DEFAULT)
    save_file({**tensors, name: embed[:30].clone()}, folder / "model.safetensors")
    with pytest.raises(
        InputError, match=r"\(its shape is \[30, 16\], the target's \[40, 16\]\).*take the tensor out"
    ):
        build.warm_start(folder, target, DEFAULT)


@LAYOUTS
def test_pickled_weights_are_read_as_tensors_only(tmp_path: Path, target, layout: str) -> None:
    folder = published(tmp_path / "d", layout)
    tensors = load_file(folder / "model.safetensors")
    want = build.warm_start(folder, target, DEFAULT).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    got = build.warm_start(folder, target, DEFAULT).state_dict()
    assert all(torch.equal(got[n], want[n]) for n in want)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


def test_code_in_pickled_weights_does_not_run(tmp_path: Path) -> None:
    """B124."""
    folder = published(tmp_path / "d", "vllm")
    (folder / "model.safetensors").unlink()
    evil, proof = folder / "pytorch_model.bin", tmp_path / "proof"
    torch.save({"fc.weight": Evil(proof)}, evil)
    for make in (lambda: None, lambda: evil.write_bytes(pickle.dumps(Evil(proof)))):
        make()
        with pytest.raises(
            InputError, match=r"cannot read .*pytorch_model\.bin' as plain tensors .*convert it to model"
        ):
            load_drafter(folder)
    assert not proof.exists()
    torch.save([torch.zeros(2)], evil)
    with pytest.raises(InputError, match=r"does not hold tensors by name; expected a state dict"):
        load_drafter(folder)
    evil.unlink()
    with pytest.raises(InputError, match=r"\*\.safetensors \(or pytorch_model\*\.bin\) is missing"):
        load_drafter(folder)


@LAYOUTS
def test_four_ids_for_a_fusion_of_three_are_both_named(tmp_path: Path, target, layout: str) -> None:
    """B95: the last layer, which is only the teacher, stands in the list of inputs."""

    def add_layer(config: dict) -> None:
        for part in (config, config.get("eagle_config", {})):
            if ids := part.get("eagle_aux_hidden_state_layer_ids"):
                ids.append(8)
        config.pop("num_aux_hidden_states", None)

    folder = published(tmp_path / "d", layout, add_layer)
    ids = [1, 3, 4, 8] if layout == "sglang" else [2, 4, 5, 8]
    (problem,) = check_drafter(folder)
    assert problem == (
        "tensor fc.weight has shape [16, 48]; expected [16, 64]: config.json names 4 aux layers "
        f"{ids}, but the tensor joins 3; leave only those that are its input in "
        "eagle_aux_hidden_state_layer_ids"
    )
    with pytest.raises(InputError, match=r"cannot be loaded: tensor fc\.weight .*names 4 aux layers"):
        build.warm_start(folder, target, DEFAULT)


def lint(folder: Path, capsys: pytest.CaptureFixture, *more: str) -> tuple[int, str]:
    code = main(["export", str(folder), "--check", *more])
    return code, capsys.readouterr().out


def unstate(*ids: int):
    """As others write their config: with these ids, and nothing that says what they mean."""

    def edit(config: dict) -> None:
        config.pop("aux_layer_convention", None)
        for part in (config, config.get("eagle_config", {})):
            part["eagle_aux_hidden_state_layer_ids"] = list(ids)

    return edit


def test_the_check_says_which_meaning_of_layer_ids_it_assumes(tmp_path: Path, target, capsys) -> None:
    """B10: the output of layer k, or the stream after k layers; a list that begins with 1 is the former."""
    code, said = lint(published(tmp_path / "a", "vllm", unstate(1, 3, 4)), capsys)
    assert code == 0
    assert "note: aux layers [1, 3, 4] are assumed to be outputs of layers (SGLang's and SpecForge's" in said
    assert "vLLM's is [2, 4, 5]), because the list begins with 1" in said
    assert "would read one layer too low" in said
    code, said = lint(published(tmp_path / "b", "vllm", unstate(2, 4, 5)), capsys)
    assert code == 0
    assert "aux layers [2, 4, 5] are assumed to be the streams after so many layers (vLLM's" in said
    assert "because the list does not begin with 1" in said


def test_our_drafters_say_which_meaning_their_layer_ids_have(tmp_path: Path, capsys) -> None:
    """Even layers 1, 3, 6 of vLLM's spelling, whose list begins with 1."""
    assert "note" not in lint(published(tmp_path / "a", "vllm", aux_layer_ids=(1, 3, 6)), capsys)[1]
    said = lint(published(tmp_path / "b", "sglang", aux_layer_ids=(2, 4, 5)), capsys)[1]
    assert "aux layers [1, 3, 4] are outputs of layers" in said
    assert "vLLM's is [2, 4, 5]), as aux_layer_convention says" in said
    again = tmp_path / "again"
    assert main(["export", str(tmp_path / "b"), "--format", "vllm", "--out", str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_the_check_says_which_runner_reads_nested_layer_ids(tmp_path: Path, capsys) -> None:
    def nest(config: dict) -> None:
        del config["eagle_aux_hidden_state_layer_ids"]

    code, said = lint(published(tmp_path / "d", "vllm", nest), capsys)
    assert code == 0
    assert "is only inside eagle_config: vLLM's V1 runner reads it there, its V2 runner does not" in said


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (
            {"auto_map": {"AutoModel": "modeling.Eagle"}},
            0,
            "note: config.json has an auto_map: an engine would",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            1,
            "has a quantization_config, often the target's",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 31]}, 1, "names aux layers [31], but the target has 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, 1, "config.json names 2 aux layers [2, 5], but the"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_the_check_of_a_foreign_config(tmp_path: Path, target, capsys, change, code, text) -> None:
    def edit(config: dict) -> None:
        config.update(change)
        if "eagle_aux_hidden_state_layer_ids" in change:
            del config["num_aux_hidden_states"]

    got, said = lint(published(tmp_path / "d", "vllm", edit), capsys, "--target", str(target.path))
    assert (got, text in said) == (code, True), said


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight"])
def test_the_check_of_a_missing_tensor(tmp_path: Path, capsys, name: str) -> None:
    folder = published(tmp_path / "d", "vllm", unstate(1, 3, 4))
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.endswith(name)}
    save_file(tensors, folder / "model.safetensors")
    code, said = lint(folder, capsys)
    assert code == 1
    assert f"{name} is missing" in said
    assert "because the list begins with 1" in said  # the notes come with the faults
