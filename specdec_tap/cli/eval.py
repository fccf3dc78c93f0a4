"""``specdec-tap eval``: real acceptance length, from vLLM's own counters."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import evaluate, serving
from .. import replay as engine
from ..errors import InputError
from ._console import check_writable_file, positive_int, print_table, progress_bar, write_json

TAP_OFF = {"SPECDEC_TAP": "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="drafter folder that vLLM loads")
    parser.add_argument("--model", metavar="MODEL", help="target model: a folder or a hub name")
    parser.add_argument(
        "--url", metavar="URL", help="measure this running server instead of starting one (ends in /v1)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="jsonl with 'id', 'turns' and perhaps 'category'; first turns are sent (default: built-in set)",
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="send the first N prompts only")
    parser.add_argument(
        "--num-speculative-tokens",
        type=positive_int,
        default=3,
        metavar="N",
        help="draft tokens per step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        default=8,
        metavar="N",
        help="requests under way at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--loads",
        type=load_list,
        default=(),
        metavar="N,N,..",
        help="send the prompts again with so many requests under way, such as 1,4,16, and compare speeds",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: %(default)s, greedy"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="skip the run of the same prompts without the drafter"
    )
    parser.add_argument("--baseline-url", metavar="URL", help="with --url: a server without a drafter")
    parser.add_argument(
        "--vllm-args",
        default=None,
        metavar="ARGS",
        help="more arguments of 'vllm serve', as one string; replaces the default "
        "(on the CPU build --enforce-eager, and --dtype float32 without AVX-512; else none)",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of the started server (default: a free one)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the servers' logs here")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers as JSON ('-': print them)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw acceptance by position and category, and with --loads speed-up by concurrency",
    )
    parser.epilog = """examples:
  specdec-tap eval --drafter runs/1/drafter --model models/smollm2
  specdec-tap eval --drafter runs/1/drafter --model MODEL --prompts mt_bench.jsonl --json eval.json
  specdec-tap eval --drafter runs/1/drafter --model MODEL --vllm-args="--tensor-parallel-size 8"
  specdec-tap eval --drafter runs/1/drafter --model MODEL --loads 1,4,16 --plot eval.png
  specdec-tap eval --url http://127.0.0.1:8000/v1 --baseline-url http://127.0.0.1:8001/v1

exit codes: 0 measured, 1 the server drafted nothing, 2 wrong usage or input, or no server"""


def run(args: argparse.Namespace) -> int:
    check_writable_file(args.json, "--json")
    check_writable_file(args.plot, "--plot")
    if args.url is None and (args.drafter is None or args.model is None):
        raise InputError("eval needs --drafter and --model to start a server, or --url of a running one")
    if args.url is not None and args.drafter is not None:
        raise InputError(
            "--drafter has no effect with --url: the running server has its own; drop one of them"
        )
    if args.baseline_url is not None and args.url is None:
        raise InputError("--baseline-url has no effect without --url; eval starts the baseline itself")
    prompts = evaluate.load_prompts(args.prompts or evaluate.default_prompt_file(), limit=args.limit)
    if args.url is not None:
        result = evaluate_running(
            args.url, args.baseline_url, prompts, model=args.model, options=replay_options(args),
            loads=args.loads,
        )  # fmt: skip
    else:
        arguments = serving.default_arguments() if args.vllm_args is None else shlex.split(args.vllm_args)
        with log_folder(args.log_dir) as logs, serving.stop_on_signal():
            result = evaluate_drafter(
                args.drafter,
                args.model,
                prompts,
                num_speculative_tokens=args.num_speculative_tokens,
                options=replay_options(args),
                arguments=arguments,
                log_dir=logs,
                baseline=not args.no_baseline,
                port=args.port,
                loads=args.loads,
            )
    show(result, file_is_stdout=str(args.json) == "-")
    write_json(args.json, result.to_json())
    if args.plot is not None:
        evaluate.plot(result, args.plot)
    if not (result.drafter.drafts and result.drafter.drafts.num_drafts):
        print("specdec-tap eval: the server drafted nothing for these prompts", file=sys.stderr)
        return 1
    return 0


def load_list(text: str) -> tuple[int, ...]:
    """Concurrencies from a list such as ``1,4,16``, ascending."""
    return tuple(sorted({positive_int(part) for part in text.split(",")}))


def replay_options(args: argparse.Namespace) -> engine.ReplayOptions:
    return engine.ReplayOptions(
        concurrency=args.concurrency, max_tokens=args.max_tokens, temperature=args.temperature
    )


@contextlib.contextmanager
def log_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield a folder for the servers' logs; a temporary one stays behind only if something failed."""
    if wanted is not None:
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="specdec-tap-eval-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def speculative_config(drafter: Path, num_speculative_tokens: int) -> dict[str, str | int | bool]:
    """Return vLLM's ``--speculative-config`` for a drafter folder, the method read from its config.

    Raises:
        InputError: The folder is missing or holds no drafter that vLLM knows.
    """
    path = drafter / "config.json"
    try:
        config = json.loads(path.read_text())
        architectures = config.get("architectures") or []
    except OSError as err:
        raise InputError(
            f"drafter {str(drafter)!r} has no readable config.json ({err.strerror or err}); "
            "expected a folder such as RUN/drafter that 'specdec-tap train' wrote"
        ) from err
    except (ValueError, AttributeError) as err:
        raise InputError(f"{path} is no JSON object ({err})") from err
    if not list(drafter.glob("*.safetensors")):
        raise InputError(f"drafter {str(drafter)!r} holds no .safetensors file; train or export it again")
    from specdec_trainer.algorithms import ALGORITHMS, algorithm_of

    algorithm = algorithm_of(config)
    if algorithm is None:
        raise InputError(
            f"drafter {str(drafter)!r} has architectures {architectures}; "
            f"expected a drafter of algorithm {', '.join(ALGORITHMS)}"
        )
    kind = ALGORITHMS[algorithm]
    return {
        "method": kind.method, "model": str(drafter), "num_speculative_tokens": num_speculative_tokens,
        **kind.serving,
    }  # fmt: skip


