"""Steer a running capture: ``specdec-tap pause``, ``resume``, ``rate``, ``flush`` and ``rotate``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .status import TOKEN_VARIABLE, add_url, client_for

_EXAMPLES = {
    "pause": "specdec-tap pause\n  specdec-tap pause http://gpu-7:8000",
    "resume": "specdec-tap resume\n  specdec-tap resume http://gpu-7:8000",
    "rate": "specdec-tap rate 0.1\n  specdec-tap rate 1 http://gpu-7:8000",
    "flush": "specdec-tap flush\n  specdec-tap flush http://gpu-7:8000 --json",
    "rotate": "specdec-tap rotate\n  specdec-tap rotate http://gpu-7:8000 --json",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.prog.split()[-1]
    if action == "rate":
        parser.add_argument("rate", type=_share, metavar="RATE", help="share of requests to capture, 0 to 1")
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.epilog = f"""environment:
  {TOKEN_VARIABLE}   the server's admin token

examples:
  {_EXAMPLES[action]}

exit codes: 0 done on every rank, 1 sent but not finished within ten seconds, 2 refused or no answer"""


def run(args: argparse.Namespace) -> int:
    body: dict[str, Any] = {"rate": args.rate} if args.command == "rate" else {}
    answer = client_for(args.url).call(args.command, body)
    done = bool(answer.get("done", True))
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        number = len(answer.get("ranks", []))
        print(
            f"{args.command}: {what_is(args.command, answer)} ({number} {'rank' if number == 1 else 'ranks'})"
        )
    if not done:
        print(
            f"specdec-tap {args.command}: the writer is behind and has not finished; "
            "'specdec-tap status' shows its lag",
            file=sys.stderr,
        )
    return 0 if done else 1


def what_is(action: str, answer: dict[str, Any]) -> str:
    """Say how things are after an action."""
    sums = answer.get("total", {})
    if action in ("flush", "rotate"):
        return f"{sums.get('num_sealed', 0):,} requests, {sums.get('num_tokens', 0):,} tokens are on the disk"
    rates = {r["sample_rate"] for r in answer.get("ranks", []) if r.get("sample_rate") is not None}
    rate = f", rate {' / '.join(f'{r:g}' for r in sorted(rates))}" if rates else ""
    live = f", {sums['num_live']:,} requests are still being captured" if sums.get("num_live") else ""
    return f"{answer.get('state')}{rate}{live}"


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value
