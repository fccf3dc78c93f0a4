"""Runs ``specdec-tap shards verify`` on one shard at a time, niced, in its own process; keeps the answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ApiError

MAX_WAITING = 32
MAX_OUTPUT_BYTES = 32 << 20
TIMEOUT_S = 3600.0
KEPT_FINDINGS = 50


@dataclass(slots=True)
class Verification:
    """One verification of one shard."""

    state: str = "waiting"
    """``waiting``, ``running``, ``good``, ``bad`` (the shard is damaged) or ``failed`` (no answer)."""
    started_unix_s: float = field(default_factory=time.time)
    finished_unix_s: float | None = None
    stamp: tuple[int, int] = (0, 0)
    """Modification time (nanoseconds) and size of the file that was read."""
    report: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def to_json(self, stamp: tuple[int, int] | None) -> dict[str, Any]:
        """Return it for display; ``outdated`` when the file has changed since."""
        counts = self.report.get("counts", {})
        return {
            "state": self.state,
            "started_unix_s": self.started_unix_s,
            "finished_unix_s": self.finished_unix_s,
            "outdated": self.finished_unix_s is not None and stamp is not None and stamp != self.stamp,
            "num_errors": self.report.get("num_errors"),
            "num_warnings": sum(n for name, n in counts.items() if name.startswith("warning ")),
            "findings": self.report.get("findings", [])[:KEPT_FINDINGS],
            "content": self.report.get("content", {}),
            "not_checked": self.report.get("not_checked", []),
            "problem": self.problem,
        }


class Verifier:
    """Verifications by shard, one at a time."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], Verification] = {}
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.version = 0
        """Goes up whenever something changes."""

    def get(self, stream: str, shard: int, path: Path | None = None) -> dict[str, Any] | None:
        """Return the newest verification of a shard, or None."""
        result = self._results.get((stream, shard))
        return None if result is None else result.to_json(None if path is None else _stamp(path))

    def start(self, stream: str, shard: int, path: Path) -> dict[str, Any]:
        """Verify a shard in the background; one that is under way already goes on.

        Raises:
            ApiError: 503 when too many wait.
        """
        known = self._results.get((stream, shard))
        if known is not None and known.state in ("waiting", "running"):
            return known.to_json(None)
        if len(self._tasks) >= MAX_WAITING:
            raise ApiError(
                503, "busy", f"{len(self._tasks)} shards wait to be verified", hint="try again later"
            )
        result = self._results[(stream, shard)] = Verification()
        self.version += 1
        task = asyncio.create_task(self._run(result, path), name=f"verify {stream}/{shard}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return result.to_json(None)

    async def _run(self, result: Verification, path: Path) -> None:
        async with self._turn:
            result.state, result.started_unix_s = "running", time.time()
            self.version += 1
            try:
                result.stamp = _stamp(path) or (0, 0)
                await self._verify(result, path)
            except (OSError, ValueError, TimeoutError) as err:
                result.state, result.problem = (
                    "failed",
                    f"it could not be run ({str(err) or type(err).__name__})",
                )
            result.finished_unix_s = time.time()
            self.version += 1

    async def _verify(self, result: Verification, path: Path) -> None:
        command = [sys.executable, "-m", "specdec_tap", "shards", "verify", str(path), "--json"]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            limit=MAX_OUTPUT_BYTES,
        )
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode not in (0, 1):
            said = err.decode("utf-8", "replace").strip().splitlines()
            result.state = "failed"
            result.problem = said[-1].removeprefix("specdec-tap shards: ") if said else "no answer"
            return
        result.report = json.loads(out)
        result.state = "good" if process.returncode == 0 else "bad"

    async def close(self) -> None:
        """Stop what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size