def evaluate_running(
    url: str,
    baseline_url: str | None,
    prompts: Sequence[engine.Conversation],
    *,
    model: str | None,
    options: engine.ReplayOptions,
    loads: Sequence[int] = (),
) -> evaluate.Evaluation:
    """Measure servers that run already.

    Raises:
        InputError: The server does no speculative decoding, or the baseline server does.
    """

    def measure(address: str, title: str) -> tuple[evaluate.Measurement, dict[int, float]]:
        here = dataclasses.replace(options, url=address, model=model or "auto")
        return measure_with_progress(title, prompts, here), loads_with_progress(title, prompts, here, loads)

    if evaluate.DraftCounts.from_metrics(serving.read_metrics(url)) is None:
        raise InputError(
            f"the server at {url} does no speculative decoding (no vllm:spec_decode counters on /metrics); "
            "start it with --speculative-config, or let eval start one with --drafter and --model"
        )
    drafter, rates = measure(url, "drafter")
    baseline, base_rates = (None, {}) if baseline_url is None else measure(baseline_url, "baseline")
    if baseline is not None and baseline.drafts is not None:
        raise InputError(
            f"the server at {baseline_url} drafts too; --baseline-url needs one without a drafter"
        )
    return evaluate.Evaluation(
        drafter=drafter, baseline=baseline, loads=evaluate.join_loads(rates, base_rates)
    )


def evaluate_drafter(
    drafter: Path,
    model: str,
    prompts: Sequence[engine.Conversation],
    *,
    num_speculative_tokens: int,
    options: engine.ReplayOptions,
    arguments: Sequence[str],
    log_dir: Path,
    baseline: bool = True,
    port: int | None = None,
    loads: Sequence[int] = (),
) -> evaluate.Evaluation:
    """Start a server with the drafter, measure it, stop it; then the same without the drafter."""
    speculation = json.dumps(speculative_config(drafter, num_speculative_tokens))

    def measure(title: str, log: str, more: Sequence[str]) -> tuple[evaluate.Measurement, dict[int, float]]:
        with started_server(
            title, model, log_path=log_dir / log, arguments=[*arguments, *more], env=TAP_OFF, port=port
        ) as server:
            here = dataclasses.replace(options, url=server.url)
            return (
                measure_with_progress(title, prompts, here),
                loads_with_progress(title, prompts, here, loads),
            )

    measured, rates = measure("drafter", "eval-drafter.log", ["--speculative-config", speculation])
    beside, base_rates = measure("baseline", "eval-baseline.log", []) if baseline else (None, {})
    return evaluate.Evaluation(
        drafter=measured, baseline=beside, loads=evaluate.join_loads(rates, base_rates)
    )


