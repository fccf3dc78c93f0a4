"""The ``specdec-tap`` command line: one module per subcommand, imported only when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import SpecdecTapError

# name -> (module, one line for the overview). Each module has add_arguments(parser) and run(args) -> int.
COMMANDS = {
    "demo": (
        "specdec_tap.cli.demo",
        "the whole way on this machine: serve, capture, train, serve the drafter",
    ),
    "replay": ("specdec_tap.cli.replay", "send a jsonl of conversations to an OpenAI-compatible server"),
    "extract": ("specdec_tap.cli.extract", "make shards from a jsonl of conversations, without a server"),
    "shards": (
        "specdec_tap.cli.shards",
        "list, summarise, verify, repair, forget, import, export and upload shards",
    ),
    "status": ("specdec_tap.cli.status", "show what the capture of a running server is doing"),
    "pause": ("specdec_tap.cli.control", "stop capturing new requests on a running server"),
    "resume": ("specdec_tap.cli.control", "capture new requests again"),
    "rate": ("specdec_tap.cli.control", "change the share of requests that is captured"),
    "flush": ("specdec_tap.cli.control", "put everything captured so far on the disk"),
    "rotate": ("specdec_tap.cli.control", "seal the open shards, so that they can be moved or trained on"),
    "dashboard": ("specdec_tap.cli.dashboard", "serve a page over shards, live capture and training runs"),
    "train": ("specdec_tap.cli.train", "train a drafter from shards"),
    "export": ("specdec_tap.cli.export", "write a trained drafter in the layout an engine loads"),
    "eval": ("specdec_tap.cli.eval", "measure real acceptance length from vLLM's own counters"),
    "doctor": ("specdec_tap.cli.doctor", "check that this machine, vLLM and model can be tapped"),
    "recipe": ("specdec_tap.cli.recipe", "run or print the commands of a recipe (capture, train, serve)"),
    "config": ("specdec_tap.cli.config", "show every capture setting, its value and where it came from"),
}


# Optional packages and the extra that brings them.
EXTRAS = {
    "torch": "train", "transformers": "train", "matplotlib": "train", "tensorboard": "train",
    "openai": "client", "fastapi": "server", "uvicorn": "server", "jinja2": "server", "fsspec": "remote",
    "gguf": "gguf", "vllm": "vllm",
}  # fmt: skip


def build_parser(wanted: str | None) -> argparse.ArgumentParser:
    """Return the parser with the arguments of one subcommand.

    Args:
        wanted: The subcommand. Only its module is imported: ``specdec-tap --help`` must not load torch.
    """
    parser = argparse.ArgumentParser(
        prog="specdec-tap",
        description="Keep the hidden states a vLLM server already computes, and train a drafter from them.",
        epilog="examples:\n  SPECDEC_TAP_DIR=shards vllm serve MODEL\n  specdec-tap train shards/\n"
        "  specdec-tap COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"specdec-tap {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == wanted:
            command = importlib.import_module(module)
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit codes: 0 done, 1 ran and the answer is bad, 2 wrong usage or input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(next((a for a in argv if a in COMMANDS), None))
    args = parser.parse_args(argv)
    args.argv = argv
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(args.run(args) or 0)
    except SpecdecTapError as err:
        if args.traceback:
            raise
        print(f"specdec-tap {args.command}: {err}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as err:
        extra = EXTRAS.get((err.name or "").partition(".")[0])
        if extra is None or args.traceback:
            raise
        message = f"{err.name} is not installed; install it with 'pip install \"specdec-tap[{extra}]\"'"
        print(f"specdec-tap {args.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"specdec-tap {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` closed the pipe
        return 0
