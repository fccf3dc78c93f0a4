"""``predictions.jsonl`` of a run says what the exported drafter would have drafted, token by token."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from specdec_trainer import data, predictions
from specdec_trainer.config import TrainConfig
from specdec_trainer.evaluate import simulate
from specdec_trainer.export import lend_tables, load_drafter
from specdec_trainer.run import run
from trainer_fakes import FakeStore, learnable_store, tiny_target

from specdec_tap.runlog import PREDICTIONS_NAME, Predictions
from specdec_tap.target import load_target

SETTINGS = {
    "epochs": 6, "batch_tokens": 90, "ttt_steps": 3, "eval_draft_tokens": 3, "held_out": 0.3,
    "dtype": "float32", "log_steps": 5, "lr": 1e-2, "warmup": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def train(target: Path, out: Path, store: FakeStore, **settings) -> Path:
    config = TrainConfig(**{**SETTINGS, **settings})
    run(config, Path("shards"), out=out, target_path=target, store=store, tensorboard=False)
    return out


@pytest.fixture(scope="module")
def store(target) -> FakeStore:
    store = learnable_store(target, records=30)
    store[4].gaps = [(8, 10)]
    return store


@pytest.fixture(scope="module")
def trained(target, store, tmp_path_factory) -> Path:
    return train(target, tmp_path_factory.mktemp("runs") / "one", store)


def loaded(folder: Path, target: Path):
    model = load_drafter(folder / "drafter", compute_dtype=torch.float32)
    lend_tables(model, load_target(target))
    return model.eval()


def test_every_held_out_record_is_there_and_the_file_is_private(trained, store):
    found = Predictions(trained / PREDICTIONS_NAME)
    _, held = data.split(store, SETTINGS["held_out"])
    assert list(found.records) == [store[i].id for i in held]
    assert (found.draft_tokens, found.drafter) == (3, "one")
    assert stat.S_IMODE((trained / PREDICTIONS_NAME).stat().st_mode) == 0o600


def test_it_says_what_the_drafter_proposes(trained, target, store):
    """The drafter drafts on its own after every prefix; as long as it is right, the file must agree."""
    model = loaded(trained, target)
    found = Predictions(trained / PREDICTIONS_NAME)
    seen = {0: 0, 1: 0}
    for name in found.records:
        record = next(r for r in store if r.id == name)
        told = found.get(name)
        prompt = record.spans[1].start
        aux = torch.from_numpy(record._aux)
        ids = torch.from_numpy(record.token_ids.astype(np.int64))
        for token in range(told.first_position, record.num_tokens):
            at = token - told.first_position
            if told.steps[0].correct[at] is None:
                assert token <= prompt or record.gaps
                continue
            rows = token - 1  # the chain that begins one token before: rows 0..token-2
            drafted = model.propose(aux[:rows], ids[1 : rows + 1], steps=3).tolist()
            for k in range(min(3, record.num_tokens - token)):
                right = drafted[k] == record.token_ids[token + k]
                assert told.steps[k].correct[at + k] == int(right)
                assert (told.steps[k].rank[at + k] == 1) == right
                assert 0 <= told.steps[k].probability[at + k] <= 1
                seen[int(right)] += 1
                if not right:
                    break
        assert told.steps[0].correct[prompt - told.first_position] is None  # the prefill makes this token
    assert min(seen.values()) > 10, seen


def test_it_counts_what_the_evaluation_counts(trained, target, store):
    """Teacher and record agree here, so the walk over the file is the walk of the simulated server."""
    from specdec_server.sequence import draft_summary

    model = loaded(trained, target)
    _, held = data.split(store, SETTINGS["held_out"])
    survey = data.survey(store, held, vocab_size=40, max_length=2048)
    dataset = data.Dataset(store, survey)
    rounds, accepted = 0, 0
    for i in range(len(survey.stretches)):
        batch = dataset.load([i])
        table = np.zeros((batch.num_supervised, 3), bool)
        with torch.no_grad():
            for step in model.chains(batch, 3):
                right = model.best(step.hidden) == batch.labels[step.teacher_rows]
                table[step.rows.numpy(), step.index] = right.numpy()
        some_rounds, some = simulate(table, batch.run_left.numpy())
        rounds, accepted = rounds + some_rounds, accepted + int(some.sum())
    found = Predictions(trained / PREDICTIONS_NAME)
    told = [draft_summary(found.get(name)) for name in found.records]
    assert sum(t["num_accepted"] for t in told) == accepted > 0
    assert sum(t["num_rounds"] for t in told) == rounds


def test_a_token_that_the_draft_vocabulary_lacks_is_wrong_and_has_no_rank(target, store, tmp_path):
    folder = train(target, tmp_path / "small", store, epochs=1, draft_vocab_size=12)
    found = Predictions(folder / PREDICTIONS_NAME)
    model = loaded(folder, target)
    own = set(model.target_ids(torch.arange(12)).tolist())
    lacking = 0
    for name in found.records:
        record = next(r for r in store if r.id == name)
        told = found.get(name)
        for step in told.steps:
            for i, right in enumerate(step.correct):
                if right is None:
                    assert step.rank[i] is None
                    assert step.probability[i] is None
                elif int(record.token_ids[told.first_position + i]) not in own:
                    assert (right, step.probability[i], step.rank[i]) == (0, 0, None)
                    lacking += 1
                else:
                    assert 1 <= step.rank[i] <= 12
    assert lacking > 10


def test_the_file_is_bounded(target, store, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MAX_RECORDS", 3)
    folder = train(target, tmp_path / "few", store, epochs=1)
    assert len(Predictions(folder / PREDICTIONS_NAME)) == 3
    monkeypatch.setattr(predictions, "MAX_TOKENS", 30)
    folder = train(target, tmp_path / "fewer", store, epochs=1)
    assert len(Predictions(folder / PREDICTIONS_NAME)) == 1
