"""EAGLE-3, EAGLE-1, Medusa and P-EAGLE on a real chat model: captured, trained for a minute each, accepted.

Part of ``-m matrix``: about seven minutes on two cores. ``SPECDEC_TEST_SMOLLM2`` names a folder with the
model; without it the model is fetched.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.engine import Answer, Job, read_drafts, run_engines, wait_for_records

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers.golden import STEPS, agreement  # noqa: E402
from specdec_trainer.algorithms import ALGORITHMS  # noqa: E402
from specdec_trainer.config import TrainConfig  # noqa: E402
from specdec_trainer.export import lend_tables, load_drafter  # noqa: E402
from specdec_trainer.run import run  # noqa: E402

from specdec_tap.prompts import iterate_prompts  # noqa: E402
from specdec_tap.smollm2 import get_smollm2  # noqa: E402
from specdec_tap.target import load_target  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

TRAIN_PROMPTS, TRAIN_TOKENS, TRAIN_S = 160, 96, 50
TEST_PROMPTS, TEST_TOKENS = 16, 64
ENGINE = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 32}
ENV = {"OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))}


@dataclass
class Served:
    """One algorithm's drafter after its run."""

    drafter: Path
    drafts: Path
    simulated: float
    answer: Answer


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("SPECDEC_TEST_SMOLLM2"):
        return Path(given)
    return get_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


def chat_prompts(model: Path, count: int, *, seed: int) -> list[list[int]]:
    """Token ids of first turns, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    out = []
    for prompt in itertools.islice(iterate_prompts(seed), count):
        chat = [{"role": "user", "content": prompt["turns"][0]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        out.append(list(ids)[-600:])
    return out


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    base = tmp_path_factory.mktemp("algorithms")
    shards = base / "shards"
    capture = Job(
        model=smollm2,
        prompts=chat_prompts(smollm2, TRAIN_PROMPTS, seed=0),
        shards=shards,
        tap={"final_hidden": "all"},
        max_tokens=TRAIN_TOKENS,
        engine=ENGINE,
    )
    (answer,) = run_engines([capture], env=ENV)
    assert answer.error is None, answer.error
    wait_for_records(shards, TRAIN_PROMPTS)
    tests = chat_prompts(smollm2, TEST_PROMPTS, seed=1)
    out, jobs = {}, []
    for name, kind in ALGORITHMS.items():
        config = TrainConfig(
            algorithm=name,
            ttt_steps=STEPS,
            time_limit=TRAIN_S,
            epochs=1000,
            eval_epochs=1000,
            batch_tokens=1024,
        )
        result = run(config, shards, out=base / name, tensorboard=False)
        assert result.evaluation is not None
        item = Served(
            result.drafter,
            base / f"{name}.safetensors",
            result.evaluation.simulated_acceptance_length,
            Answer(),
        )
        out[name] = item
        speculative = {
            "method": kind.method,
            "model": str(item.drafter),
            "num_speculative_tokens": STEPS,
            **kind.serving,
        }
        jobs.append(
            Job(
                model=smollm2,
                prompts=tests,
                max_tokens=TEST_TOKENS,
                drafts=item.drafts,
                engine={**ENGINE, "speculative_config": speculative},
            )
        )
    for item, answer in zip(out.values(), run_engines(jobs, env=ENV), strict=True):
        item.answer = answer
    return out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_drafts_on_a_real_model_are_accepted(
    algorithm: str, smollm2: Path, served: dict[str, Served]
) -> None:
    item = served[algorithm]
    assert item.answer.error is None, item.answer.error
    model = load_drafter(item.drafter, compute_dtype=torch.bfloat16)
    lend_tables(model, load_target(smollm2))
    same = agreement(model, read_drafts(item.drafts))
    numbers = {
        "acceptance_length": item.answer.acceptance_length,
        "simulated_acceptance_length": item.simulated,
        "agreement": same,
    }
    print(algorithm, json.dumps(numbers))
    # In bfloat16 near ties fall either way: the trainer and vLLM round differently.
    assert same[0] >= 0.8
    assert item.answer.acceptance_length > 1.03
