"""Is it alive."""

from __future__ import annotations

from fastapi import APIRouter

from specdec_tap._version import __version__

router = APIRouter()


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer without looking at anything."""
    return {"status": "ok", "version": __version__}
