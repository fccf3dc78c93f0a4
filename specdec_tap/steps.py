"""Steps of a longer job that are done once and reused while their inputs stay the same.

A step's inputs and what came of it are kept in ``state.json`` of the job's folder. A step counts as done only
when it has ended well, so an interrupted one is done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InputError

STATE_FILE = "state.json"
STATE_VERSION = 1


class Steps:
    """The steps of one folder.

    Args:
        folder: Made if it is missing.

    Raises:
        InputError: The folder holds files but no ``state.json``: it is somebody else's, and steps delete what
            they make anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / STATE_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._path.exists() and any(folder.iterdir()):
                raise InputError(
                    f"{str(folder)!r} holds files but no {STATE_FILE}, so it was not made by this command; "
                    "choose an empty folder with --workdir"
                )
            self._done: dict[str, Any] = self._read()
            self._write()
        except OSError as err:
            raise InputError(
                f"{str(folder)!r} cannot be used ({err.strerror or err}); choose another with --workdir"
            ) from err

    def _read(self) -> dict[str, Any]:
        try:
            state = json.loads(self._path.read_text())
            if state["version"] == STATE_VERSION and isinstance(state["steps"], dict):
                return state["steps"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # none yet, or of another version: every step is done again
        return {}

    def _write(self) -> None:
        temporary = self._path.with_name(f".{STATE_FILE}.{os.getpid()}")
        temporary.write_text(json.dumps({"version": STATE_VERSION, "steps": self._done}, indent=2) + "\n")
        temporary.replace(self._path)

    def result(self, name: str, inputs: dict[str, Any], *made: Path) -> dict[str, Any] | None:
        """Return what a step gave when it ran with these very inputs; None if it must run (again).

        Args:
            name: The step.
            inputs: JSON-able values that decide what it gives.
            made: Files or folders that must still be there.
        """
        entry = self._done.get(name)
        if entry is None or entry.get("inputs") != json.loads(json.dumps(inputs)):
            return None
        if not all(path.exists() for path in made):
            return None
        return entry["result"]

    def run(
        self, name: str, inputs: dict[str, Any], *made: Path, work: Callable[[], dict[str, Any]]
    ) -> tuple[dict[str, Any], bool]:
        """Return ``(result, reused)``; ``work`` runs only if there is nothing to reuse.

        The result gets a key ``seconds``, and ``run_id``, which is new whenever the step ran: a later step
        that has it among its inputs is then done again too.
        """
        found = self.result(name, inputs, *made)
        if found is not None:
            return found, True
        self._done.pop(name, None)
        self._write()
        begun = time.monotonic()
        result = work()
        result |= {"seconds": time.monotonic() - begun, "run_id": os.urandom(8).hex()}
        self._done[name] = {"inputs": inputs, "result": result}
        self._write()
        return result, False


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Return a hash over the names, sizes and times of a folder's files, cheap for files of any size."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            info = path.stat()
            digest.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()
