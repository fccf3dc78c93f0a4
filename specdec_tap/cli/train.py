"""``specdec-tap train``: a drafter from shards."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError
from ._console import progress_bar, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", help="folder of captured shards, or its URL")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="train while the server is still capturing; ends on Ctrl-C, --time-limit or --follow-idle",
    )
    parser.add_argument("--out", metavar="DIR", help="run folder, or its URL (default: runs/<time>)")
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="the target's checkpoint: a folder, a hub id or a URL (default: SHARDS/target)",
    )
    parser.add_argument("--target-name", metavar="NAME", help="name of the target for the model card")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of settings; flags win over it"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument(
        "--format",
        choices=("vllm", "sglang", "trtllm", "speculators"),
        default="vllm",
        help="layout of the exported drafter (default: %(default)s)",
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the final numbers as one JSON object"
    )
    settings = parser.add_argument_group("settings (also keys of --config)")
    for name, default, doc in _settings():
        flag = "--" + name.replace("_", "-")
        settings.add_argument(flag, dest=f"set_{name}", metavar="V", help=f"{doc} (default: {default})")
    parser.epilog = (
        "examples:\n"
        "  specdec-tap train shards/\n"
        "  specdec-tap train shards/ --out runs/first --epochs 4 --draft-vocab-size 16000\n"
        "  specdec-tap train shards/ --resume --out runs/first\n"
        "  specdec-tap train --follow shards/ --init-from runs/first/drafter --follow-idle 600\n"
        "  torchrun --nproc-per-node 8 -m specdec_trainer shards/ --out runs/eight"
    )


def run(args: argparse.Namespace) -> int:
    from specdec_trainer.config import TrainConfig, convert, read_yaml

    from ..remote_target import local_target
    from ..shards.remote import is_url

    values = read_yaml(args.config) if args.config else {}
    flags = {
        k.removeprefix("set_"): v for k, v in vars(args).items() if k.startswith("set_") and v is not None
    }
    values |= convert(flags, "command line")
    config = TrainConfig(**values)
    shards = args.shards if is_url(args.shards) else Path(args.shards)
    if args.nproc > 1 and "WORLD_SIZE" not in os.environ:
        return _launch(args.nproc, args.argv)
    first = os.environ.get("RANK", "0") == "0"
    from specdec_trainer.run import run as train

    def say(text: str) -> None:
        if first:
            print(text, file=sys.stderr, flush=True)

    target = local_target(args.target) if args.target else None
    common = {
        "out": args.out, "target_path": target, "target_name": args.target_name, "resume": args.resume,
        "format": args.format, "say": say, "live": args.follow,
    }  # fmt: skip
    if first:
        with progress_bar("training", 100, unit="%") as bar:
            result = train(
                config, shards, progress=lambda done, note: bar.update(round(100 * done), note), **common
            )
    else:
        result = train(config, shards, **common)
    if not first:
        return 0
    print(f"run folder: {result.folder}")
    if result.evaluation is not None:
        e = result.evaluation
        print(
            f"held-out, greedy, {config.eval_draft_tokens} draft tokens: simulated acceptance length "
            f"{e.simulated_acceptance_length:.3f} ({e.sampled_acceptance_length:.3f} with the traffic's own "
            "sampling); accuracy by draft token " + " / ".join(f"{a:.3f}" for a in e.accuracy)
        )
    print(f"{result.state.tokens:,} tokens at {result.tokens_per_s:,.0f} tokens/s")
    print(f"drafter: {result.drafter}")
    if args.json:
        write_json(
            args.json,
            {
                "run": str(result.folder),
                "drafter": str(result.drafter),
                "steps": result.state.step,
                "tokens": result.state.tokens,
                "train_s": result.state.elapsed,
                "train_tokens_per_s": result.tokens_per_s,
                **(result.evaluation.as_dict() if result.evaluation else {}),
            },
        )
    return 130 if result.interrupted else 0


def _settings() -> list[tuple[str, object, str]]:
    """Name, default and help of every setting."""
    import dataclasses

    from specdec_trainer.config import TrainConfig, field_docs

    docs = field_docs()
    return [(f.name, f.default, docs[f.name].replace("%", "%%")) for f in dataclasses.fields(TrainConfig)]


def _launch(processes: int, argv: Sequence[str]) -> int:
    """Start this command again under torchrun, with the same arguments: a folder may be named as a
    sub-command or a flag's value is, so none is looked at. ``--nproc`` means nothing to a process that
    torchrun started."""
    import subprocess

    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "-m", "--", "specdec_tap", *argv,  # else torchrun takes --nproc for its own
    ]  # fmt: skip
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as err:
        raise InputError(f"cannot start {processes} processes: {err}") from err
