"""Every model family: a tiny random member is served with the tap; its rows equal transformers' in float32.

All families of one runner share one process (tests/helpers/engine.py), so that the V1 half takes a minute.
The V2 half, where Triton is interpreted, is left out of the default run (``-m matrix`` runs it).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engine import Answer, Job, run_engines, wait_for_records
from helpers.families import FAMILIES, NUM_LAYERS, VOCAB, make_family

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers.golden import STEPS, check_parity  # noqa: E402

from specdec_tap.target import load_target  # noqa: E402

pytestmark = pytest.mark.e2e

SERVED = [name for name, family in FAMILIES.items() if family.refused is None]
QUICK = ["gpt-oss", "kimi-k2.5"]
"""Families whose drafters the default run trains and serves."""
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]
AUX = (2, 4, 5, NUM_LAYERS)
"""vLLM's default for eight layers, and the stream after the last layer, before the final norm."""
PROMPT_LENGTHS = (1, 7, 40, 70, 130, *range(20, 40))
MAX_TOKENS = 40
MAX_ERROR = 1e-3
MIN_NEIGHBOUR_DISTANCE = 0.1
"""No row of a neighbouring layer comes as close as this, so a shift by one layer cannot pass."""


@dataclass
class Served:
    """One family after its run."""

    model: Path
    shards: Path
    answer: Answer
    prompts: list[list[int]]
    _store: Any = None

    @property
    def store(self) -> Any:
        if self._store is None:
            assert self.answer.error is None, self.answer.error
            self._store = wait_for_records(self.shards, len(self.prompts))
        return self._store


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, VOCAB, length).tolist() for length in lengths]


def drafter_layer(name: str) -> str:
    """The layer that fits the target: latent attention where the target has it."""
    return "kimik2" if "attention_backend" in FAMILIES[name].engine else "llama"


def _serve(folder: Path, names: list[str], runner: str, lengths: tuple[int, ...]) -> dict[str, Served]:
    prompts = _prompts(lengths)
    served = {
        name: Served(make_family(name, folder / name), folder / f"{name}-shards", Answer(), prompts)
        for name in names
    }
    jobs = [
        Job(
            model=item.model,
            prompts=prompts,
            shards=item.shards,
            tap={"aux_layer_ids": list(AUX), "final_hidden": "all"},
            max_tokens=MAX_TOKENS,
            engine=FAMILIES[name].engine,
        )
        for name, item in served.items()
    ]
    for item, answer in zip(served.values(), run_engines(jobs, runner=runner), strict=True):
        item.answer = answer
    return served


@pytest.fixture(scope="module")
def on_v1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    return _serve(tmp_path_factory.mktemp("targets-v1"), list(FAMILIES), "v1", PROMPT_LENGTHS)


def reference(name: str, model_dir: Path) -> Callable[[np.ndarray], tuple[list[Any], Any, Any]]:
    """Return a function from token ids ``[T]`` to the N+1 streams ``[T, H]``, the final state and the logits.

    The stream entering each layer, and the one entering the final norm, are seen by hooks: that does not
    depend on what transformers calls hidden states in which family.
    """
    from transformers import AutoModelForCausalLM

    folder = model_dir / (FAMILIES[name].reference or "")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    streams: list[Any] = []

    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(keep, with_kwargs=True)

    def run(token_ids: np.ndarray) -> tuple[list[Any], Any, Any]:
        streams.clear()
        with torch.inference_mode():
            final = model.model(torch.from_numpy(token_ids.astype(np.int64))[None]).last_hidden_state
            logits = model.lm_head(final)
        return list(streams), final[0], logits[0]

    return run


def distance(rows: Any, other: Any) -> Any:
    """Relative L2 distance of each row: ``[T]``."""
    return (rows - other).norm(dim=-1) / other.norm(dim=-1)


def check_rows(name: str, served: Served) -> None:
    run = reference(name, served.model)
    assert served.store.header.aux_layer_ids == AUX
    for record in served.store:
        assert record.gaps == []
        streams, final, _ = run(record.token_ids[:-1])
        aux = torch.from_numpy(record.aux_float())
        for slot, layer in enumerate(AUX):
            assert distance(aux[:, slot], streams[layer]).max() < MAX_ERROR
            for neighbour in {layer - 1, min(layer + 1, NUM_LAYERS)} - {layer}:
                assert distance(aux[:, slot], streams[neighbour]).min() > MIN_NEIGHBOUR_DISTANCE
        captured = torch.from_numpy(record.final_float(0, record.num_rows))
        assert distance(captured, final).max() < MAX_ERROR
        assert distance(captured, streams[NUM_LAYERS]).min() > MIN_NEIGHBOUR_DISTANCE
        # Long answers of random models repeat themselves, so some neighbouring rows are alike.
        assert distance(captured[1:], final[:-1]).max() > MIN_NEIGHBOUR_DISTANCE


def check_tokens(served: Served) -> None:
    """``lm_head(final)``, with the head found in shards/target, is argmax at every response token."""
    target = load_target(served.shards / "target")
    head = target.head.torch().float()
    wanted = {tuple(p): r for p, r in zip(served.prompts, served.answer.responses, strict=True)}
    for record in served.store:
        prompt, response = record.spans
        tokens = record.token_ids.tolist()
        assert wanted[tuple(tokens[: prompt.stop])] == tokens[response.start :]
        final = torch.from_numpy(record.final_float(response.start - 1, response.stop - 1))
        assert (final @ head.T)[:, : target.vocab_size].argmax(-1).tolist() == tokens[response.start :]


