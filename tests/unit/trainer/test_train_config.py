"""Settings: every one documented, every file in configs/train valid, every mistake named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from specdec_trainer.config import TrainConfig, convert, field_docs, read_yaml

from specdec_tap.errors import ConfigError

FILES = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.yaml"))


def test_every_setting_has_a_docstring() -> None:
    docs = field_docs()
    assert {f.name for f in dataclasses.fields(TrainConfig)} == set(docs)
    assert all(text.endswith(".") for text in docs.values())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_shipped_files_are_valid_and_start_with_their_command(path: Path) -> None:
    TrainConfig(**read_yaml(path))
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert path.name in first


def test_default_file_is_the_default() -> None:
    values = read_yaml(next(p for p in FILES if p.name == "default.yaml"))
    assert TrainConfig(**values) == TrainConfig()


def test_unknown_keys_and_bad_values_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("ttt_step: 3\nlr: fast\nepochs: true\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(file)
    message = str(caught.value)
    assert "ttt_step is not a training setting; did you mean ttt_steps?" in message
    assert "lr is 'fast'; expected a number" in message
    assert "epochs is True; expected a number" in message


@pytest.mark.parametrize(("text", "message"), [
    ("- 1", r"holds a list; expected a mapping"), ("a: [", r"is not valid YAML"),
])  # fmt: skip
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_yaml(file)
    with pytest.raises(ConfigError, match=r"--config is .*gone\.yaml', which cannot be read"):
        read_yaml(tmp_path / "gone.yaml")


def test_flags_arrive_as_text() -> None:
    values = convert(
        {"lr": "1e-3", "ttt_steps": "5", "train_lm_head": "true", "max_steps": "none", "init": "copy"},
        "flags",
    )
    assert values == {
        "lr": 1e-3,
        "ttt_steps": 5,
        "train_lm_head": True,
        "max_steps": None,
        "init": "copy",
    }
    with pytest.raises(ConfigError, match=r"ttt_steps is '2.5'; expected a whole number \(flags\)"):
        convert({"ttt_steps": "2.5"}, "flags")
    with pytest.raises(ConfigError, match=r"init is 'best'; expected one of 'auto', 'copy', 'random'"):
        convert({"init": "best"}, "flags")


def test_init_from_may_be_text(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert TrainConfig(init_from="~/drafter").init_from == Path("/home/me/drafter")
