"""Patches vLLM's model runners and workers, at the moment vLLM itself imports them.

A plugin is loaded in every process, the API server too; importing a model runner there would cost
seconds and memory. So a finder at the front of ``sys.meta_path`` waits for their modules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..config import ADDITIONAL_CONFIG_KEY, ENV_PREFIX

if TYPE_CHECKING:
    from .attach import Plan

_PATCHES = {
    "vllm.v1.worker.gpu_model_runner": ("specdec_tap.vllm_plugin.runner_v1", "patch"),
    "vllm.v1.worker.gpu.model_runner": ("specdec_tap.vllm_plugin.runner_v2", "patch"),
    "vllm.v1.worker.worker_base": ("specdec_tap.vllm_plugin.rpc", "patch_worker_base"),
    "vllm.v1.worker.gpu_worker": ("specdec_tap.vllm_plugin.rpc", "patch_worker"),
}
_MARK = "_specdec_tap_patched"


class _PatchOnImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_patch(module: ModuleType) -> None:
            execute(module)
            _apply(module)

        spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]  # this spec only
        return spec


def install() -> None:
    """Patch the runners that are already imported, and the others when they are. Idempotent."""
    if not any(isinstance(f, _PatchOnImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())
    for name in _PATCHES:
        if name in sys.modules:
            _apply(sys.modules[name])


def plan_if_configured(vllm_config: Any, runner: str) -> Plan | None:
    """Return the plan for this engine; None, with nothing more imported, when capture is not configured."""
    additional = vllm_config.additional_config
    in_file = isinstance(additional, dict) and ADDITIONAL_CONFIG_KEY in additional
    if not in_file and not any(key.startswith(ENV_PREFIX) for key in os.environ):
        return None
    from .attach import make_plan

    return make_plan(vllm_config, runner)


def _apply(module: ModuleType) -> None:
    if getattr(module, _MARK, False):
        return
    adapter, function = _PATCHES[module.__name__]
    patch: Callable[[ModuleType], None] = getattr(importlib.import_module(adapter), function)
    patch(module)
    setattr(module, _MARK, True)
