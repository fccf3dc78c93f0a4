"""Training runs and evaluations in a folder, read as they grow."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_tap.errors import InputError
from specdec_tap.runlog import LOG_NAME, PREDICTIONS_NAME, Predictions
from specdec_tap.shards import Record

from .errors import not_found
from .sequence import draft_summary

MAX_RUNS = 1000
MAX_PREDICTED = 200
MAX_LOG_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
MAX_EVALUATION_BYTES = 16 << 20
MAX_EVALUATIONS = 500
RUNNING_FOR_S = 300.0
"""A run without an end line whose log was written this recently is running."""

TRAIN_SERIES = ("loss", "accuracy", "tokens_per_s", "data_wait", "lr", "peak_rss_bytes", "epoch")
EVAL_SERIES = (
    "loss",
    "accuracy",
    "simulated_acceptance_length",
    "sampled_acceptance_length",
    "simulated_acceptance_per_position",
)


@dataclass(slots=True)
class _Log:
    """What was read of one log so far."""

    inode: int = 0
    offset: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: int = 0
    mtime: float = 0.0


class Runs:
    """A folder of runs, or one run. Thread-safe.

    Args:
        root: The folder; None or a folder that does not exist has no runs.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._logs: dict[str, _Log] = {}
        self._predictions: dict[str, tuple[tuple[int, int, int], Predictions]] = {}
        self._predicted: dict[str, tuple[Predictions, list[dict[str, Any]]]] = {}
        self._evaluations: dict[Path, tuple[tuple[int, int, int], list[dict[str, Any]]]] = {}

    # ---- where things are

    def _folders(self) -> dict[str, Path]:
        """Run name to folder, from the folder's listing; a name from a request is only looked up in it."""
        if self.root is None or not self.root.is_dir():
            return {}
        if _is_file(self.root / LOG_NAME):
            return {self.root.resolve().name: self.root}
        found = {}
        for entry in sorted(os.scandir(self.root), key=lambda e: e.name, reverse=True):
            if len(found) >= MAX_RUNS:
                break
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            if _is_file(Path(entry.path, LOG_NAME)) or _is_file(Path(entry.path, PREDICTIONS_NAME)):
                found[entry.name] = Path(entry.path)
        return found

    def _folder(self, name: str) -> Path:
        folder = self._folders().get(name)
        if folder is None:
            raise not_found(f"there is no run {name!r}", "the runs page lists those in the folder")
        return folder

    def version(self) -> tuple[Any, ...]:
        """Something that changes when any run changes; cheap."""
        out = []
        for name, folder in self._folders().items():
            for file in (LOG_NAME, PREDICTIONS_NAME):
                with contextlib.suppress(OSError):
                    out.append((name, file, *_stamp((folder / file).stat())))
        return tuple(out)

    # ---- runs

    def rows(self) -> list[dict[str, Any]]:
        """One row per run, the one that was started last first."""
        rows = [self._row(name, folder) for name, folder in self._folders().items()]
        return sorted(rows, key=lambda r: (r["started_unix_s"] or 0.0, r["name"]), reverse=True)

    def _row(self, name: str, folder: Path) -> dict[str, Any]:
        log = self._log(name, folder)
        last = log.train[-1] if log.train else {}
        best = max(
            (e for e in log.evals if _number(e.get("simulated_acceptance_length")) is not None),
            key=lambda e: e["simulated_acceptance_length"],
            default=None,
        )
        settings, drafter = log.start.get("settings"), log.start.get("drafter")
        end = log.end or {}
        if log.end is not None:
            state = "interrupted" if end.get("interrupted") else "finished"
        elif log.train or log.start:
            state = "running" if time.time() - log.mtime < RUNNING_FOR_S else "stopped"
        else:
            state = "empty"
        return {
            "name": name,
            "state": state,
            "started_unix_s": _number(log.start.get("time_unix_s")),
            "updated_unix_s": log.mtime or None,
            "num_steps": _number((log.end or last).get("step")),
            "num_tokens": _number((log.end or last).get("tokens")),
            "progress_fraction": 1.0 if state == "finished" else _number(last.get("progress")),
            "tokens_per_s": _number(end.get("tokens_per_s")) or _number(last.get("tokens_per_s")),
            "duration_s": _number(end.get("seconds")),
            "loss": _numbers(last.get("loss")),
            "best_simulated_acceptance_length": best and best["simulated_acceptance_length"],
            "best_step": best and _number(best.get("step")),
            "best_per_position": _numbers(best.get("simulated_acceptance_per_position")) if best else [],
            "best_accuracy": _numbers(best.get("accuracy")) if best else [],
            "num_evals": len(log.evals),
            "ttt_steps": _number(settings.get("ttt_steps")) if isinstance(settings, dict) else None,
            "architecture": str(drafter.get("architecture", ""))[:100] if isinstance(drafter, dict) else None,
            "num_parameters": _number(drafter.get("parameters")) if isinstance(drafter, dict) else None,
            "has_predictions": _is_file(folder / PREDICTIONS_NAME),
            "num_bad_lines": log.bad_lines,
        }

    def run(self, name: str, max_points: int = 500) -> dict[str, Any]:
        """One run: its row, its settings, and its curves with at most ``max_points`` points each."""
        folder = self._folder(name)
        row = self._row(name, folder)
        log = self._log(name, folder)
        return row | {
            **{
                name: _clean(log.start.get(name))
                for name in ("settings", "drafter", "shards", "training", "held_out")
            },
            "end": _clean(log.end),
            "notes": log.notes[-50:],
            "provenance": _clean(_small_json(folder / "provenance.json")),
            "train": _series(log.train, TRAIN_SERIES, max_points),
            "eval": _series(log.evals, EVAL_SERIES, max_points),
            **self._predicted_safely(name),
        }

    def _predicted_safely(self, name: str) -> dict[str, Any]:
        try:
            return {"predicted_records": self.predicted_records(name), "predictions_problem": None}
        except InputError as err:
            return {"predicted_records": [], "predictions_problem": str(err)}

    def _log(self, name: str, folder: Path) -> _Log:
        with self._lock:
            log = self._logs.setdefault(name, _Log())
            path = folder / LOG_NAME
            try:
                fd = _open_regular(path)
            except FileNotFoundError:
                return log
            with os.fdopen(fd, "rb") as file:
                info = os.fstat(fd)
                if info.st_ino != log.inode or info.st_size < log.offset:
                    log = self._logs[name] = _Log(inode=info.st_ino)
                log.mtime = info.st_mtime
                if info.st_size > MAX_LOG_BYTES:
                    raise InputError(f"{path} has {info.st_size:,} bytes; expected at most {MAX_LOG_BYTES:,}")
                file.seek(log.offset)
                while line := file.readline(MAX_LINE_BYTES):
                    if not line.endswith(b"\n"):
                        if len(line) < MAX_LINE_BYTES:
                            break  # being written
                        log.bad_lines += 1
                    else:
                        _take(log, line)
                    log.offset = file.tell()
            return log

    # ---- predictions

    def prediction_runs(self, record: Record) -> list[dict[str, Any]]:
        """Runs that predict a record, newest first, and those whose predictions cannot be read."""
        out = []
        for name, folder in self._folders().items():
            if not _is_file(folder / PREDICTIONS_NAME):
                continue
            try:
                predictions = self.predictions(name)
            except InputError as err:
                out.append({"name": name, "problem": str(err), "num_records": 0, "draft_tokens": 0})
                continue
            if predictions.is_about(record.id, record.token_ids):
                out.append(
                    {
                        "name": name,
                        "problem": None,
                        "num_records": len(predictions),
                        "draft_tokens": predictions.draft_tokens,
                        "drafter": predictions.drafter,
                    }
                )
        return out

    def predicted_records(self, name: str) -> list[dict[str, Any]]:
        """How a run's drafter did on each record of its predictions, the worst first; empty without any.

        Returns:
            Per record ``record``, ``digest`` of its tokens, ``num_evaluated`` and ``num_correct`` (first
            draft position), ``correct_fractions`` by draft position, ``simulated_acceptance_length``.

        Raises:
            InputError: The file is damaged.
        """
        if not _is_file(self._folder(name) / PREDICTIONS_NAME):
            return []
        predictions = self.predictions(name)
        with self._lock:
            known = self._predicted.get(name)
        if known is not None and known[0] is predictions:
            return known[1]
        rows = []
        for record in itertools.islice(predictions.records, MAX_PREDICTED):
            found = predictions.get(record)
            if found is not None:
                rows.append({"record": record, "digest": found.digest, **_told(draft_summary(found))})
        rows = [row for row in rows if row["num_evaluated"]]
        rows.sort(key=lambda row: row["simulated_acceptance_length"] or 1.0)
        with self._lock:
            self._predicted[name] = (predictions, rows)
        return rows

    def predictions(self, name: str) -> Predictions:
        """The predictions of a run; its index is kept until the file changes."""
        path = self._folder(name) / PREDICTIONS_NAME
        try:
            info = path.lstat()
        except OSError as err:
            raise not_found(f"run {name!r} has no {PREDICTIONS_NAME}") from err
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"{path} is not a regular file")
        with self._lock:
            known = self._predictions.get(name)
            if known is None or known[0] != _stamp(info):
                known = self._predictions[name] = (_stamp(info), Predictions(path))
            return known[1]

    # ---- evaluations

    def evaluations(self) -> list[dict[str, Any]]:
        """What ``specdec-tap eval --json`` wrote beside and inside the runs, newest first."""
        if self.root is None or not self.root.is_dir():
            return []
        out = []
        for path in _json_files(self.root):
            try:
                info = path.lstat()
                if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_EVALUATION_BYTES:
                    continue
                stamp = _stamp(info)
                with self._lock:
                    known = self._evaluations.get(path)
                if known is None or known[0] != stamp:
                    known = (stamp, _evaluations_in(json.loads(path.read_bytes())))
                    with self._lock:
                        self._evaluations[path] = known
            except (OSError, ValueError, RecursionError):
                continue  # some other program's JSON
            inside = path.relative_to(self.root)
            for number, evaluation in enumerate(known[1]):
                name = str(inside) if len(known[1]) == 1 else f"{inside}#{number + 1}"
                run = inside.parts[0] if len(inside.parts) > 1 else None
                out.append({"name": name, "run": run, "updated_unix_s": info.st_mtime, **evaluation})
        return sorted(out, key=lambda e: e["updated_unix_s"], reverse=True)[:MAX_EVALUATIONS]


