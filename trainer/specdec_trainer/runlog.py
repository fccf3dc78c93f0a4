"""What a run leaves behind: ``log.jsonl`` (one object a line), TensorBoard events, pictures, provenance.

Kinds of line: ``start`` (settings and data), ``train`` (every few steps), ``eval``, ``note``, ``end``.
Units are in the names. The dashboard reads the same file.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec_tap._version import __version__

from .trackers import Tracker

logger = logging.getLogger("specdec_trainer.runlog")

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends lines and events; every line reaches the file at once, so a killed run keeps them."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.folder = folder
        fd = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(fd, "a", buffering=1, encoding="ascii")
        self._trackers = list(trackers)

    def write(self, kind: str, **values: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"kind": kind, "time_unix_s": time.time(), **values}) + "\n")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers of one step, for the trackers."""
        for tracker in list(self._trackers):
            try:
                tracker.scalars(step, values)
            except Exception as err:  # a service that is away must not end the run; the log has the numbers
                self._trackers.remove(tracker)
                self._lost(tracker, err)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as err:  # as above
                self._lost(tracker, err)

    @staticmethod
    def _lost(tracker: Tracker, err: Exception) -> None:
        name = type(tracker).__name__
        logger.warning("%s gets no more numbers of this run: %s: %s", name, type(err).__name__, err)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log; a torn last line is left out."""
    out = []
    for line in (folder / LOG_FILE).read_text().splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def provenance() -> dict[str, Any]:
    """Versions, arguments and machine of this process."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "specdec_tap": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "arguments": sys.argv[1:],
        "cpu": platform.processor() or platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def plot(folder: Path) -> list[Path]:
    """Draw ``loss.png``, ``accuracy.png`` and ``acceptance.png`` from the log; returns what was drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(folder)
    train = [x for x in lines if x["kind"] == "train"]
    evals = [x for x in lines if x["kind"] == "eval"]
    drawn = []
    for name, key, label in (
        ("loss.png", "loss", "soft cross-entropy (nats)"),
        ("accuracy.png", "accuracy", "greedy token right"),
    ):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        steps = max((len(x[key]) for x in train + evals), default=0)
        for k in range(steps):
            color = f"C{k}"
            points = [(x["step"], x[key][k]) for x in train if len(x[key]) > k and x[key][k] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, alpha=0.35, linewidth=1)
            points = [(x["step"], x[key][k]) for x in evals if len(x[key]) > k]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker="o",
                    markersize=3,
                    label=f"draft token {k + 1}",
                )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.set_title("thin: training, dots: held-out")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        path = folder / name
        figure.savefig(path, dpi=110)
        drawn.append(path)
    if evals:
        drawn.append(_plot_learning_curve(evals, folder / "acceptance.png"))
    return drawn


def _plot_learning_curve(evals: list[dict[str, Any]], path: Path) -> Path:
    """Acceptance length against tokens: whether more data or more passes would still help."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    tokens = [x["tokens"] for x in evals]
    lengths = [x["simulated_acceptance_length"] for x in evals]
    axes.plot(tokens, lengths, color="C0", marker="o", markersize=4, label="greedy requests")
    sampled = [x.get("sampled_acceptance_length") for x in evals]
    if None not in sampled and sampled != lengths:
        axes.plot(
            tokens, sampled, color="C1", marker="o", markersize=4, label="requests like the captured ones"
        )
    best = max(range(len(lengths)), key=lengths.__getitem__)
    axes.annotate(
        f"{lengths[best]:.3f}", (tokens[best], lengths[best]), (0, 8), textcoords="offset points", ha="center"
    )
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("simulated acceptance length")
    axes.set_title("held-out requests; 1 is a drafter that is never right")
    axes.set_ylim(1.0, 1.0 + max(0.1, max(lengths) - 1.0) * 1.25)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    return path
