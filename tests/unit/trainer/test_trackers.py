"""Experiment trackers are optional: imported only when named, and what is missing is said before training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from specdec_trainer.config import TrainConfig
from specdec_trainer.run import run
from specdec_trainer.runlog import RunLog
from specdec_trainer.trackers import open_trackers
from trainer_fakes import learnable_store, tiny_target

from specdec_tap.errors import ConfigError

SETTINGS = {"batch_tokens": 90, "ttt_steps": 2, "eval_draft_tokens": 2, "dtype": "float32", "max_steps": 3,
            "log_steps": 1}  # fmt: skip


def go(tmp_path: Path, **changes):
    target = tiny_target(tmp_path / "m")
    return run(
        TrainConfig(**SETTINGS, **changes), Path("shards"), out=tmp_path / "run", target_path=target,
        store=learnable_store(target),
    )  # fmt: skip


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trackers names 'neptune'; expected wandb, mlflow or wandb,mlflow"
    ):
        TrainConfig(trackers="wandb,neptune")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=rf"trackers names {name}, which is not installed; pip install {name}"
    ):
        go(tmp_path, trackers=name)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_trainer_imports_no_tracker() -> None:
    code = "import sys, specdec_trainer.run; print([m for m in ('wandb', 'mlflow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_weights_and_biases_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    go(tmp_path, trackers="wandb")
    assert wandb.run is None  # finished
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_mlflow_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    go(tmp_path, trackers="mlflow")
    runs = mlflow.MlflowClient().search_runs(["0"])
    assert [r.info.run_name for r in runs] == ["run"]
    assert runs[0].data.params["ttt_steps"] == "2"
    history = mlflow.MlflowClient().get_metric_history(runs[0].info.run_id, "train/loss/draft_token_1")
    assert [point.step for point in history] == [1, 2, 3]


def test_tensorboard_is_one_of_them(tmp_path: Path) -> None:
    for tracker in open_trackers(["tensorboard"], tmp_path, {}):
        tracker.scalars(1, {"a": 1.0})
        tracker.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away:
        def scalars(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("no route")

        def close(self) -> None:
            raise ConnectionError("no route")

    class Here(list):
        def scalars(self, step: int, values: dict[str, float]) -> None:
            self.append(step)

        def close(self) -> None:
            self.append("closed")

    here = Here()
    log = RunLog(tmp_path, [Away(), here])
    for step in (1, 2):
        log.scalars(step, {"a": 1.0})
    log.close()
    assert here == [1, 2, "closed"]
    assert caplog.text.count("Away gets no more numbers of this run: ConnectionError: no route") == 1
