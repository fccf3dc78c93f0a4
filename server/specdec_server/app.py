"""``create_app(settings)``: the dashboard as a FastAPI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from specdec_tap._version import __version__

from .assets import VersionedFiles
from .control import control_router
from .dashboard import Dashboard
from .errors import install_error_handlers
from .proxy import ServerBackend
from .routes import capture, health, pages, records, runs, session, shards
from .security import LOOPBACK_HOSTS, Shield
from .settings import Settings

HERE = Path(__file__).parent


def create_app(settings: Settings) -> FastAPI:
    """Make the application.

    Args:
        settings: What to serve and to whom.

    Returns:
        An application without any state outside itself; several can run in one process.

    Raises:
        InputError: The shards folder does not exist.
    """
    board = Dashboard(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await board.start()
        yield
        await board.stop()

    app = FastAPI(
        title="specdec-tap",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.dashboard = board
    install_error_handlers(app)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)
    app.add_middleware(Shield, hosts=LOOPBACK_HOSTS if settings.loopback else None)
    for module in (health, capture, shards, records, runs, session, pages):
        app.include_router(module.router)
    if settings.server_url is not None:
        app.include_router(control_router(ServerBackend(settings.server_url, settings.token), board.gate))
    app.mount("/static", VersionedFiles(directory=HERE / "static"), name="static")
    return app
