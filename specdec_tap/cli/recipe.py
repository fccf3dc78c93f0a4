"""``specdec-tap recipe``: the commands of a recipe, run or printed."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from ..errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..recipes import STEPS

    parser.add_argument("recipe", type=Path, help="YAML file such as configs/recipes/kimi-k2.yaml")
    parser.add_argument(
        "step", choices=STEPS, help="serve with capture, train, or serve with the drafter (draft)"
    )
    parser.add_argument("--model", metavar="DIR", help="folder or hub name instead of the recipe's target")
    parser.add_argument(
        "--shards", type=Path, default=Path("shards"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/recipe"),
        metavar="DIR",
        help="run folder (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="training processes on each node (one a GPU)"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="training nodes")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where training nodes meet")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the command only")
    parser.add_argument(
        "--extra", type=shlex.split, default=[], metavar="TEXT",
        help="more arguments of the command, which win; written --extra='--epochs 1'",
    )  # fmt: skip
    parser.epilog = """examples:
  specdec-tap recipe configs/recipes/kimi-k2.yaml serve --print
  specdec-tap recipe configs/recipes/kimi-k2.yaml train --nproc 8 --extra='--epochs 1'
  specdec-tap recipe configs/recipes/kimi-k2.yaml draft --model /models/kimi-k2"""


def run(args: argparse.Namespace) -> int:
    from .. import recipes

    recipe = recipes.read_recipe(args.recipe)
    if args.step == "serve":
        command = recipes.serve_command(recipe, model=args.model, shards=args.shards, extra=args.extra)
    elif args.step == "draft":
        drafter = args.out / "drafter"
        if not args.only_print and not drafter.is_dir():
            raise InputError(
                f"no drafter in {str(drafter)!r}; train first, or name the run folder with --out"
            )
        command = recipes.draft_command(recipe, model=args.model, drafter=drafter, extra=args.extra)
    else:
        command = recipes.train_command(
            recipe, shards=args.shards, out=args.out, nproc=args.nproc, nnodes=args.nnodes,
            rendezvous=args.rendezvous, extra=args.extra,
        )  # fmt: skip
    print(shlex.join(command), flush=True)
    if args.only_print:
        return 0
    beside = Path(sys.executable).parent / command[0]
    program = str(beside) if beside.is_file() else shutil.which(command[0])
    if program is None:
        raise InputError(f"{command[0]} is not installed here; install it, or use --print")
    os.execv(program, [program, *command[1:]])
    raise AssertionError("execv does not return")
