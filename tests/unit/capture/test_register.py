"""What happens when vLLM loads the plugin, before any engine is made."""

from __future__ import annotations

import pytest

from specdec_tap.errors import ConfigError
from specdec_tap.vllm_plugin import hooks, register


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(hooks, "install", lambda: calls.append(True))
    return calls


def test_one_setting_in_the_environment_and_the_folder_in_additional_config(monkeypatch, installed):
    """The folder was demanded of the environment, although --additional-config may name it later."""
    monkeypatch.setenv("SPECDEC_TAP_SAMPLE_RATE", "0.5")
    register()
    assert installed == [True]


def test_a_wrong_setting_in_the_environment_stops_the_start(monkeypatch, installed):
    monkeypatch.setenv("SPECDEC_TAP_SAMPLE_RATE", "1.5")
    with pytest.raises(ConfigError, match=r"sample_rate is 1\.5; expected 0 to 1"):
        register()
    assert installed == []


def test_switched_off_whatever_else_is_set(monkeypatch, installed):
    monkeypatch.setenv("SPECDEC_TAP", "off")
    monkeypatch.setenv("SPECDEC_TAP_SAMPLE_RATE", "1.5")
    register()
    assert installed == []
