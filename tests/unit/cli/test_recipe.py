"""Recipes, the commands they stand for, and the Slurm scripts that run them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_tap.cli import main
from specdec_tap.errors import ConfigError, InputError
from specdec_tap.recipes import read_recipe

REPO = Path(__file__).parents[3]
RECIPES = sorted((REPO / "configs" / "recipes").glob("*.yaml"))
SLURM = REPO / "configs" / "slurm"


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    assert main(["recipe", *arguments, "--print"]) == 0
    return shlex.split(capsys.readouterr().out)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_capture_is_served_with_the_layers_of_the_recipe(recipe: Path, capsys) -> None:
    command = printed(capsys, str(recipe), "serve", "--shards", "/data/shards", "--extra=--port 9000")
    assert command[:2] == ["vllm", "serve"]
    assert command[2].startswith("moonshotai/Kimi-K2")
    assert value_of(command, "--tensor-parallel-size") == "8"
    assert "--trust-remote-code" in command
    tap = json.loads(value_of(command, "--additional-config"))["specdec_tap"]
    assert tap == {"dir": "/data/shards", "aux_layer_ids": [2, 30, 58]}
    assert command[-2:] == ["--port", "9000"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_training_settings_are_real_ones(recipe: Path, capsys) -> None:
    from specdec_trainer.config import TrainConfig, convert

    values = read_recipe(recipe).train
    assert TrainConfig(**convert(values, "recipe")).layer == "kimik2"
    command = printed(capsys, str(recipe), "train", "--out", "runs/k")
    assert command[:3] == ["specdec-tap", "train", "shards"]
    assert value_of(command, "--ttt-steps") == str(values["ttt_steps"])
    assert value_of(command, "--target-name").startswith("moonshotai/")


def test_several_processes_and_nodes_start_under_torchrun(capsys) -> None:
    recipe = str(RECIPES[0])
    assert printed(capsys, recipe, "train", "--nproc", "8")[:5] == [
        "torchrun", "--nproc-per-node=8", "--standalone", "-m", "specdec_trainer",
    ]  # fmt: skip
    many = printed(capsys, recipe, "train", "--nproc", "8", "--nnodes", "2", "--rendezvous", "n1:29500")
    assert many[2:5] == ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500"]
    assert main(["recipe", recipe, "train", "--nnodes", "2", "--print"]) == 2
    assert "--rendezvous is not set" in capsys.readouterr().err


def test_the_drafter_is_served_as_its_algorithm_asks(tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "target: some/model\ntrain: {algorithm: peagle}\n"
        "draft: {num_speculative_tokens: 4}\nserve: {x: false}\n"
    )
    command = printed(capsys, str(recipe), "draft", "--out", "runs/p", "--model", "local")
    assert command[:4] == ["vllm", "serve", "local", "--no-x"]
    assert json.loads(value_of(command, "--speculative-config")) == {
        "method": "eagle3",
        "model": "runs/p/drafter",
        "parallel_drafting": True,
        "num_speculative_tokens": 4,
    }


def test_a_missing_drafter_is_said_before_anything_starts(capsys, tmp_path: Path) -> None:
    assert main(["recipe", str(RECIPES[0]), "draft", "--out", str(tmp_path)]) == 2
    assert "no drafter in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("- a\n", InputError, "is not a recipe; expected sections target, model"),
        ("target: x\nserv: {}\n", ConfigError, "serv is not a section; did you mean serve"),
        ("target: x\ntrain: 3\n", ConfigError, "train is 3; expected a mapping"),
        ("serve: {}\n", ConfigError, "target is None; expected a folder or a hub name"),
        ("a: [\n", InputError, "is not valid YAML"),
    ],
)
def test_a_bad_recipe_is_named(text: str, error: type, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(error, match=message):
        read_recipe(file)


def dry_run(script: Path, tmp_path: Path, **env: str) -> list[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PATH": path, "SPECDEC_DRY_RUN": "1", **env},
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_the_slurm_scripts_print_their_commands(tmp_path: Path) -> None:
    serve = dry_run(SLURM / "serve.sbatch", tmp_path, SHARDS="/scratch/s", MODEL="/models/k2")
    assert serve[:3] == ["vllm", "serve", "/models/k2"]
    assert json.loads(value_of(serve, "--additional-config"))["specdec_tap"]["dir"] == "/scratch/s"
    assert value_of(serve, "--host") == "0.0.0.0"
    out = tmp_path / "run"
    train = dry_run(SLURM / "train.sbatch", tmp_path, SHARDS="/scratch/s", OUT=str(out))
    assert train[:3] == ["torchrun", "--nproc-per-node=8", "--standalone"]
    assert "--resume" not in train
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "step-000000010.safetensors").touch()
    assert dry_run(SLURM / "train.sbatch", tmp_path, OUT=str(out))[-1] == "--resume"