@contextlib.contextmanager
def started_server(
    title: str,
    model: str,
    *,
    log_path: Path,
    arguments: Sequence[str],
    env: dict[str, str | None] | dict[str, str],
    port: int | None = None,
    on_command: Callable[[str], None] | None = None,
) -> Iterator[serving.VllmServer]:
    """A running ``vllm serve``, with a bar while it starts; stopped when the context is left."""
    server = serving.VllmServer(model, log_path=log_path, arguments=arguments, env=env, port=port)
    if on_command is not None:
        on_command(server.shell_command())
    try:
        with progress_bar(f"{title}: vllm serve starts", None) as bar:
            server.start()
            server.wait_until_ready(lambda waited: bar.update(waited, f"log: {log_path}"))
        try:
            yield server
        except InputError as err:
            # "connection refused" alone would hide that the engine died, and why.
            if server.has_died():
                raise InputError(
                    f"{title}: the server died while it was used: {server.death_reason()}"
                ) from err
            raise
    finally:
        server.stop()


def measure_with_progress(
    title: str, prompts: Sequence[engine.Conversation], options: engine.ReplayOptions
) -> evaluate.Measurement:
    """Measure a running server with a bar of requests and tokens per second."""
    begun = time.monotonic()
    with progress_bar(f"{title}: prompts", len(prompts), unit="requests") as bar:

        def update(sums: engine.ReplayResult) -> None:
            rate = sums.completion_tokens / max(1e-9, time.monotonic() - begun)
            bar.update(sums.requests, f"{rate:,.0f} tokens/s")

        return evaluate.measure(prompts, options, on_progress=update)


def loads_with_progress(
    title: str, prompts: Sequence[engine.Conversation], options: engine.ReplayOptions, loads: Sequence[int]
) -> dict[int, float]:
    """Measure the speed at each concurrency with a bar."""
    out: dict[int, float] = {}
    for concurrency in loads:
        with progress_bar(f"{title}: {concurrency} at a time", len(prompts), unit="requests") as bar:
            out |= evaluate.measure_loads(
                prompts, options, [concurrency], on_progress=lambda sums, bar=bar: bar.update(sums.requests)
            )
    return out


def table_rows(result: evaluate.Evaluation) -> list[tuple[str, str]]:
    """Return the evaluation as ``(what, value)`` rows."""
    drafts = result.drafter.drafts or evaluate.DraftCounts()
    length, rate = drafts.acceptance_length, drafts.acceptance_rate
    rows = [
        ("acceptance length", "no drafts" if length is None else f"{length:.3f}"),
        ("acceptance per position", " ".join(f"{share:.3f}" for share in drafts.acceptance_per_position)),
        ("acceptance rate", "" if rate is None else f"{rate:.3f}"),
        ("drafts", f"{drafts.num_drafts:,}"),
        ("requests", f"{result.drafter.replay.requests:,}"),
        ("generated tokens/s with the drafter", f"{result.drafter.output_tokens_per_s:,.0f}"),
    ]
    if result.drafter.replay.too_long:
        rows.append(("prompts longer than the context", f"{result.drafter.replay.too_long:,}"))
    identical = result.identical_answers
    if result.baseline is not None and identical is not None:
        base = result.baseline.output_tokens_per_s
        rows += [
            ("generated tokens/s without", f"{base:,.0f}"),
            ("speed-up", f"{result.drafter.output_tokens_per_s / base:.2f}x" if base else ""),
            ("answers equal to the baseline's", f"{identical[0]:,} of {identical[1]:,}"),
        ]
    return rows


def show(result: evaluate.Evaluation, *, file_is_stdout: bool = False) -> None:
    """Print the tables, unless standard output carries the JSON."""
    if file_is_stdout:
        return
    print_table("drafter in vLLM", table_rows(result))
    if result.loads:
        rows = [
            (
                f"{load.concurrency:,}",
                f"{load.output_tokens_per_s:,.0f}",
                "" if load.speedup is None else f"{load.baseline_output_tokens_per_s:,.0f}",
                "" if load.speedup is None else f"{load.speedup:.2f}x",
            )
            for load in result.loads
        ]
        headers = ("requests under way", "tokens/s with the drafter", "tokens/s without", "speed-up")
        print_table("by load", rows, headers=headers)
    if result.drafter.categories:
        rows = [
            (
                name or "(none)",
                "" if counts.acceptance_length is None else f"{counts.acceptance_length:.3f}",
                " ".join(f"{share:.3f}" for share in counts.acceptance_per_position),
                f"{counts.num_drafts:,}",
            )
            for name, counts in sorted(result.drafter.categories.items())
        ]
        headers = ("category", "acceptance length", "per position", "drafts")
        print_table("by category", rows, headers=headers)
