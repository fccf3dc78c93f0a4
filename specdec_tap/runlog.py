"""Files of a training run that several programs read; the trainer writes, the server reads. Pure Python.

``predictions.jsonl`` tells, token by token, how well a drafter predicted held-out records. Line 1 describes
the file, every further line is one record::

    {"format": "specdec-tap predictions", "version": 1, "draft_tokens": 3, "drafter": "runs/1",
     "created_unix_s": 1796046087.9}
    {"record": "host-0/000001/17", "digest": "8f14e45fceea167a", "first_position": 41, "steps": [
     {"correct": [1, 0, null], "probability": [0.81, 0.02, null], "rank": [1, 9, null]}, ...]}

``digest`` is ``token_digest`` of the record's token ids: ids of records change when a record before them is
forgotten, and the lines of a record that is not the same any more must not be shown for it.
``steps`` has one entry per draft position. Entry i of step k (from 0) is about token ``first_position + i``
of the record, as draft token k + 1 of the chain that began k + 1 tokens before it. So the same entry of all
steps is about the same token, and its fate at draft positions 1, 2, 3 reads off three lists. ``null``: not
evaluated (a prompt token, a gap, or the chain would begin before the captured rows).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import InputError

LOG_NAME = "log.jsonl"
"""One JSON object a line, with ``kind``: start, train, eval, note or end (``specdec_trainer.runlog``)."""
PREDICTIONS_NAME = "predictions.jsonl"

PREDICTIONS_FORMAT = "specdec-tap predictions"
PREDICTIONS_VERSION = 1
MAX_DRAFT_TOKENS = 32
MAX_LINE_BYTES = 1 << 28
_LINE = re.compile(rb'\{"record":"([^"]*)","digest":"([0-9a-f]{16})",')


def token_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """Sixteen hex digits that tell records apart by their token ids."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


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
        digest: ``token_digest`` of its token ids.
        first_position: Token position that entry 0 of every list is about.
        steps: One entry per draft position, the first one first.
    """

    record: str
    digest: str
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
            digest = token_digest(record.token_ids)
            out.write(RecordPredictions(record.id, digest, first_position, steps))
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
                "digest": predictions.digest,
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
        self._places: dict[str, tuple[int, str]] = {}
        try:
            with path.open("rb") as file:
                self._read_head(file.readline(MAX_LINE_BYTES))
                offset = file.tell()
                while line := file.readline(MAX_LINE_BYTES):
                    # They come first in every line, so that the rest of a long line is not parsed here.
                    record, digest = self._record_id(line)
                    self._places[record] = (offset, digest)
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

    def _record_id(self, line: bytes) -> tuple[str, str]:
        match = _LINE.match(line)
        if match is None or not line.endswith(b"\n"):
            raise InputError(
                f"{self.path}: line {len(self._places) + 2} is not a record, or was cut off; "
                "write the file again"
            )
        record, digest = match.groups()
        return record.decode("ascii", "replace"), digest.decode("ascii")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, record: object) -> bool:
        return record in self._places

    def is_about(self, record: str, token_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether the file has this record, with these token ids."""
        place = self._places.get(record)
        return place is not None and place[1] == token_digest(token_ids)

    @property
    def records(self) -> Iterable[str]:
        """Ids of the records, in file order."""
        return self._places.keys()

    def get(self, record: str) -> RecordPredictions | None:
        """Read one record; None when the file lacks it.

        Raises:
            InputError: Its line is damaged.
        """
        place = self._places.get(record)
        if place is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(place[0])
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
        return RecordPredictions(str(data["record"]), str(data["digest"]), first, tuple(steps))


def _checked(values: Any, low: float, high: float) -> list[Any]:
    for value in values:
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise ValueError(f"{value!r} is not from {low} to {high}")
    return list(values)
