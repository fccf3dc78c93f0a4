"""Sends a writer's sealed shards to a store in the background, and says which of them it has.

A thread of the writer process, so that neither serving nor writing waits for a store. Nothing is lost while a
store is away: shards stay in the folder, retention leaves them alone until the store has them, and what was
not sent when the server ended is sent by the next one in this folder or by ``specdec-tap shards upload``.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from ..shards.remote import Uploader
from ..shards.repair import is_locked
from ..shards.writer import LOCK_NAME

logger = logging.getLogger("specdec_tap.upload")

INTERVAL_S = 5.0
ROUND_S = 600.0
"""How long the round that is under way then may take."""
LAST_TRY_S = 60.0
"""How long a store that is away is asked again after the server has ended."""


class BackgroundUpload:
    """Uploads the caller's stream, streams of dead writers, and ``target/``; other writers send their own."""

    def __init__(self, root: Path, stream: str, url: str, *, remove_local: bool = False) -> None:
        """Open the store's driver and start the thread.

        Args:
            root: The shards folder.
            stream: The caller's stream.
            url: Where to, such as ``s3://bucket/shards``.
            remove_local: Remove sealed shards here once the store has them, but for the newest of a stream.

        Raises:
            InputError: fsspec or the store's driver is not installed.
        """
        self._root, self._stream = root, stream
        self._uploader = Uploader(root, url, remove_local=remove_local, wanted=self._is_ours)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {"url": url, "uploaded_shards": 0, "waiting": 0, "last_error": None}
        self._thread = threading.Thread(target=self._run, name="specdec-tap-upload", daemon=True)
        self._thread.start()

    def _is_ours(self, stream: str) -> bool:
        return stream in (self._stream, "target") or not is_locked(self._root / stream / LOCK_NAME)

    def has(self, path: Path) -> bool:
        """Whether the store has this shard, so that it may be removed here."""
        return self._uploader.has(path)

    def status(self) -> dict[str, Any]:
        """``url``, ``uploaded_shards``, ``waiting`` (files not sent yet) and ``last_error``."""
        with self._lock:
            return dict(self._facts)

    def close(self) -> None:
        """Send what was sealed last. Waits for a store that is away, but not for long."""
        self._stop.set()
        self._thread.join(timeout=ROUND_S)
        deadline = time.monotonic() + LAST_TRY_S
        while not self._thread.is_alive() and self._round() and time.monotonic() < deadline:
            time.sleep(1.0)
        if waiting := self.status()["waiting"]:
            logger.warning(
                "%d files are not in %s yet (%s); they stay in %s, and the next server with this folder or "
                "'specdec-tap shards upload' sends them",
                waiting, self._facts["url"], self.status()["last_error"], self._root,
            )  # fmt: skip

    def _run(self) -> None:
        wait = INTERVAL_S
        while not self._stop.wait(wait):
            # A store that is away is asked less and less often, at least every five minutes.
            wait = min(2 * wait, 300.0) if self._round() else INTERVAL_S

    def _round(self) -> bool:
        """One pass over the folder; returns whether something could not be sent."""
        try:
            report = self._uploader.run_once()
            failed, waiting = report.failed, len(report.failed) + report.not_tried
        except Exception as err:  # a folder that vanished, a driver's own type: the next round tries again
            failed, waiting = [f"{type(err).__name__}: {err}"], 1
        with self._lock:
            error = failed[0] if failed else None
            self._facts |= {
                "uploaded_shards": self._uploader.num_shards, "waiting": waiting, "last_error": error,
            }  # fmt: skip
        return bool(failed)
