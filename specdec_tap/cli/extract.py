"""``specdec-tap extract``: shards from a file of conversations, without live traffic."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import InputError
from ._console import check_writable_file, positive_int, progress_bar, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder (vllm: or a hub name)")
    parser.add_argument(
        "file", type=Path, metavar="FILE",
        help="jsonl with 'id' and 'messages' on each line, or what 'specdec-tap replay --out' wrote",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=("hf", "vllm"), default="vllm",
        help="what runs the model: vLLM with the tap on, or Hugging Face code, one conversation at a time "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="SHARDS", help="shards folder")
    parser.add_argument("--resume", action="store_true", help="go on: leave out conversations that OUT has")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="the first N conversations only")
    parser.add_argument(
        "--layers", type=_int_list, metavar="IDS",
        help="aux layer ids, the stream entering the layer, such as 2,15,27 (default: 2,N//2,N-3)",
    )  # fmt: skip
    parser.add_argument(
        "--final-hidden", choices=("response", "all", "none"), default="response",
        help="where final states are kept (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--codec", choices=("lossless", "fp8", "int8"), default="lossless")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="default: the checkpoint's; vLLM serves float32 checkpoints in 16 bits",
    )
    parser.add_argument("--device", default="cpu", help="hf: torch device (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=positive_int, default=4096, metavar="N",
        help="longer conversations are left out and counted (default: %(default)s tokens)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", type=_json_object, default={}, metavar="JSON",
        help="vllm: more arguments of vllm.LLM, for example '{\"tensor_parallel_size\": 8}'",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="as for 'vllm serve'")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the counts as JSON ('-': print them)"
    )
    parser.epilog = """examples:
  specdec-tap extract MODEL conversations.jsonl --out shards
  specdec-tap extract MODEL conversations.jsonl --backend hf --dtype bfloat16 --out shards
  specdec-tap extract MODEL conversations.jsonl --out shards --resume

exit codes: 0 done, 1 the tap lost conversations, 2 wrong usage or input"""


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({err})") from err
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object of arguments of vllm.LLM")
    return value


def run(args: argparse.Namespace) -> int:
    from .. import extract
    from ..conversations import ChatTokenizer, read_chats

    check_writable_file(args.json, "--json")
    if args.backend == "hf" and not Path(args.model).is_dir():
        raise InputError(f"{args.model!r} is not a folder; --backend hf expects a Hugging Face directory")
    if args.backend == "hf" and args.engine:
        raise InputError("--engine has no effect with --backend hf; leave it out")
    total = sum(
        1 for _ in read_chats(args.file, limit=args.limit)
    )  # every line is checked before the model loads
    if not total:
        raise InputError(f"{args.file} holds no conversation; expected lines with 'id' and 'messages'")
    done = extract.stored_ids(args.out)
    if done and not args.resume:
        raise InputError(
            f"{str(args.out)!r} holds {len(done):,} records already; pass --resume to add what it lacks, or "
            "name another folder"
        )
    tokenizer = ChatTokenizer(args.model, trust_remote_code=args.trust_remote_code)
    counts: Counter[str] = Counter()
    chats = extract.tokenized(
        args.file, tokenizer, done, counts, limit=args.limit, max_length=args.max_length
    )
    common = {
        "layers": args.layers, "final_hidden": args.final_hidden, "codec": args.codec, "dtype": args.dtype,
    }  # fmt: skip
    with progress_bar("extract", total, unit="conversations") as bar:

        def show(records: int, note: str) -> None:
            rest = sum(n for name, n in counts.items() if name.startswith(("left out", "done")))
            bar.update(records + rest, note)

        if args.backend == "hf":
            extract.extract_hf(
                Path(args.model), chats, args.out, counts, device=args.device, progress=show, **common
            )
        else:
            engine = dict(args.engine)
            if args.trust_remote_code:
                engine["trust_remote_code"] = True
            extract.extract_vllm(
                args.model, chats, args.out, counts, max_length=args.max_length, engine=engine, progress=show,
                **common,
            )  # fmt: skip
    notes = "".join(
        f"; {n:,} {name}" for name, n in counts.items() if n and name.startswith(("left out", "done", "lost"))
    )
    line = (
        f"{counts['records']:,} conversations, {counts['tokens']:,} tokens ({counts['response tokens']:,} of "
        f"answers){notes}"
    )
    print(line, file=sys.stderr if str(args.json) == "-" else sys.stdout)
    write_json(args.json, dict(counts))
    lost = sum(n for name, n in counts.items() if name.startswith("lost"))
    return 1 if lost else 0
