"""What happens when vLLM loads the plugin, before any engine is made."""

from __future__ import annotations

import sys
import types
from typing import Any

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


RUNNER_METHODS = {
    "vllm.v1.worker.gpu_model_runner": (
        "__init__", "_setup_eagle3_aux_hidden_state_outputs", "execute_model", "_sample", "sample_tokens",
        "reload_weights",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "__init__", "load_model", "execute_model", "sample", "sample_tokens", "reload_weights",
    ),
}  # fmt: skip
WORKER_METHODS = ("shutdown", "finish_weight_update")


def made(*methods: str) -> type:
    """A class whose methods note that they ran."""

    def method(name: str) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> str:
            self.__dict__.setdefault("calls", []).append(name)
            return name

        def init(self: Any) -> None:
            run(self)

        return init if name == "__init__" else run

    return type("Made", (), {name: method(name) for name in methods})


def put_modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Modules of vLLM's names, with the methods that are wrapped."""
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in hooks._PATCHES}
    for name, methods in RUNNER_METHODS.items():
        modules[name].GPUModelRunner = made(*methods)
    modules["vllm.v1.worker.worker_base"].WorkerBase = made()
    modules["vllm.v1.worker.gpu_worker"].Worker = made(*WORKER_METHODS)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return modules


def layers_of(function: Any) -> int:
    """How often a function is wrapped."""
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


def test_a_second_register_wraps_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may load a plugin many times; a method wrapped twice would record twice."""
    modules = put_modules(monkeypatch)
    register()
    wrapped = {
        (name, key): value
        for name, module in modules.items()
        for kind in vars(module).values()
        if isinstance(kind, type)
        for key, value in vars(kind).items()
    }
    for _ in range(3):
        register()
    for name, methods in RUNNER_METHODS.items():
        for method in methods:
            assert layers_of(getattr(modules[name].GPUModelRunner, method)) == 1, (name, method)
    for method in WORKER_METHODS:
        assert layers_of(getattr(modules["vllm.v1.worker.gpu_worker"].Worker, method)) == 1, method
    for (name, key), value in wrapped.items():
        (kind,) = [k for k in vars(modules[name]).values() if isinstance(k, type)]
        assert vars(kind)[key] is value, (name, key)
    worker = modules["vllm.v1.worker.gpu_worker"].Worker()
    assert worker.shutdown() == "shutdown"
    assert worker.calls == ["shutdown"]
    assert hasattr(modules["vllm.v1.worker.worker_base"].WorkerBase, "specdec_tap_control")
    assert sum(isinstance(finder, hooks._PatchOnImport) for finder in sys.meta_path) == 1