def _told(summary: dict[str, Any]) -> dict[str, Any]:
    rounds, accepted = summary["num_rounds"], summary["num_accepted"]
    return {
        "num_evaluated": summary["positions"][0]["num_evaluated"],
        "num_correct": summary["positions"][0]["num_correct"],
        "correct_fractions": [position["correct_fraction"] for position in summary["positions"]],
        "simulated_acceptance_length": (rounds + accepted) / rounds if rounds else None,
    }


def _json_files(root: Path) -> Iterator[Path]:
    """JSON files of a folder and of the folders in it, a bounded number."""
    left = 5000
    for folder in (root, *(Path(e.path) for e in os.scandir(root) if e.is_dir(follow_symlinks=False))):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                left -= 1
                if left < 0:
                    return
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    yield Path(entry.path)


def _evaluations_in(data: Any) -> list[dict[str, Any]]:
    """Evaluations in a JSON value: itself, its ``evaluation``, or the items of its ``evaluations``."""
    if not isinstance(data, dict):
        return []
    if isinstance(data.get("acceptance_per_position"), list):
        return [_evaluation(data)]
    inner = data.get("evaluations")
    many = inner if isinstance(inner, list) else [data.get("evaluation")]
    return [
        _evaluation(e)
        for e in many
        if isinstance(e, dict) and isinstance(e.get("acceptance_per_position"), list)
    ]


