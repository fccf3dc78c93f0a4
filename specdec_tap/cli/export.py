"""``specdec-tap export``: a drafter in the layout of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="run folder, checkpoint folder's run, or drafter folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--format",
        choices=("vllm", "sglang", "trtllm", "speculators"),
        default="vllm",
        help="layout (default: %(default)s)",
    )
    parser.add_argument(
        "--target", metavar="DIR", help="the target's checkpoint (folder, hub id or URL), to compare with"
    )
    parser.add_argument("--target-name", metavar="NAME", help="target named in the speculators layout")
    parser.add_argument(
        "--check", action="store_true", help="only check the drafter folder SOURCE, of any origin"
    )
    parser.epilog = (
        "examples:\n"
        "  specdec-tap export runs/first --format sglang --out drafter-sglang\n"
        "  specdec-tap export runs/first/drafter --check --target MODEL"
    )


def run(args: argparse.Namespace) -> int:
    from specdec_trainer.export import (
        check_drafter,
        check_notes,
        drafter_fingerprint,
        export_drafter,
        load_drafter,
    )

    from ..remote_target import local_target
    from ..target import load_target

    target = load_target(local_target(args.target)) if args.target else None
    source = args.source / "drafter" if (args.source / "drafter").is_dir() else args.source
    if args.check:
        problems = check_drafter(source, target=target)
        for problem in problems:
            print(f"{source}: {problem}")
        for note in check_notes(source, target=target):
            print(f"{source}: note: {note}")
        if not problems:
            print(f"{source}: ok")
        return 1 if problems else 0
    if args.out is None:
        raise InputError("--out is missing: name the folder to write")
    card = source / "README.md"
    learnt_from = drafter_fingerprint(source)
    export_drafter(
        load_drafter(source, target_layers=None if target is None else target.num_hidden_layers),
        args.out,
        target=target,
        target_name=args.target_name,
        format=args.format,
        card=card.read_text() if card.is_file() else None,
        learnt_from=learnt_from if learnt_from.tables else None,
    )
    print(f"{args.out}: {args.format} layout")
    return 0
