"""EAGLE-1, Medusa and P-EAGLE drafters in vLLM against the trainer; tiny, random and float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers.engine import Answer, Job, read_drafts, run_engines
from helpers.families import make_family

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers.golden import STEPS, agreement, check_parity, random_prompts, scramble  # noqa: E402
from specdec_trainer.algorithms import ALGORITHMS  # noqa: E402
from specdec_trainer.build import draft_config, draft_vocabulary  # noqa: E402
from specdec_trainer.config import TrainConfig  # noqa: E402
from specdec_trainer.export import export_drafter, lend_tables, load_drafter  # noqa: E402

from specdec_tap.target import load_target  # noqa: E402

pytestmark = pytest.mark.e2e

SETTINGS: dict[str, dict] = {
    "eagle1": {"algorithm": "eagle1"},
    "medusa": {"algorithm": "medusa"},
    "peagle": {"algorithm": "peagle"},
    "eagle1_two_layers": {"algorithm": "eagle1", "num_layers": 2},
    "medusa_two_layers": {"algorithm": "medusa", "num_layers": 2},
    "peagle_plain": {
        "algorithm": "peagle", "norm_before_fc": False, "norm_before_residual": False,
        "draft_vocab_size": 150, "mask_token_id": 7,
    },
}  # fmt: skip
QUICK = ["eagle1", "medusa", "peagle"]


@dataclass
class Served:
    """One drafter after its run."""

    drafter: Path
    drafts: Path
    answer: Answer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("algorithms") / "llama")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Served]:
    base = tmp_path_factory.mktemp("drafters")
    target = load_target(llama)
    names = list(SETTINGS) if "matrix" in request.config.option.markexpr else QUICK
    prompts = random_prompts(40)
    out, jobs = {}, []
    for seed, name in enumerate(names):
        config = TrainConfig(**SETTINGS[name], ttt_steps=STEPS)
        kind = ALGORITHMS[config.algorithm]
        ids = draft_vocabulary(config, target, np.arange(target.vocab_size) % 7)
        layers = () if kind.reads == "final" else (2, 4, 5)
        model = kind(draft_config(config, target, layers, target.vocab_size if ids is None else len(ids)))
        scramble(model, seed=seed)
        if ids is not None:
            model.d2t.copy_(torch.from_numpy(ids) - torch.arange(len(ids)))
        item = Served(base / name / "drafter", base / name / "drafts.safetensors", Answer())
        export_drafter(model, item.drafter, target=target, dtype=torch.float32)
        speculative = {
            "method": kind.method,
            "model": str(item.drafter),
            "num_speculative_tokens": STEPS,
            **kind.serving,
        }
        out[name] = item
        engine = {"speculative_config": speculative}
        jobs.append(Job(model=llama, prompts=prompts, max_tokens=4, drafts=item.drafts, engine=engine))
    for item, answer in zip(out.values(), run_engines(jobs), strict=True):
        item.answer = answer
    return out


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.matrix) for n in SETTINGS]
)
def test_vllm_proposes_what_the_trainer_proposes(name: str, llama: Path, served: dict[str, Served]) -> None:
    item = served[name]
    assert item.answer.error is None, item.answer.error
    check_parity(item.drafter, load_target(llama), item.drafts)


def test_the_comparison_notices_other_placeholders(llama: Path, served: dict[str, Served]) -> None:
    """P-EAGLE with another mask token agrees on the first token only."""
    from dataclasses import replace

    item = served["peagle"]
    model = load_drafter(item.drafter, compute_dtype=torch.float32)
    lend_tables(model, load_target(llama))
    model.config = replace(model.config, mask_token_id=9)
    same = agreement(model, read_drafts(item.drafts))
    assert same[0] == 1.0
    assert same[1] < 0.9