def _evaluation(data: dict[str, Any]) -> dict[str, Any]:
    categories = data.get("categories")
    speed, baseline = (
        _number(data.get("output_tokens_per_s")),
        _number(data.get("baseline_output_tokens_per_s")),
    )
    speedup = _number(data.get("speedup"))
    if speedup is None and speed is not None and baseline:
        speedup = speed / baseline
    return {
        **_drafts(data),
        "num_requests": _number(data.get("requests")),
        "num_output_tokens": _number(data.get("output_tokens")),
        "output_tokens_per_s": speed,
        "baseline_output_tokens_per_s": baseline,
        "speedup": speedup,
        "loads": _loads(data.get("loads")),
        "num_identical_answers": _number(data.get("identical_answers")),
        "num_compared_answers": _number(data.get("compared_answers")),
        "categories": {
            str(name)[:100]: _drafts(counts)
            for name, counts in list(categories.items())[:100]
            if isinstance(counts, dict)
        }
        if isinstance(categories, dict)
        else {},
    }


def _loads(value: Any) -> list[dict[str, Any]]:
    """Speed by requests under way, from ``specdec-tap eval --loads``; ascending."""
    names = ("concurrency", "output_tokens_per_s", "baseline_output_tokens_per_s", "speedup")
    rows = [{name: _number(row.get(name)) for name in names} for row in _dicts(value)]
    return sorted((row for row in rows if row["concurrency"]), key=lambda row: row["concurrency"])


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [row for row in value[:50] if isinstance(row, dict)] if isinstance(value, list) else []


