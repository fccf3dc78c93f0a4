"""Latent drafter layers, and drafters for targets with latent attention: vLLM against the trainer.

Everything is tiny and float32, so every token must agree. The Llama and Qwen3 layers on a Llama target are in
test_golden_parity.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers.engine import Answer, Job, run_engines
from helpers.families import FAMILIES, make_family

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers.golden import STEPS, check_parity, random_drafter, random_prompts  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from specdec_trainer.build import draft_config  # noqa: E402
from specdec_trainer.config import TrainConfig  # noqa: E402
from specdec_trainer.export import engine_tensors, export_drafter  # noqa: E402

from specdec_tap.errors import ConfigError  # noqa: E402
from specdec_tap.target import load_target  # noqa: E402

pytestmark = pytest.mark.e2e

AUX = (2, 4, 5)
ORDINARY_HEADS = {"VLLM_MLA_DISABLE": "1"}
"""The CPU build's latent and ordinary attention have no cache block size in common, so a Llama drafter runs
there only beside a target whose latents are expanded; the states are the same."""
SETTINGS: dict[str, dict] = {
    "kimik2": {"layer": "kimik2"},
    "llama": {"layer": "llama"},
    "kimik2_plain_norms": {
        "layer": "kimik2", "fc_norm": False, "norm_output": False, "norm_before_residual": False,
    },
    "kimik2_reduced_vocab": {"layer": "kimik2", "draft_vocab_size": 150},
    "kimik2_own_sizes": {"layer": "kimik2", "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 80},
    "kimik2_two_layers": {"layer": "kimik2", "num_layers": 2},
    "qwen3": {"layer": "qwen3"},
}  # fmt: skip
QUICK = ["kimik2", "llama"]
"""What the default run checks; the rest is for ``-m matrix``."""


@dataclass
class Served:
    """One drafter after its run."""

    folder: Path
    """Holds ``drafter`` and ``drafts.safetensors``."""
    answer: Answer


@pytest.fixture(scope="module")
def kimi_k2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("kimi-k2", tmp_path_factory.mktemp("layers") / "kimi-k2")


def job_for(target_dir: Path, folder: Path, layer: str) -> Job:
    """Serve the target with the drafter in ``folder``."""
    latent = layer == "kimik2"
    speculative = {"method": "eagle3", "model": str(folder / "drafter"), "num_speculative_tokens": STEPS}
    return Job(
        model=target_dir,
        prompts=random_prompts(30),
        max_tokens=4,
        drafts=folder / "drafts.safetensors",
        engine={
            **(FAMILIES["kimi-k2"].engine if latent else {}),
            "speculative_config": speculative,
        },
        env={} if latent else ORDINARY_HEADS,
    )


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, kimi_k2: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Served]:
    """Random drafters of the Kimi-K2 target; all engines share a process."""
    base = tmp_path_factory.mktemp("drafters")
    target = load_target(kimi_k2)
    names = list(SETTINGS) if "matrix" in request.config.option.markexpr else QUICK
    for name in names:
        config = TrainConfig(**SETTINGS[name])
        draft = draft_config(config, target, AUX, config.draft_vocab_size or target.vocab_size)
        export_drafter(random_drafter(draft), base / name / "drafter", target=target, dtype=torch.float32)
    answers = run_engines([job_for(kimi_k2, base / name, SETTINGS[name]["layer"]) for name in names])
    return {name: Served(base / name, answer) for name, answer in zip(names, answers, strict=True)}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.matrix) for n in SETTINGS]
)
def test_vllm_proposes_what_the_trainer_proposes(name: str, kimi_k2: Path, served: dict[str, Served]) -> None:
    """B110, B111, B113, B117: sizes of its own, latent and ordinary drafters on a latent target."""
    item = served[name]
    assert item.answer.error is None, item.answer.error
    check_parity(item.folder / "drafter", load_target(kimi_k2), item.folder / "drafts.safetensors")


@pytest.mark.matrix
def test_vllm_cannot_load_a_latent_drafter_without_query_latent(kimi_k2: Path, tmp_path: Path) -> None:
    """The export refuses it; this shows why, and will fail when vLLM learns to load it."""
    target = load_target(kimi_k2)
    draft = draft_config(TrainConfig(layer="kimik2"), target, AUX, target.vocab_size)
    draft = replace(draft, latent=replace(draft.latent, q_lora_rank=None))
    model = random_drafter(draft)
    with pytest.raises(ConfigError, match="has no query latent"):
        export_drafter(model, tmp_path / "drafter", target=target)
    whole = replace(draft, latent=replace(draft.latent, q_lora_rank=32))
    export_drafter(random_drafter(whole), tmp_path / "drafter", target=target)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({**config, "q_lora_rank": None}))
    save_file(engine_tensors(model, "vllm", torch.float32), tmp_path / "drafter" / "model.safetensors")
    (answer,) = run_engines([job_for(kimi_k2, tmp_path, "kimik2")])
    assert answer.error is not None
    assert "fused_qkv_a_proj" in answer.error
