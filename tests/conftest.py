"""What every test starts from: offline, one thread, no settings of the tap, fast tests before slow ones."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread waits more than it works
for name in [name for name in os.environ if name.startswith("SPECDEC_TAP")]:
    del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run e2e tests last; skip what this machine cannot run; leave out ``matrix`` unless ``-m`` names it."""
    if "matrix" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
    no_vllm = importlib.util.find_spec("vllm") is None
    for item in items:
        if no_vllm and item.get_closest_marker("e2e"):
            item.add_marker(
                pytest.mark.skip(reason="vLLM is not installed; 'make setup' installs its CPU build")
            )
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
