"""``specdec-tap doctor``: can this machine, this vLLM and this model be tapped?"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .. import doctor, serving
from ..errors import InputError
from ._console import check_writable_file, positive_float, print_table, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, hub name, config.json or recipe (weights are not needed)",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="shard folder to check (default: the setting)"
    )
    parser.add_argument(
        "--tokens-per-s",
        type=positive_float,
        metavar="N",
        help="prompt and response tokens per second of the server (default: the recipe's, or 1000)",
    )
    parser.add_argument(
        "--response-share",
        type=float,
        metavar="X",
        help="share of them that are response tokens, 0 to 1 (default: the recipe's, or 0.6)",
    )
    parser.add_argument("--plan", action="store_true", help="also compute the memory of a training run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="with --plan: a training setting, such as layer=llama or batch_tokens=8192",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="as for 'vllm serve'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON ('-': print it)")
    parser.epilog = """examples:
  specdec-tap doctor
  specdec-tap doctor MODEL --dir shards --tokens-per-s 5000
  specdec-tap doctor MODEL --json -
  specdec-tap doctor configs/recipes/kimi-k2.yaml --plan --set layer=llama

exit codes: 0 all is well (warnings included), 1 a check failed, 2 wrong usage or a missing model folder"""


def run(args: argparse.Namespace) -> int:
    if args.response_share is not None and not 0 <= args.response_share <= 1:
        raise InputError(f"--response-share is {args.response_share}; expected 0 to 1")
    if args.plan and args.model is None:
        raise InputError("--plan without MODEL; name a folder, a config.json or a recipe")
    expect, training, folder = _from_recipe(args)
    check_writable_file(args.json, "--json")
    if args.model is not None and not Path(args.model).is_file():
        serving.check_model(args.model)
    report = doctor.diagnose(
        args.model,
        folder,
        env=os.environ,
        tokens_per_s=float(args.tokens_per_s or expect.get("tokens_per_s", 1000.0)),
        response_share=float(
            expect.get("response_share", 0.6) if args.response_share is None else args.response_share
        ),
        training=training if args.plan else None,
        trust_remote_code=args.trust_remote_code,
    )
    if str(args.json) != "-":
        rows = [(check.status, check.name, check.detail) for check in report.checks]
        print_table("specdec-tap doctor", rows)
    write_json(args.json, report.to_json())
    return 1 if report.failed else 0


def _from_recipe(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], Path | None]:
    """Expected traffic, training settings and shard folder: a recipe's, where MODEL is one; flags win."""
    expect: dict[str, Any] = {}
    training: dict[str, Any] = {}
    if args.model is not None and Path(args.model).suffix in (".yaml", ".yml"):
        from ..recipes import read_recipe

        recipe = read_recipe(Path(args.model))
        expect, training = dict(recipe.expect), dict(recipe.train)
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set is {text!r}; expected NAME=VALUE")
        training[name.strip()] = value.strip()
    return expect, training, args.dir
