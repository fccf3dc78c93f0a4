"""Experiment trackers: optional, imported only when asked for, fed with the same scalars as TensorBoard."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from specdec_tap.errors import ConfigError


class Tracker(Protocol):
    """Somewhere else that scalars go."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder / "tensorboard"))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named like the folder; project and entity come from WANDB_* variables."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        place = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        # A resumed run goes on under the same id.
        self._run = wandb.init(
            dir=str(folder), name=folder.name, id=f"{folder.name}-{place}", resume="allow", config=settings
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, named like the folder; server and experiment come from MLFLOW_* variables."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._run = mlflow.start_run(run_name=folder.name)
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: dict[str, tuple[type, str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def open_trackers(names: list[str], folder: Path, settings: dict[str, Any]) -> list[Tracker]:
    """Start the named trackers.

    Args:
        names: Of ``tensorboard``, ``wandb``, ``mlflow``.
        folder: Of the run.
        settings: Shown with it.

    Raises:
        ConfigError: One is not installed, or cannot start; nothing was trained.
    """
    out: list[Tracker] = []
    for name in names:
        kind, package = _KINDS[name]
        try:
            out.append(kind(folder, settings))
        except ImportError as err:
            raise ConfigError(
                f"trackers names {name}, which is not installed; pip install {package}, or leave it out"
            ) from err
        except (
            Exception
        ) as err:  # whatever a tracker raises must stop the run before it trains, with its name
            raise ConfigError(f"tracker {name} cannot start: {err}") from err
    return out