@pytest.mark.parametrize("name", SERVED)
def test_captured_rows_equal_transformers(name: str, on_v1: dict[str, Served]) -> None:
    check_rows(name, on_v1[name])


@pytest.mark.parametrize("name", SERVED)
def test_head_of_the_final_rows_gives_the_served_tokens(name: str, on_v1: dict[str, Served]) -> None:
    check_tokens(on_v1[name])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_embedding_and_head_are_found_in_the_checkpoint(name: str, on_v1: dict[str, Served]) -> None:
    from transformers import AutoModelForCausalLM

    item = on_v1[name]
    target = load_target(item.model)
    model = AutoModelForCausalLM.from_pretrained(
        item.model / (FAMILIES[name].reference or ""), dtype=torch.float32
    )
    assert torch.equal(target.embed.torch(), model.model.embed_tokens.weight)
    assert torch.equal(target.head.torch(), model.lm_head.weight)
    assert target.norm is not None
    assert torch.equal(target.norm.torch(), model.model.norm.weight)
    assert target.norm_kind == ("rms_one_plus" if name == "gemma3" else "rms")
    assert target.norm_eps == model.config.rms_norm_eps
    assert (target.num_hidden_layers, target.hidden_size, target.vocab_size) == (NUM_LAYERS, 64, VOCAB)


@dataclass
class Drafted:
    """A trained drafter of one family, served."""

    drafter: Path
    drafts: Path
    answer: Answer
    simulated: float


@pytest.fixture(scope="module")
def drafted(
    request: pytest.FixtureRequest, on_v1: dict[str, Served], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Drafted]:
    """Train a drafter from each family's shards, then serve each target with its drafter."""
    from specdec_trainer.config import TrainConfig
    from specdec_trainer.run import run

    names = SERVED if "matrix" in request.config.option.markexpr else QUICK
    base = tmp_path_factory.mktemp("drafted")
    out, jobs = {}, []
    for name in names:
        config = TrainConfig(
            layer=drafter_layer(name),
            aux_layer_ids="2,4,5",
            ttt_steps=STEPS,
            epochs=1000,
            max_steps=100,
            lr=2e-2,
            adamw_lr=5e-3,
            schedule="linear",
            batch_tokens=512,
            eval_epochs=1000,
            dtype="float32",
        )
        result = run(config, on_v1[name].shards, out=base / name, tensorboard=False)
        assert result.evaluation is not None
        item = Drafted(
            result.drafter,
            base / name / "drafts.safetensors",
            Answer(),
            result.evaluation.simulated_acceptance_length,
        )
        out[name] = item
        speculative = {"method": "eagle3", "model": str(item.drafter), "num_speculative_tokens": STEPS}
        jobs.append(
            Job(
                model=on_v1[name].model,
                prompts=on_v1[name].prompts,
                max_tokens=MAX_TOKENS,
                drafts=item.drafts,
                engine={**FAMILIES[name].engine, "speculative_config": speculative},
            )
        )
    for item, answer in zip(out.values(), run_engines(jobs), strict=True):
        item.answer = answer
    return out


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.matrix) for n in SERVED]
)
def test_a_drafter_of_every_family_trains_loads_and_proposes(
    name: str, on_v1: dict[str, Served], drafted: dict[str, Drafted]
) -> None:
    """Served drafts equal the trainer's, the answers stay the target's own, and drafts are accepted."""
    item = drafted[name]
    assert item.answer.error is None, item.answer.error
    check_parity(item.drafter, load_target(on_v1[name].model), item.drafts)
    assert item.answer.responses == on_v1[name].answer.responses
    assert item.answer.acceptance_length > 1.3
    assert on_v1[name].store.header.aux_layer_ids == AUX


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_without_the_interface_is_refused_by_name(name: str, on_v1: dict[str, Served]) -> None:
    item = on_v1[name]
    assert item.answer.error is not None
    assert item.answer.error.startswith(f"UnsupportedVllmError: {FAMILIES[name].refused}")
    assert "serve without capture by unsetting SPECDEC_TAP_DIR" in item.answer.error
    assert list(item.shards.glob("*/*.safetensors")) == []


@pytest.mark.matrix
def test_every_family_on_the_v2_runner(tmp_path: Path) -> None:
    served = _serve(tmp_path, SERVED, "v2", (1, 40, 30))
    problems = {}
    for name, item in served.items():
        try:
            check_rows(name, item)
            check_tokens(item)
        except AssertionError as err:
            problems[name] = str(err)
    assert problems == {}
    for item in served.values():
        assert item.store.header.engine["runner"] == "v2"


def test_the_config_of_a_multimodal_model_is_read_through_its_text_part(on_v1: dict[str, Served]) -> None:
    """Kimi-K2.5 nests the language model's config, and its tensors under ``language_model.``."""
    item = on_v1["kimi-k2.5"]
    assert "num_hidden_layers" not in json.loads((item.model / "config.json").read_text())
    header = item.store.header
    assert header.target.architecture == "KimiK25ForConditionalGeneration"
    assert (header.target.num_hidden_layers, header.target.hidden_size) == (NUM_LAYERS, 64)
    assert load_target(item.model).embed.name == "language_model.model.embed_tokens.weight"
