"""``specdec-tap status``: what the capture of a running server is doing, once or as a live table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ..config import ENV_PREFIX
from ..tapclient import TapClient, TapServerError
from ._console import human_bytes, positive_float

if TYPE_CHECKING:
    from rich.console import RenderableType

TOKEN_VARIABLE = f"{ENV_PREFIX}ADMIN_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8000"
_COLORS = {"capturing": "green", "paused": "yellow", "off": "red", "stale": "red", "closed": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--watch", action="store_true", help="keep the table on the screen and up to date")
    parser.add_argument(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="S",
        help="seconds between two looks with --watch (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON, once a look")
    parser.epilog = f"""environment:
  {TOKEN_VARIABLE}   the server's admin token (not needed where it has public_status: true)

examples:
  specdec-tap status
  specdec-tap status http://gpu-7:8000 --watch
  specdec-tap status --json

exit codes: 0 capturing or paused, 1 off or stale, 2 no answer or no token"""


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the server's address."""
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help="address of 'vllm serve' (default: %(default)s)",
    )


def client_for(url: str) -> TapClient:
    """Return a client with the token of the environment."""
    return TapClient(url, os.environ.get(TOKEN_VARIABLE, "").strip() or None)


def run(args: argparse.Namespace) -> int:
    client = client_for(args.url)
    if args.watch:
        return _watch(client, args)
    status = client.status()
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160).print(render(client.url, status, None, 0.0))
    return 0 if status.get("state") in ("capturing", "paused") else 1


def _watch(client: TapClient, args: argparse.Namespace) -> int:
    """Look again and again until Ctrl-C; a server that does not answer is waited for."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    before: dict[str, Any] | None = None
    looked = time.monotonic()
    plain = args.json or not sys.stdout.isatty()
    # The first look says at once what is wrong with address or token.
    status: dict[str, Any] | None = client.status()
    with Live(console=console, auto_refresh=False, screen=False) if not plain else _Plain() as live:
        while True:
            now = time.monotonic()
            if status is not None:
                if args.json:
                    print(json.dumps(status), flush=True)
                elif plain:
                    print(one_line(status, before, now - looked), flush=True)
                else:
                    live.update(render(client.url, status, before, now - looked), refresh=True)
                before, looked = status, now
            time.sleep(args.interval)
            try:
                status = client.status()
            except TapServerError as err:
                if err.code != "server_unreachable":
                    raise
                status = None
                if not plain:
                    live.update(f"{err}\nwaiting for it", refresh=True)
                else:
                    print(err, file=sys.stderr, flush=True)


class _Plain:
    """Takes the place of a live display where there is no terminal."""

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *rest: object) -> None:
        return None

    def update(self, *rest: object, **more: object) -> None:
        """Show nothing."""


def render(url: str, status: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> RenderableType:
    """Return the table of ranks, sums and messages.

    Args:
        url: The server's address.
        status: Its answer.
        before: The answer before, for rates; None shows none.
        seconds: Time between the two.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{url}  {status.get('state')}", title_justify="left", title_style="bold")
    names = ("rank", "state", "rate", "started", "live", "sealed", "skipped", "dropped", "tokens", "rows/s")
    for name in (*names, "bytes/token", "shared", "ring", "lag", "disk free"):
        table.add_column(name, justify="left" if name in ("rank", "state") else "right", no_wrap=True)
    earlier = {r["stream"]: r for r in (before or {}).get("ranks", [])}
    ranks = status.get("ranks", [])
    for rank in ranks:
        state = str(rank["state"])
        dropped = rank["num_dropped"]
        table.add_row(
            str(rank["dp_rank"]),
            Text(state, _COLORS.get(state, "")),
            "" if rank["sample_rate"] is None else f"{rank['sample_rate']:g}",
            *(f"{rank[f'num_{name}']:,}" for name in ("started", "live", "sealed", "skipped")),
            Text(f"{dropped:,}", "red" if dropped else ""),
            f"{rank['num_tokens']:,}",
            per_second(rank, earlier.get(rank["stream"]), seconds),
            f"{rank['bytes_per_token']:,.0f}",
            f"{rank['dedupe_fraction']:.1%}",
            f"{rank['ring_fill_fraction']:.1%}",
            f"{rank['num_lag_steps']:,}",
            "" if rank["disk_free_bytes"] is None else human_bytes(rank["disk_free_bytes"]),
        )
    lines: list[RenderableType] = [table] if ranks else [Text(f"{url}  {status.get('state')}", "bold")]
    if status.get("reason"):
        lines.append(Text(str(status["reason"]), "yellow"))
    reasons = {k: v for k, v in (status.get("total") or {}).get("dropped", {}).items() if v}
    if reasons:
        lines.append(
            Text("dropped: " + ", ".join(f"{v:,} {k.replace('_', ' ')}" for k, v in reasons.items()), "red")
        )
    lines += [Text(f"rank {r['dp_rank']}: {r['last_error']}", "red") for r in ranks if r.get("last_error")]
    return Group(*lines)


def per_second(rank: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> str:
    """Return the rows copied per second since the look before; empty without one."""
    if before is None or seconds <= 0:
        return ""
    return f"{max(rank['rows_copied'] - before['rows_copied'], 0) / seconds:,.0f}"


def one_line(status: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> str:
    """Return the sums as one line, for a log."""
    sums = status["total"]
    rows = per_second(sums, None if before is None else before["total"], seconds)
    clock = time.strftime("%H:%M:%S")
    return (
        f"{clock} {status['state']}: {sums['num_sealed']:,} sealed, {sums['num_live']:,} live, "
        f"{sums['num_dropped']:,} dropped, {sums['num_skipped']:,} skipped, {sums['num_tokens']:,} tokens"
        + (f", {rows} rows/s" if rows else "")
    )
