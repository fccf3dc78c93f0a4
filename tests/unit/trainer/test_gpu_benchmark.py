"""benchmarks/gpu_trainer.py runs, so that the first minutes on a GPU are not spent on its mistakes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_trainer.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("gpu_trainer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tiny_run_prints_one_line_a_length(benchmark, capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["--tiny", "--peak-tflops", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["length"] for line in lines] == [128, 512]
    for line in lines:
        assert line["tokens_per_s"] > 0
        assert 0 < line["mfu"] == pytest.approx(line["tflops_per_s"])
        # 359 supervised rows of 512, two matrix products of the head at least, three steps, three passes.
        assert line["tflops_per_step"] * 1e12 > 350 * 3 * 2 * 2 * 128 * 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_the_real_sizes_are_refused(benchmark, capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main([]) == 2
    assert "no CUDA device; --tiny checks the script" in capsys.readouterr().err
