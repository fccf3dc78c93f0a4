"""Predictions of a drafter by token: what the trainer writes is what the dashboard reads."""

import json

import pytest

from specdec_tap.errors import InputError
from specdec_tap.runlog import (
    Predictions,
    PredictionsWriter,
    RecordPredictions,
    StepPrediction,
    token_digest,
)

TOKENS = [5, 6, 7]
DIGEST = token_digest(TOKENS)
STEPS = (
    StepPrediction([1, 0, None], [0.8123456, 0.1, None], [1, 7, None]),
    StepPrediction([None, 1, 1], [None, float("nan"), 1.0], [None, None, 1]),
)


def write(path, count=3):
    with PredictionsWriter(path, draft_tokens=2, drafter="runs/1") as out:
        for i in range(count):
            out.write(RecordPredictions(f"s/000001/{i}", DIGEST, 40 + i, STEPS))


def test_records_come_back_by_id(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write(path)
    predictions = Predictions(path)
    assert (len(predictions), predictions.draft_tokens, predictions.drafter) == (3, 2, "runs/1")
    assert "s/000001/2" in predictions
    got = predictions.get("s/000001/2")
    assert (got.first_position, got.num_tokens) == (42, 3)
    assert got.steps[0] == StepPrediction([1, 0, None], [0.81235, 0.1, None], [1, 7, None])
    assert got.steps[1].probability == [None, None, 1.0]
    assert predictions.get("s/000001/9") is None
    assert (got.record, got.digest) == ("s/000001/2", DIGEST)
    assert predictions.is_about("s/000001/2", TOKENS)
    assert not predictions.is_about("s/000001/2", [5, 6, 8])
    assert not predictions.is_about("s/000001/9", TOKENS)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "predictions.jsonl"
    write(path)
    with pytest.raises(KeyboardInterrupt), PredictionsWriter(path, draft_tokens=2, drafter="runs/2"):
        raise KeyboardInterrupt
    assert Predictions(path).drafter == "runs/1"
    assert [p.name for p in tmp_path.iterdir()] == ["predictions.jsonl"]


def test_lists_of_different_lengths_are_refused(tmp_path):
    with (
        PredictionsWriter(tmp_path / "p.jsonl", draft_tokens=1, drafter="d") as out,
        pytest.raises(ValueError, match=r"lengths \[1, 2\]"),
    ):
        out.write(RecordPredictions("s/000001/0", DIGEST, 0, (StepPrediction([1], [0.5, 0.5], [1]),)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is no predictions file"),
        (lambda text: text.replace('"version":1', '"version":2', 1), "up to version 1"),
        (lambda text: text[: len(text) - 5], "line 4 is not a record, or was cut off"),
        (lambda text: text.replace('{"record"', '{"x"', 1), "line 2 is not a record"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path, damage, message):
    path = tmp_path / "predictions.jsonl"
    write(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(InputError, match=message):
        Predictions(path)


@pytest.mark.parametrize("change", [{"first_position": -1}, {"steps": []}, {"steps": [{"correct": [2]}]}])
def test_a_damaged_record_is_named(tmp_path, change):
    path = tmp_path / "predictions.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | change, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    predictions = Predictions(path)
    assert predictions.get("s/000001/0") is not None
    with pytest.raises(InputError, match="record s/000001/1 is damaged"):
        predictions.get("s/000001/1")
