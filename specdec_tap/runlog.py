"""Files of a training run that several programs read; the trainer writes, the server reads. Pure Python.

``predictions.jsonl`` tells, token by token, how well a drafter predicted held-out records. Line 1 describes
the file, every further line is one record::

    {"format": "specdec-tap predictions", "version": 1, "draft_tokens": 3, "drafter": "runs/1",
     "created_unix_s": 1796046087.9}
    {"record": "host-0/000001/17", "first_position": 41, "steps": [
     {"correct": [1, 0, null], "probability": [0.81, 0.02, null], "rank": [1, 9, null]}, ...]}

``steps`` has one entry per draft position. Entry i of step k (from 0) is about token ``first_position + i``
of the record, as draft token k + 1 of the chain that began k + 1 tokens before it. So the same entry of all
steps is about the same token, and its fate at draft positions 1, 2, 3 reads off three lists. ``null``: not
evaluated (a prompt token, a gap, or the chain would begin before the captured rows).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import InputError

LOG_NAME = "log.jsonl"
"""One JSON object a line, with ``kind``: start, train, eval, note or end (``specdec_trainer.runlog``)."""
PREDICTIONS_NAME = "predictions.jsonl"

PREDICTIONS_FORMAT = "specdec-tap predictions"
PREDICTIONS_VERSION = 1
MAX_DRAFT_TOKENS = 32
MAX_LINE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """How one draft position did over consecutive tokens of a record; lists of equal length.

    Args:
        correct: 1 where the greedy draft token is the target's token, 0 where it is not, None: unknown.
        probability: What the drafter gave to the target's token, 0 to 1.
        rank: Place of the target's token in the drafter's distribution, from 1; None also for a token that
            the draft vocabulary lacks.
    """

    correct: Sequence[int | None]
    probability: Sequence[float | None]
    rank: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class RecordPredictions:
    """All draft positions of one record.

    Args:
        record: ``Record.id``, ``stream/shard/ordinal``.
        first_position: Token position that entry 0 of every list is about.
        steps: One entry per draft position, the first one first.
    """

    record: str
    first_position: int
    steps: tuple[StepPrediction, ...]

    @property
    def num_tokens(self) -> int:
        """Length of every list."""
        return len(self.steps[0].correct) if self.steps else 0


class PredictionsWriter:
    """Writes ``predictions.jsonl``; the file appears under its name when it is whole.

    Example::

        with PredictionsWriter(run_dir / PREDICTIONS_NAME, draft_tokens=3, drafter="runs/1") as out:
            out.write(RecordPredictions(record.id, first_position, steps))
    """

    def __init__(self, path: Path, *, draft_tokens: int, drafter: str) -> None:
        """Start a file.

        Args:
            path: Where the finished file goes; one that is there is replaced at the end.
            draft_tokens: Draft positions that every record will have, 1 to 32.
            drafter: What to show as the drafter's name.
        """
        if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens is {draft_tokens}; expected 1 to {MAX_DRAFT_TOKENS}")
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._draft_tokens = draft_tokens
        fd = os.open(self._temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        self._file: IO[str] = os.fdopen(fd, "w", encoding="ascii")
        self._line(
            {
                "format": PREDICTIONS_FORMAT,
                "version": PREDICTIONS_VERSION,
                "draft_tokens": draft_tokens,
                "drafter": drafter,
                "created_unix_s": time.time(),
            }
        )

    def write(self, predictions: RecordPredictions) -> None:
        """Add one record.

        Raises:
            ValueError: Its lists differ in length or are not one per draft position.
        """
        lengths = {len(x) for s in predictions.steps for x in (s.correct, s.probability, s.rank)}
        if len(predictions.steps) != self._draft_tokens or len(lengths) != 1:
            raise ValueError(
                f"record {predictions.record} has {len(predictions.steps)} steps with lists of lengths "
                f"{sorted(lengths)}; expected {self._draft_tokens} steps and one length"
            )
        self._line(
            {
                "record": predictions.record,
                "first_position": predictions.first_position,
                "steps": [
                    {
                        "correct": [None if v is None else int(v) for v in step.correct],
                        "probability": [_rounded(v) for v in step.probability],
                        "rank": [None if v is None else int(v) for v in step.rank],
                    }
                    for step in predictions.steps
                ],
            }
        )

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")

    def __enter__(self) -> PredictionsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 5)


class Predictions:
    """Reads ``predictions.jsonl`` by record; memory holds one offset per record, not the lines."""

    def __init__(self, path: Path) -> None:
        """Read the first line and note where each record is.

        Raises:
            InputError: Not such a file, or of a newer version; names the line.
        """
        self.path = path
        self._offsets: dict[str, int] = {}
        try:
            with path.open("rb") as file:
                self._read_head(file.readline(MAX_LINE_BYTES))
                offset = file.tell()
                while line := file.readline(MAX_LINE_BYTES):
                    # The id comes first in every line, so that the rest of a long line is not parsed here.
                    self._offsets[self._record_id(line)] = offset
                    offset = file.tell()
        except OSError as err:
            raise InputError(f"{path} cannot be read ({err.strerror or err})") from err

    def _read_head(self, line: bytes) -> None:
        try:
            head = json.loads(line)
            known = head["format"] == PREDICTIONS_FORMAT
            version, self.draft_tokens = int(head["version"]), int(head["draft_tokens"])
            self.drafter = str(head["drafter"])[:256]
            self.created_unix_s = float(head["created_unix_s"])
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise InputError(
                f"{self.path} is no predictions file: its first line is not its description"
            ) from err
        if not known or version > PREDICTIONS_VERSION or not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(
                f"{self.path} is a {head['format']!r} file of version {version}; this specdec-tap reads "
                f"{PREDICTIONS_FORMAT!r} up to version {PREDICTIONS_VERSION}"
            )

    def _record_id(self, line: bytes) -> str:
        prefix = b'{"record":"'
        end = line.find(b'"', len(prefix))
        if not line.startswith(prefix) or end < 0 or not line.endswith(b"\n"):
            raise InputError(
                f"{self.path}: line {len(self._offsets) + 2} is not a record, or was cut off; "
                "write the file again"
            )
        return line[len(prefix) : end].decode("ascii", "replace")

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, record: object) -> bool:
        return record in self._offsets

    @property
    def records(self) -> Iterable[str]:
        """Ids of the records, in file order."""
        return self._offsets.keys()

    def get(self, record: str) -> RecordPredictions | None:
        """Read one record; None when the file lacks it.

        Raises:
            InputError: Its line is damaged.
        """
        offset = self._offsets.get(record)
        if offset is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return self._parse(json.loads(file.readline(MAX_LINE_BYTES)))
        except OSError as err:
            raise InputError(f"{self.path} cannot be read ({err.strerror or err})") from err
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise InputError(f"{self.path}: the line of record {record} is damaged ({err})") from err

    def _parse(self, data: dict[str, Any]) -> RecordPredictions:
        steps = []
        for step in data["steps"]:
            steps.append(
                StepPrediction(
                    correct=_checked(step["correct"], 0, 1),
                    probability=_checked(step["probability"], 0, 1),
                    rank=_checked(step["rank"], 1, 1 << 31),
                )
            )
        first = data["first_position"]
        lengths = {len(x) for s in steps for x in (s.correct, s.probability, s.rank)}
        if type(first) is not int or first < 0 or len(steps) != self.draft_tokens or len(lengths) != 1:
            raise ValueError("its lists do not belong together")
        return RecordPredictions(str(data["record"]), first, tuple(steps))


def _checked(values: Any, low: float, high: float) -> list[Any]:
    for value in values:
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise ValueError(f"{value!r} is not from {low} to {high}")
    return list(values)
