"""``specdec-tap demo``: the whole way on one machine, from traffic to a served and measured drafter."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import evaluate, prompts, serving, smollm2
from .. import replay as engine
from .._version import __version__
from ..errors import SpecdecTapError
from ..steps import Steps, file_digest, folder_fingerprint
from . import build_parser
from ._console import check_writable_file, human_bytes, positive_float, positive_int, print_table, write_json
from .eval import TAP_OFF, measure_with_progress, speculative_config, started_server
from .replay import replay_with_progress, summary

MAX_MODEL_LEN = 4096
NUM_SPECULATIVE_TOKENS = 3
SEAL_TIMEOUT_S = 120.0
WARM_UP_REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much the demo does. The defaults of the two sizes keep 20 and 6 minutes on two cores."""

    requests: int
    max_tokens: int
    overhead_requests: int
    """Requests that are also sent to a server without the tap, to compare the two."""
    eval_requests: int
    eval_max_tokens: int
    train_minutes: float
    """Training stops after this many minutes even if epochs are left."""


FULL = Size(
    requests=400, max_tokens=256, overhead_requests=96, eval_requests=62, eval_max_tokens=128, train_minutes=8
)
QUICK = Size(
    requests=96,
    max_tokens=128,
    overhead_requests=32,
    eval_requests=24,
    eval_max_tokens=64,
    train_minutes=1.75,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a small run: inside 6 minutes on 2 cores")
    parser.add_argument(
        "--requests",
        type=positive_int,
        metavar="N",
        help=f"chat requests to capture (default: {FULL.requests}, --quick {QUICK.requests})",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="jsonl with 'id' and 'turns' to send (default: made by the project's generator)",
    )
    parser.add_argument(
        "--eval-prompts",
        type=Path,
        metavar="FILE",
        help="jsonl to measure the drafter on, all of it unless --quick (default: the built-in set)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help=f"longest answer, in tokens (default: {FULL.max_tokens}, --quick {QUICK.max_tokens})",
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        default=32,
        metavar="N",
        help="requests under way at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="chat model to serve (default: SmolLM2-135M-Instruct, fetched once)"
    )
    parser.add_argument(
        "--epochs", type=positive_int, metavar="N", help="passes over the data (default: the trainer's own)"
    )
    parser.add_argument(
        "--train-minutes",
        type=positive_float,
        metavar="M",
        help=f"stop training after M minutes (default: {FULL.train_minutes:g}, "
        f"--quick {QUICK.train_minutes:g})",
    )
    parser.add_argument(
        "--train-args",
        default="",
        metavar="ARGS",
        help="more arguments of 'specdec-tap train', as one string",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        default=Path(".demo"),
        metavar="DIR",
        help="everything goes here; what is there is reused (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers as JSON ('-': print them)"
    )
    parser.epilog = """examples:
  specdec-tap demo --quick
  specdec-tap demo --requests 1000 --json demo.json
  specdec-tap demo --prompts chats.jsonl --model MODEL_DIR --workdir runs/mine

exit codes: 0 a drafter was trained, served and measured, 1 a step's result is bad (shards that fail
verification, training that fails), 2 wrong usage or input"""


def run(args: argparse.Namespace) -> int:
    check_writable_file(args.json, "--json")
    size = QUICK if args.quick else FULL
    asked = {"requests": args.requests, "max_tokens": args.max_tokens, "train_minutes": args.train_minutes}
    size = dataclasses.replace(size, **{name: value for name, value in asked.items() if value is not None})
    if args.model is not None:
        serving.check_model(args.model)
    if args.prompts is not None:
        engine.require_good_prompt_file(args.prompts, limit=size.requests)
    if args.train_args:
        # A mistyped flag is to be found now, not after ten minutes of capture; argparse exits with 2.
        build_parser("train").parse_args(["train", "SHARDS", *shlex.split(args.train_args)])
    eval_prompts = evaluate.load_prompts(
        args.eval_prompts or evaluate.default_prompt_file(),
        limit=None if args.eval_prompts and not args.quick else size.eval_requests,
    )
    demo = Demo(args, size, eval_prompts)
    try:
        with serving.stop_on_signal():
            numbers = demo.run()
    except StepFailed as err:
        print(f"specdec-tap demo: {err}", file=sys.stderr)
        return 1
    demo.show(numbers, to=sys.stderr if str(args.json) == "-" else sys.stdout)
    write_json(args.json, numbers)
    return 0


class StepFailed(Exception):
    """A step ran and its result is bad; the command that failed has printed why."""


def wait_until_sealed(shards: Path, timeout_s: float = SEAL_TIMEOUT_S) -> None:
    """Wait for the tap's writer: it outlives the server until its last shard is sealed.

    Raises:
        StepFailed: A shard is still open after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while any(shards.glob("*/*.open")):
        if time.monotonic() > deadline:
            raise StepFailed(
                f"a shard in {shards} is still open {timeout_s:.0f} s after the server stopped; "
                f"'specdec-tap shards repair {shards}' seals it"
            )
        time.sleep(0.1)


def context_length(model: Path) -> int:
    """Return the context to serve with: the model's own, but no more than the demo needs."""
    try:
        config = json.loads((model / "config.json").read_text())
        own = (config.get("text_config") or config)["max_position_embeddings"]
        return min(MAX_MODEL_LEN, int(own))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return MAX_MODEL_LEN  # vLLM reads the config too, and says what is wrong with it


class Demo:
    """The steps, in order, in one folder."""

    def __init__(
        self, args: argparse.Namespace, size: Size, eval_prompts: Sequence[engine.Conversation]
    ) -> None:
        self.args, self.size, self.eval_prompts = args, size, eval_prompts
        self.folder: Path = args.workdir
        self.steps = Steps(self.folder)
        self.shards = self.folder / "shards"
        self.run_dir = self.folder / "run"
        self.logs = self.folder / "logs"
        self.begun = time.monotonic()
        self.reused: list[str] = []
        self.vllm_arguments: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run every step that is not done yet and return the numbers."""
        if shutil.which("specdec-tap") is None:
            activate = Path(sys.prefix) / "bin" / "activate"
            print(f"the commands below work after: source {shlex.quote(str(activate))}", flush=True)
        model = self.get_model()
        self.vllm_arguments = [*serving.default_arguments(), "--max-model-len", str(context_length(model))]
        prompt_file = self.get_prompts()
        captured = self.capture(model, prompt_file)
        verified = self.verify(captured)
        trained = self.train(captured)
        measured = self.measure(model, prompt_file, captured, trained)
        return self.collect(captured, verified, trained, measured)

    # --- steps -------------------------------------------------------------------------------------------

    def get_model(self) -> Path:
        if self.args.model is not None:
            self.say(1, "model", f"{self.args.model}")
            return Path(self.args.model)
        folder = self.folder / smollm2.FOLDER_NAME
        if smollm2.is_complete(folder):
            self.say(1, "model", f"{folder} is there already")
            return folder
        self.say(1, "model", f"SmolLM2-135M-Instruct, into {folder}")
        return smollm2.get_smollm2(folder, on_step=lambda text: print(f"    {text}", flush=True))

    def get_prompts(self) -> Path:
        if self.args.prompts is not None:
            self.say(2, "prompts", f"{self.args.prompts}")
            return self.args.prompts
        file = self.folder / "prompts.jsonl"
        command = ["-m", "specdec_tap.prompts", "--count", str(self.size.requests), "--out", str(file)]
        self.say(2, "prompts", f"{self.size.requests:,} from the generator", "python " + shlex.join(command))
        prompts.write_prompts(file, self.size.requests)
        return file

    def capture(self, model: Path, prompt_file: Path) -> dict[str, Any]:
        inputs = {
            "model": folder_fingerprint(model),
            "prompts": file_digest(prompt_file),
            "requests": self.size.requests,
            "overhead_requests": self.size.overhead_requests,
            "max_tokens": self.size.max_tokens,
            "concurrency": self.args.concurrency,
            "vllm": serving.vllm_version(),
            "specdec_tap": __version__,
        }
        # Final states of prompts too: a quarter more to learn from, for a few per cent more bytes.
        env = {"SPECDEC_TAP_DIR": str(self.shards), "SPECDEC_TAP_FINAL_HIDDEN": "all"}
        server = serving.VllmServer(
            str(model), log_path=self.logs / "capture.log", arguments=self.vllm_arguments, env=env, port=8000
        )
        self.say(
            3,
            "capture",
            f"serve with the tap on, {self.size.requests:,} requests at concurrency {self.args.concurrency}",
            server.shell_command(),
            f"specdec-tap replay {prompt_file} --limit {self.size.requests} "
            f"--max-tokens {self.size.max_tokens} --concurrency {self.args.concurrency}",
        )
        return self.step("capture", inputs, self.shards, work=lambda: self._capture(model, prompt_file, env))

    def _capture(self, model: Path, prompt_file: Path, env: dict[str, str]) -> dict[str, Any]:
        if self.shards.exists():
            shutil.rmtree(self.shards)  # of an earlier run with other inputs; Steps owns this folder
        with started_server(
            "capture", str(model), log_path=self.logs / "capture.log", arguments=self.vllm_arguments, env=env
        ) as server:
            sample = self._replay_sample(server, prompt_file, "capture: sample")
            rest = self._replay(server, prompt_file, "capture", skip=self.size.overhead_requests)
        wait_until_sealed(self.shards)
        requests = sample.requests + rest.requests
        failed = sample.failed + rest.failed
        if failed or not requests:
            raise StepFailed(
                f"{failed:,} requests failed ({(sample.errors + rest.errors or ['no answer'])[0]})"
            )
        print(f"    {summary(rest)}", flush=True)
        stats = self._shard_stats()
        if stats["num_records"] < requests:
            print(
                f"    {stats['num_records']:,} of {requests:,} requests were kept; "
                f"{self.logs / 'capture.log'} says why the others were dropped",
                flush=True,
            )
        return {
            "stats": stats,
            "requests": requests,
            "too_long": sample.too_long + rest.too_long,
            "prompt_tokens": sample.prompt_tokens + rest.prompt_tokens,
            "completion_tokens": sample.completion_tokens + rest.completion_tokens,
            "sample_output_tokens_per_s": sample.output_tokens_per_s,
            "sample_latency_p50_s": sample.latency_s(0.5),
            "startup_s": server.startup_s,
        }

    def _shard_stats(self) -> dict[str, Any]:
        """Sum up what was captured. An empty folder must fail here: a step that ended well is reused."""
        from ..shards import open_shards
        from ..shards.index import summarise

        try:
            with open_shards(self.shards) as store:
                stats = summarise(store)
        except SpecdecTapError as err:
            raise StepFailed(f"nothing was captured ({err}); see {self.logs / 'capture.log'}") from err
        if not stats["num_records"]:
            raise StepFailed(f"no request was captured; see {self.logs / 'capture.log'}")
        return stats

    def _options(self, server: serving.VllmServer) -> engine.ReplayOptions:
        return engine.ReplayOptions(
            url=server.url, concurrency=self.args.concurrency, max_tokens=self.size.max_tokens
        )

    def _replay_sample(
        self, server: serving.VllmServer, prompt_file: Path, title: str
    ) -> engine.ReplayResult:
        """Send the first prompts, after a few short ones that warm the server up and are not captured."""
        warm_up = (
            engine.Conversation(id=f"warm-up-{i}", turns=(f"Count to {i + 3}.",))
            for i in range(WARM_UP_REQUESTS)
        )
        options = self._options(server)
        opted_out = {"vllm_xargs": {"specdec_tap": 0}}
        engine.replay(warm_up, dataclasses.replace(options, max_tokens=8, extra_body=opted_out))
        return self._replay(server, prompt_file, title, limit=self.size.overhead_requests)

    def _replay(
        self,
        server: serving.VllmServer,
        prompt_file: Path,
        title: str,
        *,
        skip: int = 0,
        limit: int | None = None,
    ) -> engine.ReplayResult:
        limit = self.size.requests if limit is None else min(limit, self.size.requests)
        found = engine.check_prompt_file(prompt_file, limit=limit)
        found.num_conversations = max(0, found.num_conversations - skip)
        result = engine.ReplayResult()
        if found.num_conversations:
            replay_with_progress(
                prompt_file, self._options(server), result, found=found, limit=limit, skip=skip, title=title
            )
        return result

    def verify(self, captured: dict[str, Any]) -> dict[str, Any]:
        command = ["shards", "verify", str(self.shards)]
        self.say(4, "verify", "prove that the shards hold what they claim", self.command(command))

        def work() -> dict[str, Any]:
            self.call(command)
            return {}

        return self.step("verify", {"capture": captured["run_id"]}, self.shards, work=work)

    def train(self, captured: dict[str, Any]) -> dict[str, Any]:
        numbers = self.folder / "train.json"
        command = ["train", str(self.shards), "--out", str(self.run_dir), "--json", str(numbers)]
        command += ["--time-limit", f"{60 * self.size.train_minutes:g}"]
        if self.args.epochs is not None:
            command += ["--epochs", str(self.args.epochs)]
        command += shlex.split(self.args.train_args)
        self.say(5, "train", "an EAGLE-3 drafter from the shards", self.command(command))
        drafter = self.run_dir / "drafter"

        def work() -> dict[str, Any]:
            if self.run_dir.exists():
                shutil.rmtree(self.run_dir)
            self.call(command)
            return {"summary": json.loads(numbers.read_text())}

        inputs = {"capture": captured["run_id"], "command": command, "specdec_tap": __version__}
        return self.step("train", inputs, drafter, work=work)

    def measure(
        self, model: Path, prompt_file: Path, captured: dict[str, Any], trained: dict[str, Any]
    ) -> dict[str, Any]:
        size = self.size
        drafter = self.run_dir / "drafter"
        arguments = f" --vllm-args={shlex.quote(shlex.join(self.vllm_arguments))}"
        wanted = f" --prompts {self.args.eval_prompts}" if self.args.eval_prompts else ""
        self.say(
            6,
            "measure",
            "serve the drafter, then the model alone, on other prompts",
            f"specdec-tap eval --drafter {drafter} --model {model}{wanted} --limit {len(self.eval_prompts)} "
            f"--max-tokens {size.eval_max_tokens}{arguments}",
        )
        inputs = {
            "capture": captured["run_id"],
            "train": trained["run_id"],
            "prompts": [conversation.turns[0] for conversation in self.eval_prompts],
            "max_tokens": size.eval_max_tokens,
            "vllm": serving.vllm_version(),
        }
        return self.step("measure", inputs, work=lambda: self._measure(model, drafter, prompt_file))

    def _measure(self, model: Path, drafter: Path, prompt_file: Path) -> dict[str, Any]:
        options = engine.ReplayOptions(concurrency=8, max_tokens=self.size.eval_max_tokens)
        speculation = json.dumps(speculative_config(drafter, NUM_SPECULATIVE_TOKENS))

        def measure(server: serving.VllmServer, title: str) -> evaluate.Measurement:
            return measure_with_progress(
                title, self.eval_prompts, dataclasses.replace(options, url=server.url)
            )

        with started_server(
            "drafter",
            str(model),
            log_path=self.logs / "drafter.log",
            arguments=[*self.vllm_arguments, "--speculative-config", speculation],
            env=TAP_OFF,
        ) as server:
            with_drafter = measure(server, "drafter")
        with started_server(
            "baseline",
            str(model),
            log_path=self.logs / "baseline.log",
            arguments=self.vllm_arguments,
            env=TAP_OFF,
        ) as server:
            without = measure(server, "baseline")
            untapped = self._replay_sample(server, prompt_file, "baseline: the sample without the tap")
        evaluation = evaluate.Evaluation(drafter=with_drafter, baseline=without)
        return {
            "evaluation": evaluation.to_json(),
            "sample_output_tokens_per_s": untapped.output_tokens_per_s,
            "sample_latency_p50_s": untapped.latency_s(0.5),
        }

    # --- what all steps need -----------------------------------------------------------------------------

    def say(self, number: int, name: str, text: str, *commands: str) -> None:
        """Announce a step and how to run it alone."""
        print(f"\n[{number}/6] {name}: {text}", flush=True)
        for command in commands:
            print(f"    $ {command}", flush=True)

    def command(self, arguments: Sequence[str]) -> str:
        return shlex.join(["specdec-tap", *arguments])

    def call(self, arguments: Sequence[str]) -> None:
        """Run another subcommand in a process of its own, on this terminal.

        Raises:
            StepFailed: It gave another exit code than 0.
        """
        done = subprocess.run(
            [sys.executable, "-m", "specdec_tap", *arguments], stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise StepFailed(f"'{self.command(arguments)}' gave exit code {done.returncode}")

    def step(self, name: str, inputs: dict[str, Any], *made: Path, work: Any) -> dict[str, Any]:
        result, reused = self.steps.run(name, inputs, *made, work=work)
        if reused:
            self.reused.append(name)
            print(f"    done before with the same inputs ({result['seconds']:.0f} s); reused", flush=True)
        return result

    # --- numbers -----------------------------------------------------------------------------------------

    def collect(
        self,
        captured: dict[str, Any],
        verified: dict[str, Any],
        trained: dict[str, Any],
        measured: dict[str, Any],
    ) -> dict[str, Any]:
        """Return every number of the run as one JSON-able object."""
        stats, training, evaluation = captured["stats"], trained["summary"], measured["evaluation"]
        tapped, untapped = captured["sample_output_tokens_per_s"], measured["sample_output_tokens_per_s"]
        steps = {"capture": captured, "verify": verified, "train": trained, "measure": measured}
        return {
            "requests": captured["requests"],
            "records": stats["num_records"],
            "tokens": stats["num_tokens"],
            "response_tokens": stats["response_tokens"],
            "bytes_per_token": stats["bytes_per_token"],
            "raw_bytes_per_token": stats["raw_bytes_per_token"],
            "shard_bytes": stats["file_bytes"],
            "capture_output_tokens_per_s": tapped,
            "no_capture_output_tokens_per_s": untapped,
            "capture_overhead_fraction": 1 - tapped / untapped if untapped else None,
            "train_s": trained["seconds"],
            "train_tokens_per_s": training["train_tokens_per_s"],
            "simulated_acceptance_length": training["simulated_acceptance_length"],
            "acceptance_length": evaluation["acceptance_length"],
            "acceptance_per_position": evaluation["acceptance_per_position"],
            "output_tokens_per_s": evaluation["output_tokens_per_s"],
            "baseline_output_tokens_per_s": evaluation["baseline_output_tokens_per_s"],
            "identical_answers": evaluation["identical_answers"],
            "compared_answers": evaluation["compared_answers"],
            "step_s": {name: result["seconds"] for name, result in steps.items()},
            "reused_steps": self.reused,
            "total_s": time.monotonic() - self.begun,
            "quick": self.args.quick,
            "specdec_tap": __version__,
            "vllm": serving.vllm_version(),
            "torch": importlib.metadata.version("torch"),
        }

    def show(self, numbers: dict[str, Any], to: Any) -> None:
        """Print the table that ends the demo."""
        n = numbers
        share = n["bytes_per_token"] / n["raw_bytes_per_token"]
        overhead = n["capture_overhead_fraction"]
        rows = [
            ("requests captured", f"{n['records']:,} of {n['requests']:,}"),
            ("tokens", f"{n['tokens']:,} ({n['response_tokens']:,} of them generated)"),
            (
                "bytes/token",
                f"{n['bytes_per_token']:,.0f} of {n['raw_bytes_per_token']:,.0f} raw ({share:.0%}), "
                f"{human_bytes(n['shard_bytes'])} in all",
            ),
            (
                "capture overhead",
                f"{overhead:+.1%} (generated tokens/s: {n['capture_output_tokens_per_s']:,.0f} with the tap, "
                f"{n['no_capture_output_tokens_per_s']:,.0f} without)",
            ),
            ("training", f"{n['train_s']:,.0f} s at {n['train_tokens_per_s']:,.0f} tokens/s"),
            ("simulated acceptance length", f"{n['simulated_acceptance_length']:.3f} (held-out requests)"),
            ("real acceptance length", f"{n['acceptance_length']:.3f} (vLLM's counters, other prompts)"),
            ("acceptance per position", " ".join(f"{x:.3f}" for x in n["acceptance_per_position"])),
            (
                "generated tokens/s",
                f"{n['output_tokens_per_s']:,.0f} with the drafter, "
                f"{n['baseline_output_tokens_per_s']:,.0f} without",
            ),
            ("equal greedy answers", f"{n['identical_answers']} of {n['compared_answers']}"),
            (
                "total",
                f"{n['total_s']:,.0f} s" + (f", reused: {', '.join(self.reused)}" if self.reused else ""),
            ),
        ]
        print(file=to)
        print_table("specdec-tap demo", rows, to=to)
        drafter = self.run_dir / "drafter"
        print(f"the drafter is in {drafter}; serve it with:", file=to)
        speculation = json.dumps(speculative_config(drafter, NUM_SPECULATIVE_TOKENS))
        model = self.args.model or self.folder / smollm2.FOLDER_NAME
        arguments = shlex.join(["vllm", "serve", str(model), "--speculative-config", speculation])
        print(f"    $ {arguments}", file=to)
