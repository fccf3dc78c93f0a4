"""Status files, made in a temporary directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.serverkit import write_status


@pytest.fixture
def put_status(tmp_path):
    """Write the status file of a stream into a shards folder."""

    def put(stream: str, root: Path | None = None, **values: object) -> dict:
        return write_status(root or tmp_path / "shards", stream, **values)

    return put
