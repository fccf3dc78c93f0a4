"""vLLM loads plugins in several ways; in each, a request is captured exactly once or it is told why not.

B48: fork or spawn, the engine in a process of its own or not, and what VLLM_PLUGINS says. Two workers are in
``test_capture_modes.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny
from helpers.engine import Answer, Job, run_engines, wait_for_records
from helpers.oracle import max_error

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

PROMPTS = [[5, 6, 7, 8 + i] for i in range(3)]
WAYS = {
    "in one process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "fork": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
    "spawn": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.make_llama(tmp_path_factory.mktemp("model") / "llama", dtype="float32")


def served(model: Path, root: Path, plugins: dict[str, str]) -> dict[str, Answer]:
    """An engine for each way, under one value of VLLM_PLUGINS."""
    answers = {}
    for way, env in WAYS.items():
        # Settings in the environment: every process reads them for itself.
        tap = {"SPECDEC_TAP_DIR": str(root / way), "SPECDEC_TAP_MIN_FREE_BYTES": "0"}
        job = Job(model=model, prompts=PROMPTS, max_tokens=4)
        (answers[way],) = run_engines([job], env={**env, **tap, **plugins})
    return answers


@pytest.mark.parametrize("plugins", [{}, {"VLLM_PLUGINS": "specdec_tap"}], ids=["unset", "ours"])
def test_every_request_is_captured_exactly_once(model, tmp_path, plugins):
    for way, answer in served(model, tmp_path, plugins).items():
        assert answer.error is None, (way, answer.error)
        store = wait_for_records(tmp_path / way, len(PROMPTS))
        want = sorted(p + r for p, r in zip(PROMPTS, answer.responses, strict=True))
        assert sorted(record.token_ids.tolist() for record in store) == want, way
        assert max_error(list(store), model) < 1e-4


def test_a_server_that_loads_other_plugins_only_captures_nothing_and_doctor_says_so(
    model, tmp_path, monkeypatch
):
    """Nothing of ours runs in it, so nothing in it can say so."""
    plugins = {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    for way, answer in served(model, tmp_path, plugins).items():
        assert [len(response) for response in answer.responses] == [4] * len(PROMPTS), (way, answer.error)
        assert not (tmp_path / way).exists()
    monkeypatch.setenv("VLLM_PLUGINS", plugins["VLLM_PLUGINS"])
    doctor = subprocess.run(
        [sys.executable, "-m", "specdec_tap", "doctor"], capture_output=True, text=True, check=False
    )
    assert doctor.returncode == 1
    assert "VLLM_PLUGINS is 'lora_filesystem_resolver'; add specdec_tap to it" in " ".join(
        doctor.stdout.split()
    )
