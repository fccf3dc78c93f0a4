"""``specdec-tap dashboard``: serve the page over a folder of shards and training runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import sys
from pathlib import Path

from ..config import ENV_PREFIX
from ..errors import InputError

TOKEN_VARIABLE = f"{ENV_PREFIX}ADMIN_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", type=Path, metavar="SHARDS", help="folder that SPECDEC_TAP_DIR named")
    parser.add_argument(
        "--runs", type=Path, metavar="DIR", help="folder of training runs, or one run (default: none shown)"
    )
    parser.add_argument(
        "--server", metavar="URL", help="running 'vllm serve' whose capture can be paused from the page"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on (default: %(default)s); others need {TOKEN_VARIABLE}",
    )
    parser.add_argument(
        "--port", type=int, default=8095, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--show-text",
        action="store_true",
        help="show what people wrote to everybody who can open the page, not only after signing in",
    )
    parser.epilog = f"""environment:
  {TOKEN_VARIABLE}   secret to sign in with: opens text and controls

examples:
  specdec-tap dashboard shards/ --runs runs/
  specdec-tap dashboard shards/ --show-text --port 0
  {TOKEN_VARIABLE}=... specdec-tap dashboard shards/ --server http://127.0.0.1:8000"""


def run(args: argparse.Namespace) -> int:
    import uvicorn
    from specdec_server.app import create_app
    from specdec_server.settings import Settings

    settings = Settings(
        shards_dir=args.shards,
        runs_dir=args.runs,
        server_url=args.server,
        host=args.host,
        port=args.port,
        show_text=args.show_text,
        token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
    )
    raise_file_limit()
    app = create_app(settings)
    with listen(settings.host, settings.port) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"specdec-tap dashboard: http://{shown}:{port}/", flush=True)
        if settings.show_text:
            print("text of captured requests is shown to everybody who can open this page", file=sys.stderr)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False,
            proxy_headers=False, lifespan="on",
        )  # fmt: skip
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, so that a taken port is said before anything is read.

    Raises:
        InputError: The address cannot be listened on.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as err:
        raise InputError(f"--host is {host!r}, which is no address of this machine ({err.strerror})") from err
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(256)
    except OSError as err:
        sock.close()
        raise InputError(
            f"{host}:{port} cannot be listened on ({err.strerror}); choose another --port, 0 takes a free one"
        ) from err
    return sock


def raise_file_limit() -> None:
    """Allow as many open files as this user may have: every shard is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
