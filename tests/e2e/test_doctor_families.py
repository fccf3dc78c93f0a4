"""What the doctor says of each model family, asked from vLLM by config alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers.families import FAMILIES, NUM_LAYERS, make_family, make_unsupported

from specdec_tap import doctor

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

ASK = """
import json, sys
from specdec_tap.vllm_plugin.probe import answer
print("ANSWERS" + json.dumps({name: answer(path) for name, path in json.loads(sys.argv[1]).items()}))
"""


UNSUPPORTED = {
    "opt": "OPTForCausalLM has no EAGLE-3 interface in vllm",
    "bert": "the model is served for pooling",
    "t5": "the model is an encoder-decoder",
    "unheard": "'UnheardOfForCausalLM'",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, doctor.Report]:
    """One process asks about every family: the import of vLLM is most of the time."""
    folder = tmp_path_factory.mktemp("families")
    models = {}
    for name in FAMILIES:
        models[name] = make_family(name, folder / name)
        for weights in models[name].rglob("*.safetensors"):
            weights.unlink()  # a config is enough
    for name in UNSUPPORTED:
        models[name] = make_unsupported(folder / name, name)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "SPECDEC_TAP": "off", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps({name: str(path) for name, path in models.items()})],
        env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    answers = json.loads(done.stdout.split("ANSWERS")[1].splitlines()[0])
    out = {}
    for name, said in answers.items():
        out[name] = report = doctor.Report()
        doctor.check_model(report, name, said)
        if said.get("why_not", "no answer") in (None, ""):
            target = doctor.target_config(str(models[name]))
            assert target is not None
            doctor.check_drafter_layer(report, target)
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_the_doctor_says_what_the_support_matrix_says(name: str, reports: dict[str, doctor.Report]) -> None:
    """Supported or not and why, the default layers, the drafter layer, the algorithms."""
    family, report = FAMILIES[name], reports[name]
    found = {check.name: check for check in report.checks}
    if family.refused is not None:
        assert report.failed and family.refused in found["model"].detail
        assert "drafter" not in found and "algorithms" not in found
        return
    assert not report.failed
    assert f"has the EAGLE-3 interface; {NUM_LAYERS} layers" in found["model"].detail
    assert found["aux layers"].detail == "[2, 4, 5] by default (2, N//2, N-3)"
    latent = "attention_backend" in family.engine
    assert found["drafter"].detail.startswith("layer kimik2" if latent else "layer llama")
    assert found["algorithms"].detail.startswith("eagle3, peagle, eagle1, medusa")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_the_doctor_says_why_a_model_cannot_be_tapped(name: str, reports: dict[str, doctor.Report]) -> None:
    found = {check.name: check for check in reports[name].checks}
    assert reports[name].failed
    assert UNSUPPORTED[name] in found["model"].detail
