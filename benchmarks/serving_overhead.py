"""What the tap costs a vLLM server: throughput, latency, CPU time, and the time of one hook.

Three measurements, one JSON line:

- ``hook``: the tap's two hooks on steps of 256 requests as both of vLLM's runners leave them, with the real
  writer process behind.
- ``windows``: one server; short windows with the tap paused and resumed take turns. Neighbours are compared,
  so slow drifts of the machine cancel, and have the same prompts, with vLLM's prefix cache emptied between
  them; CPU seconds per token of worker and writer are read from /proc. The model gives its aux states while
  the tap is paused, too; only the pairs see what that costs.
- ``pairs``: a server without and a server with the tap take turns, with the same prompts.

Noise is given as the middle half of the ratios between neighbouring windows (or runs) of the same kind.

    python benchmarks/serving_overhead.py MODEL                     # everything, about an hour on 2 cores
    python benchmarks/serving_overhead.py MODEL --only windows --concurrency 32
    python benchmarks/serving_overhead.py --only hook               # seconds; no model needed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec_tap.prompts import iterate_prompts
from specdec_tap.serving import VllmServer, default_arguments, root_url

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the fake steps of the unit tests

BATCH = 256
CACHE_BYTES = 64 << 20
"""More than a core's share of any cache."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


# -- the hook alone -----------------------------------------------------------------------------------------


def hook_times(hidden_sizes: Sequence[int], steps: int) -> dict[str, Any]:
    """Time both hooks together, per runner and hidden size.

    On a CPU the worker itself copies the states, at the speed of memory; ``copy_us`` is the time of that one
    operation. ``hook_us_per_step`` is all the rest: what the hook costs whatever the hidden size is, and what
    it costs the host where a device does the copy. Large states push everything else out of the processor's
    cache, and the next step pays for that; a forward does the same at any hidden size, which ``cold_rest_us``
    stands for.
    """
    import torch

    by_size: dict[str, dict[int, dict[str, float]]] = {}
    for runner in ("v1", "v2"):
        by_size[runner] = {}
        for hidden in hidden_sizes:
            with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
                warm = hook_time(runner, hidden, steps, Path(folder) / "warm")
                cold = hook_time(runner, hidden, steps, Path(folder) / "cold", evict=True)
                by_size[runner][hidden] = warm | {"cold_rest_us": cold["rest_us"]}
    rest = {name: max(one["rest_us"] for one in sizes.values()) for name, sizes in by_size.items()}
    return {"hook_us_per_step": rest, "hook_us_by_hidden_size": by_size}


def hook_time(
    runner_name: str, hidden: int, steps: int, folder: Path, *, evict: bool = False
) -> dict[str, float]:
    """Return medians in microseconds: the hooks, the copy in them, and the difference.

    With ``evict`` the processor's cache is filled with something else before each step.
    """
    import torch
    from helpers.fake_engine import FakeRunner, make_tap, new_request, schedule

    from specdec_tap.vllm_plugin import staging

    tap = make_tap(folder / "shards", hidden_size=hidden, limits={"max_rows": 4 * BATCH})
    runner = FakeRunner(runner_name, hidden)
    ids = [f"chatcmpl-{i:032x}-{i:08x}" for i in range(BATCH)]
    tap.on_schedule(schedule([new_request(name, [1, 2, 3], max_tokens=4000) for name in ids]))
    tap.on_step(runner.step(ids, [3] * BATCH, [0] * BATCH, [1, 2, 3] * BATCH, [[4]] * BATCH))
    states = torch.randn(4, BATCH, hidden).bfloat16()
    other = torch.zeros(CACHE_BYTES if evict else 0, dtype=torch.uint8)
    hooks: list[float] = []
    copies: list[float] = []
    gather = staging.gather_states

    def timed(*args: Any) -> None:
        begin = time.perf_counter_ns()
        gather(*args)
        copies.append((time.perf_counter_ns() - begin) / 1e3)

    staging.gather_states = timed
    for number in range(steps):
        step = runner.step(list(ids), [1] * BATCH, [3 + number] * BATCH, [4] * BATCH, [[4]] * BATCH, states)
        nothing_new = schedule()
        other.add_(1)
        begin = time.perf_counter_ns()
        tap.on_schedule(nothing_new)
        tap.on_step(step)
        hooks.append((time.perf_counter_ns() - begin) / 1e3)
        while tap.ring.used_bytes_now() > tap.ring.size // 2:  # let the writer catch up
            time.sleep(0.001)
    staging.gather_states = gather
    worker = tap.status()["worker"]
    tap.active = False
    tap.channel.finish()
    tap.close()
    if worker["given_up"] or worker["hook_errors"] or len(copies) != steps:
        raise SystemExit(f"the hooks lost requests: {worker}")
    rest = [hook - copy for hook, copy in zip(hooks, copies, strict=True)]
    values = {"hook_us": hooks, "copy_us": copies, "rest_us": rest}
    return {name: round(statistics.median(each), 1) for name, each in values.items()}


# -- load ---------------------------------------------------------------------------------------------------


