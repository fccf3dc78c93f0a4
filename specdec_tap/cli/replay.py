"""``specdec-tap replay``: send a jsonl of conversations to an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .. import replay as engine
from ..errors import InputError
from ._console import check_writable_file, positive_float, positive_int, progress_bar, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = engine.ReplayOptions()
    parser.add_argument("file", type=Path, metavar="FILE", help="jsonl with 'id' and 'turns' on each line")
    parser.add_argument("--url", default=defaults.url, help="OpenAI base URL (default: %(default)s)")
    parser.add_argument(
        "--model", default=defaults.model, help="model name; 'auto' takes what the server offers (default)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        default=defaults.concurrency,
        metavar="N",
        help="conversations under way at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=positive_float,
        metavar="R",
        help="start at most R requests per second (default: no limit)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        default=defaults.max_tokens,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=defaults.temperature,
        metavar="T",
        help="sampling temperature (default: %(default)s, greedy)",
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="send the first N conversations only")
    parser.add_argument(
        "--multi-turn", action="store_true", help="send every turn, each after the answer to the one before"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the answers to this jsonl")
    parser.add_argument(
        "--resume", action="store_true", help="skip conversations that --out has, and append to it"
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="pass over lines that are no conversation"
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=defaults.retries,
        metavar="N",
        help="tries after the first, when no answer, 429 or 5xx came (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=defaults.timeout_s,
        metavar="S",
        help="seconds to wait for one answer (default: %(default)s)",
    )
    parser.add_argument(
        "--extra-body",
        type=json.loads,
        metavar="JSON",
        help='more request fields, for example \'{"vllm_xargs": {"specdec_tap": 0}}\'',
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the counts as JSON ('-': print them)"
    )
    parser.epilog = """examples:
  specdec-tap replay prompts.jsonl --limit 400
  specdec-tap replay chats.jsonl --multi-turn --concurrency 8 --out answers.jsonl
  specdec-tap replay chats.jsonl --multi-turn --out answers.jsonl --resume

exit codes: 0 every conversation was answered (or is longer than the model's context), 1 some failed,
2 wrong usage or input, or no server"""


def run(args: argparse.Namespace) -> int:
    if args.resume and args.out is None:
        raise InputError("--resume needs --out, the file that an earlier run wrote its answers to")
    if args.retries < 0:
        raise InputError(f"--retries is {args.retries}; expected 0 or more")
    if args.extra_body is not None and not isinstance(args.extra_body, dict):
        raise InputError(f"--extra-body is {args.extra_body!r}; expected a JSON object")
    check_writable_file(args.json, "--json")
    found = engine.require_good_prompt_file(args.file, limit=args.limit, skip_bad_lines=args.skip_bad_lines)
    options = engine.ReplayOptions(
        url=args.url,
        model=args.model,
        concurrency=args.concurrency,
        rate=args.rate,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        multi_turn=args.multi_turn,
        retries=args.retries,
        timeout_s=args.timeout,
        extra_body=args.extra_body,
    )
    answers = None if args.out is None else engine.AnswerFile(args.out, resume=args.resume)
    result = engine.ReplayResult(bad_lines=found.num_bad_lines)
    try:
        replay_with_progress(args.file, options, result, found=found, limit=args.limit, answers=answers)
    finally:
        if answers is not None:
            answers.close()
        # Also after Ctrl-C or a lost server: what was done until then is worth knowing.
        print(summary(result), file=sys.stderr if str(args.json) == "-" else sys.stdout)
        write_json(args.json, result.to_json())
    return 1 if result.failed else 0


def replay_with_progress(
    path: Path,
    options: engine.ReplayOptions,
    result: engine.ReplayResult,
    *,
    found: engine.PromptFileCheck,
    limit: int | None = None,
    skip: int = 0,
    answers: engine.AnswerFile | None = None,
    title: str = "replay",
) -> None:
    """Replay a file with a progress bar of requests and tokens per second; fills ``result``."""

    def pending() -> Iterator[engine.Conversation]:
        for conversation in engine.iterate_conversations(path, limit=limit, skip=skip):
            if answers is not None and conversation.id in answers.answered:
                result.resumed += 1
            else:
                yield conversation

    total = found.num_turns if options.multi_turn else found.num_conversations
    begun = time.monotonic()
    with progress_bar(title, total, unit="requests") as bar:

        def show(sums: engine.ReplayResult) -> None:
            rate = sums.completion_tokens / max(1e-9, time.monotonic() - begun)
            done = sums.requests + sums.resumed + sums.too_long + sums.failed
            bar.update(done, f"{rate:,.0f} tokens/s")

        engine.replay(
            pending(),
            options,
            on_answer=None if answers is None else answers.append,
            on_progress=show,
            result=result,
        )


def summary(result: engine.ReplayResult) -> str:
    """Return one line of facts, and one more for each kind of error."""
    parts = [
        f"{result.requests:,} requests of {result.conversations:,} conversations answered",
        f"{result.prompt_tokens:,} prompt + {result.completion_tokens:,} generated tokens",
        f"{result.wall_s:.1f} s",
        f"{result.output_tokens_per_s:,.0f} generated tokens/s",
    ]
    for count, what in (
        (result.too_long, "longer than the model's context"),
        (result.failed, "failed"),
        (result.retries, "retries"),
        (result.resumed, "answered before"),
        (result.bad_lines, "bad lines passed over"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    return "; ".join(parts) + "".join(f"\n  {error}" for error in result.errors)
