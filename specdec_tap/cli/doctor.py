"""``specdec-tap doctor``: can this machine, this vLLM and this model be tapped?"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .. import doctor, serving
from ..errors import InputError
from ._console import check_writable_file, positive_float, print_table, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or hub name (weights are not needed)"
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="shard folder to check (default: the setting)"
    )
    parser.add_argument(
        "--tokens-per-s",
        type=positive_float,
        default=1000.0,
        metavar="N",
        help="prompt and response tokens per second that the server computes (default: %(default)s)",
    )
    parser.add_argument(
        "--response-share",
        type=float,
        default=0.6,
        metavar="X",
        help="share of them that are response tokens, 0 to 1 (default: %(default)s)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="as for 'vllm serve'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON ('-': print it)")
    parser.epilog = """examples:
  specdec-tap doctor
  specdec-tap doctor MODEL --dir shards --tokens-per-s 5000
  specdec-tap doctor MODEL --json -

exit codes: 0 all is well (warnings included), 1 a check failed, 2 wrong usage or a missing model folder"""


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.response_share <= 1:
        raise InputError(f"--response-share is {args.response_share}; expected 0 to 1")
    check_writable_file(args.json, "--json")
    if args.model is not None:
        serving.check_model(args.model)
    report = doctor.diagnose(
        args.model,
        args.dir,
        env=os.environ,
        tokens_per_s=args.tokens_per_s,
        response_share=args.response_share,
        trust_remote_code=args.trust_remote_code,
    )
    if str(args.json) != "-":
        rows = [(check.status, check.name, check.detail) for check in report.checks]
        print_table("specdec-tap doctor", rows)
    write_json(args.json, report.to_json())
    return 1 if report.failed else 0