class Window:
    """What clients saw while one batch of requests ran."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = 0
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.cpu_s = {"worker": 0.0, "writer": 0.0}

    @property
    def throughput(self) -> float:
        return self.num_tokens / self.seconds


async def send(url: str, prompts: Sequence[str], concurrency: int, max_tokens: int) -> Window:
    """Stream one answer per prompt, ``concurrency`` at a time.

    Answers have half to one and a half times ``max_tokens`` tokens: if all had the same number, they would
    end together, and prompts would come in waves that no server sees.
    """
    import httpx

    window = Window()
    lengths = random.Random(len(prompts))
    shortest, longest = (max_tokens + 1) // 2, max_tokens * 3 // 2
    queue = iter([(prompt, lengths.randint(shortest, longest)) for prompt in prompts])

    async def client() -> None:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            for prompt, length in queue:
                body = {
                    "model": "bench", "prompt": prompt, "max_tokens": length, "temperature": 0.0,
                    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                last = time.perf_counter()
                first = True
                async with http.stream("POST", url + "/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = time.perf_counter()
                        if '"usage":{' in line or '"usage": {' in line:
                            window.num_tokens += json.loads(line[6:])["usage"]["completion_tokens"]
                        elif first:
                            window.ttft_s.append(now - last)
                            first = False
                        else:
                            window.itl_s.append(now - last)
                        last = now

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    window.seconds = time.perf_counter() - begin
    return window


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie.

    Example:
        >>> percentile([3.0, 1.0, 2.0], 0.5)
        2.0
    """
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def interval(values: Sequence[float], seed: int = 0) -> list[float]:
    """Return the bootstrap 95 % confidence interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return [round(medians[50], 4), round(medians[1949], 4)]


def noise(values: Sequence[float]) -> float | None:
    """Half the width of the middle half of the ratios between neighbours of one kind; None for one value."""
    if len(values) < 2:
        return None
    ratios = sorted(b / a for a, b in itertools.pairwise(values))
    return round((percentile(ratios, 0.75) - percentile(ratios, 0.25)) / 2, 4)


def ratios(on: Sequence[Window], off: Sequence[Window]) -> dict[str, Any]:
    """Compare neighbours; medians of the ratios, the interval of the throughput's, and the noise."""
    throughput = [a.throughput / b.throughput for a, b in zip(on, off, strict=True)]
    out = {
        "throughput_ratio": round(statistics.median(throughput), 4),
        "throughput_ratio_interval": interval(throughput),
        "throughput_noise": noise([w.throughput for w in off]),
        "tokens_per_s_off": round(statistics.median(w.throughput for w in off), 1),
    }
    for name, share, values in (
        ("ttft_p50", 0.5, "ttft_s"),
        ("itl_p50", 0.5, "itl_s"),
        ("itl_p99", 0.99, "itl_s"),
    ):
        each = [
            percentile(getattr(a, values), share) / percentile(getattr(b, values), share)
            for a, b in zip(on, off, strict=True)
        ]
        out[f"{name}_ratio"] = round(statistics.median(each), 4)
        out[f"{name}_ratio_interval"] = interval(each)
        out[f"{name}_ms_off"] = round(
            1e3 * statistics.median(percentile(getattr(w, values), share) for w in off), 2
        )
    return out


# -- servers ------------------------------------------------------------------------------------------------


