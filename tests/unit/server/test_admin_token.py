"""The admin token is a setting like the others, but nothing ever shows it."""

import json

import pytest

from specdec_tap.cli import main
from specdec_tap.config import TapConfig
from specdec_tap.errors import ConfigError

TOKEN = "correct-horse-battery-staple"


def test_token_comes_from_the_environment_and_is_in_no_text_form_of_the_settings(tmp_path):
    config, sources = TapConfig.load({"SPECDEC_TAP_DIR": str(tmp_path), "SPECDEC_TAP_ADMIN_TOKEN": TOKEN})
    assert config.admin_token == TOKEN
    assert sources["admin_token"] == "environment"
    assert TOKEN not in repr(config)
    assert TOKEN not in json.dumps(config.to_json())
    assert TapConfig.from_json(config.to_json()).admin_token is None


def test_token_in_a_yaml_file_works(tmp_path):
    (tmp_path / "tap.yaml").write_text(f"dir: {tmp_path}\nadmin_token: {TOKEN}\npublic_status: true\n")
    config, _ = TapConfig.load({"SPECDEC_TAP_CONFIG": str(tmp_path / "tap.yaml")})
    assert (config.admin_token, config.public_status) == (TOKEN, True)


def test_token_in_additional_config_is_refused_because_vllm_logs_it(tmp_path):
    section = {"specdec_tap": {"dir": str(tmp_path), "admin_token": TOKEN}}
    with pytest.raises(ConfigError, match="SPECDEC_TAP_ADMIN_TOKEN in the environment") as caught:
        TapConfig.load({}, section)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("short-secret", "has 12 characters"),
        ("a token with some spaces", "spaces"),
        ("s\u00e9cr\u00e9ts\u00e9cr\u00e9ts\u00e9cr\u00e9t", "ASCII"),
    ],
)
def test_weak_or_unsendable_token_is_refused_without_repeating_it(tmp_path, token, why):
    with pytest.raises(ConfigError, match=why) as caught:
        TapConfig.load({"SPECDEC_TAP_DIR": str(tmp_path), "SPECDEC_TAP_ADMIN_TOKEN": token})
    assert token not in str(caught.value)


def test_empty_token_means_none(tmp_path):
    config, _ = TapConfig.load({"SPECDEC_TAP_DIR": str(tmp_path), "SPECDEC_TAP_ADMIN_TOKEN": ""})
    assert config.admin_token is None


def test_config_show_hides_the_token(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECDEC_TAP_DIR", str(tmp_path))
    monkeypatch.setenv("SPECDEC_TAP_ADMIN_TOKEN", TOKEN)
    assert main(["config", "show"]) == 0
    assert main(["config", "show", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert TOKEN not in out
    assert "(set, not shown)" in out