def _drafts(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "acceptance_length": _number(data.get("acceptance_length")),
        "acceptance_rate": _number(data.get("acceptance_rate")),
        "acceptance_per_position": _numbers(data.get("acceptance_per_position")),
        "num_drafts": _number(data.get("num_drafts")),
    }


def _take(log: _Log, line: bytes) -> None:
    try:
        data = json.loads(line)
        kind = data["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        log.bad_lines += 1
        return
    if kind == "start":
        log.start, log.end = data, None
    elif kind == "train":
        _rewind(log.train, data)
        log.train.append(_kept(data, TRAIN_SERIES))
    elif kind == "eval":
        _rewind(log.evals, data)
        log.evals.append(_kept(data, EVAL_SERIES))
    elif kind == "end":
        log.end = data
    elif kind == "note":
        log.notes.append(str(data.get("text", ""))[:1000])


def _rewind(rows: list[dict[str, Any]], data: dict[str, Any]) -> None:
    """A resumed run repeats steps since its checkpoint: the later ones count."""
    step = _number(data.get("step"))
    while rows and step is not None and (rows[-1]["step"] or 0) >= step:
        rows.pop()


def _kept(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    kept = {"step": _number(data.get("step"))}
    for name in (*names, "progress", "tokens"):
        value = data.get(name)
        kept[name] = _numbers(value) if isinstance(value, list) else _number(value)
    return kept


def _series(rows: list[dict[str, Any]], names: tuple[str, ...], max_points: int) -> dict[str, Any]:
    """Columns for charts: ``step``, then each name as a list, or as a list of lists by draft position."""
    stride = max(1, -(-len(rows) // max_points))
    rows = rows[::-1][::stride][::-1]  # the newest point is always among them
    out: dict[str, Any] = {"step": [row["step"] for row in rows]}
    for name in names:
        values = [row.get(name) for row in rows]
        width = max((len(v) for v in values if isinstance(v, list)), default=0)
        if width:
            out[name] = [
                [v[k] if isinstance(v, list) and k < len(v) else None for v in values] for k in range(width)
            ]
        elif any(v is not None for v in values):
            out[name] = values
    return out


def _number(value: Any) -> float | int | None:
    if type(value) in (int, float) and math.isfinite(value):
        return value
    return None


def _numbers(value: Any) -> list[float | int | None]:
    return [_number(v) for v in value[:64]] if isinstance(value, list) else []


def _clean(value: Any, depth: int = 6) -> Any:
    """Return a JSON value cut to a size that can be shown, without NaN and infinity, which are not JSON."""
    if isinstance(value, dict) and depth:
        return {str(k)[:200]: _clean(v, depth - 1) for k, v in list(value.items())[:500]}
    if isinstance(value, list) and depth:
        return [_clean(v, depth - 1) for v in value[:500]]
    if isinstance(value, str):
        return value[:5000]
    if isinstance(value, bool) or value is None:
        return value
    return _number(value)


def _stamp(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_mtime_ns, info.st_size


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _open_regular(path: Path) -> int:
    if not _is_file(path):
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _small_json(path: Path) -> Any:
    try:
        if not _is_file(path) or path.stat().st_size > MAX_LINE_BYTES:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