class Bench:
    """Starts servers and gives each window prompts that no earlier one of that server had."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._folder = Path(tempfile.mkdtemp(prefix="specdec-tap-bench-"))
        self._numbers = itertools.count()

    def prompts(self, seed: int, count: int) -> list[str]:
        texts = (prompt["turns"][0] for prompt in iterate_prompts(seed))
        return [text[:600] for text in itertools.islice(texts, count)]

    @contextlib.contextmanager
    def server(self, tapped: bool) -> Iterator[VllmServer]:
        number = next(self._numbers)
        shards = self._folder / f"shards{number}"
        env = {"VLLM_SERVER_DEV_MODE": "1", "SPECDEC_TAP": None if tapped else "off"}
        if tapped:
            env |= {"SPECDEC_TAP_DIR": str(shards)}
        arguments = ["--max-model-len", "2048", "--max-num-seqs", "64", "--served-model-name", "bench"]
        arguments += default_arguments() + self.args.vllm
        log = self._folder / f"serve{number}.log"
        with VllmServer(self.args.model, log_path=log, arguments=arguments, env=env) as server:
            asyncio.run(send(server.url, self.prompts(-1, 8), 8, 16))  # warm up
            yield server
        for path in shards.rglob("*"):
            if path.is_file():
                path.unlink()

    def window(self, server: VllmServer, seed: int, concurrency: int, pids: dict[str, int | None]) -> Window:
        count = max(24, self.args.requests * concurrency // max(self.args.concurrency))
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        window = asyncio.run(send(server.url, self.prompts(seed, count), concurrency, self.args.max_tokens))
        window.cpu_s = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        return window

    def windows(self) -> dict[str, Any]:
        """Paused and resumed windows inside one server's life."""
        out = {}
        with self.server(tapped=True) as server:
            control(server, "resume")
            pids = {"worker": worker_pid(server), "writer": writer_pid(control(server, "resume"))}
            for concurrency in self.args.concurrency:
                taken: dict[bool, list[Window]] = {True: [], False: []}
                for number in range(self.args.windows):
                    # on off off on on off ...: neither kind is always first.
                    for on in (True, False) if number % 2 == 0 else (False, True):
                        control(server, "resume" if on else "pause")
                        post(server, "/reset_prefix_cache")
                        seed = 1000 * concurrency + number
                        taken[on].append(self.window(server, seed, concurrency, pids))
                        say(f"concurrency {concurrency} window {number} {'on' if on else 'off'}: "
                            f"{taken[on][-1].throughput:.1f} tokens/s")  # fmt: skip
                result = ratios(taken[True], taken[False])
                for name in pids:
                    for on, label in ((True, "on"), (False, "off")):
                        tokens = sum(w.num_tokens for w in taken[on])
                        seconds = sum(w.cpu_s[name] for w in taken[on])
                        result[f"{name}_cpu_ms_per_token_{label}"] = round(1e3 * seconds / tokens, 4)
                out[str(concurrency)] = result
            status = control(server, "resume")
            worker = status["worker"]  # a preempted worker's time counts, too
            out["hook_us_per_served_step"] = round(worker["hook_ns"] / 1e3 / max(1, worker["steps"]), 1)
            out["counters"] = {**status["worker"], **{f"writer_{k}": v for k, v in status["writer"].items()}}
        return out

    def pairs(self) -> dict[str, Any]:
        """One server each, without and with the tap, same prompts."""
        taken: dict[int, dict[bool, list[Window]]] = {c: {True: [], False: []} for c in self.args.concurrency}
        for number in range(self.args.pairs):
            for on in (True, False) if number % 2 else (False, True):
                with self.server(tapped=on) as server:
                    pids = {"worker": worker_pid(server)}
                    for concurrency in self.args.concurrency:
                        window = self.window(server, 7_000_000 + concurrency, concurrency, pids)
                        taken[concurrency][on].append(window)
                        say(f"pair {number} {'on' if on else 'off'} concurrency {concurrency}: "
                            f"{window.throughput:.1f} tokens/s")  # fmt: skip
        return {str(c): ratios(both[True], both[False]) for c, both in taken.items()}


def control(server: VllmServer, action: str) -> dict[str, Any]:
    """Pause or resume the tap through vLLM's own route for calls to its workers."""
    answer = post(server, "/collective_rpc", {"method": "specdec_tap_control", "args": [action]})
    return json.loads(answer)["results"][0]


def post(server: VllmServer, path: str, body: dict[str, Any] | None = None) -> bytes:
    """The answer of one of vLLM's routes for developers."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(root_url(server.url) + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return response.read()


def cpu_seconds(pid: int | None) -> float:
    """User and system time of a process so far; 0 when it is not there."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def worker_pid(server: VllmServer) -> int | None:
    """Return the process that runs the model; with one rank on CUDA the engine does that itself."""
    return find("VLLM::Worker", server.pid) or find("VLLM::EngineCore", server.pid)


def find(text: str, group: int | None) -> int | None:
    """Return the process of a group whose command line holds ``text``."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.name)) == group and text in (path / "cmdline").read_text():
                return int(path.name)
    return None


def writer_pid(status: dict[str, Any]) -> int | None:
    """Return the pid of the writer process, from its status file's stream."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "specdec_tap.capture.writer_process" in (path / "cmdline").read_text():
                for file in (path / "fd").iterdir():
                    if status["stream"] in str(file.readlink()):
                        return int(path.name)
    return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model to serve; not needed for --only hook")
    parser.add_argument("--only", choices=["hook", "windows", "pairs"], help="one of the three measurements")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(c) for c in text.split(",")], default=[1, 8, 32]
    )
    parser.add_argument("--pairs", type=int, default=5, help="servers of each kind (5)")
    parser.add_argument("--windows", type=int, default=12, help="windows of each kind per concurrency (12)")
    parser.add_argument(
        "--requests", type=int, default=128,
        help="requests of one window at the highest concurrency; at a lower one fewer, but 24 (128)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer (48)")
    parser.add_argument(
        "--hidden-sizes", type=lambda text: [int(h) for h in text.split(",")], default=[64, 576, 4096]
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of the hook measurement (300)")
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], help="more arguments of vllm serve")
    args = parser.parse_args(argv)
    if args.model is None and args.only != "hook":
        parser.error("name a model, or use --only hook")
    result: dict[str, Any] = {"model": args.model and Path(args.model).name, "cpus": os.cpu_count()}
    if args.only in (None, "hook"):
        result |= hook_times(args.hidden_sizes, args.steps)
    bench = Bench(args)
    if args.only in (None, "windows"):
        result["windows"] = bench.windows()
    if args.only in (None, "pairs"):
        result["pairs"] = bench.pairs()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
