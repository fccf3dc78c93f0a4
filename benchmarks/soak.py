"""Serve for a while with clients that come and go: does anything leak, do the counters add up?

Clients ask for answers of random length and leave at random moments: before the first token, in the middle,
or not at all; some opt out. Resident memory of the worker and of the writer is read now and then. At the end
every request that the engine scheduled must be in exactly one place:

    requests_started = requests_sealed + every dropped_* + every skipped_*

``worker_growth_mb`` and ``writer_growth_mb`` compare the median of the last quarter with that of the second
quarter, when all is warm. Prints one JSON line; exits 1 when the counters do not add up, a request was
dropped, the server answered an error, or a stored shard is wrong. What vLLM itself does to its worker's
memory, ``--without-tap`` shows: the same clients, nothing captured.

    python benchmarks/soak.py MODEL --minutes 20 --concurrency 32
    python benchmarks/soak.py MODEL --minutes 20 --concurrency 32 --without-tap
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_overhead import control, say, worker_pid, writer_pid

from specdec_tap import open_shards
from specdec_tap.prompts import iterate_prompts
from specdec_tap.serving import VllmServer, default_arguments

MB = 1e6
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLE_TIMEOUT_S = 60.0


class Traffic:
    """What the clients did."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ended = {"answered": 0, "left": 0, "opted_out": 0}
        self.problems: list[str] = []
        self._prompts = iterate_prompts(args.seed)
        self._random = random.Random(args.seed)

    async def client(self, url: str, until: float) -> None:
        """Ask one question after another; about a third of them are left in the middle."""
        import httpx

        rng = self._random
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            while time.monotonic() < until:
                turns = next(self._prompts)["turns"]
                opts_out = rng.random() < 0.1
                body: dict[str, Any] = {
                    "model": "soak", "prompt": turns[0][:1500], "stream": True, "ignore_eos": True,
                    "max_tokens": rng.randint(1, self.args.max_tokens), "temperature": rng.choice([0.0, 1.0]),
                }  # fmt: skip
                if opts_out:
                    body["vllm_xargs"] = {"specdec_tap": 0}
                patience_s = rng.expovariate(1 / 3) if rng.random() < 0.3 else None
                try:
                    async with asyncio.timeout(patience_s):
                        await self._read(http, url, body)
                    self.ended["opted_out" if opts_out else "answered"] += 1
                except TimeoutError:
                    self.ended["left"] += 1
                except httpx.HTTPError as err:
                    self.problems.append(f"{type(err).__name__}: {err}"[:300])

    async def _read(self, http: Any, url: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", url + "/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_lines():
                pass


def rss_mb(pid: int | None) -> float:
    """Resident memory of a process now, in MB; NaN when it is not there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MB
    except OSError:
        return float("nan")


async def watch(pids: dict[str, int | None], until: float, interval_s: float) -> list[dict[str, float]]:
    """Read memory until then."""
    begin, out = time.monotonic(), []
    while time.monotonic() < until:
        out.append({"s": round(time.monotonic() - begin, 1)} | {n: rss_mb(pid) for n, pid in pids.items()})
        await asyncio.sleep(interval_s)
    return out


def growth_mb(samples: Sequence[dict[str, float]], name: str) -> float:
    """Median of the last quarter minus that of the second."""
    values = [sample[name] for sample in samples]
    quarter = max(1, len(values) // 4)
    return round(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]), 2)


def ended(counters: dict[str, int]) -> int:
    """How many requests ended somewhere."""
    return sum(
        n for k, n in counters.items() if k == "requests_sealed" or k.startswith(("dropped_", "skipped_"))
    )


def settle(server: VllmServer) -> tuple[dict[str, int], dict[str, Any]]:
    """Return counters of worker and writer together once no request is under way, and the status."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        status = control(server, "flush")
        counters: dict[str, int] = {}
        for side in ("worker", "writer"):
            for name, value in status[side].items():
                counters[name] = counters.get(name, 0) + value
        if counters["requests_started"] == ended(counters) or time.monotonic() > deadline:
            return counters, status
        time.sleep(0.5)


def make_server(args: argparse.Namespace, folder: Path, env: dict[str, str]) -> VllmServer:
    arguments = ["--max-model-len", "2048", "--max-num-seqs", str(args.concurrency)]
    arguments += ["--served-model-name", "soak", *default_arguments(), *args.vllm]
    return VllmServer(args.model, log_path=folder / "serve.log", arguments=arguments, env=env)


def load(
    args: argparse.Namespace, traffic: Traffic, server: VllmServer, pids: dict[str, int | None]
) -> list[dict[str, float]]:
    """Let the clients come and go; returns the memory of the processes over time."""
    seconds = 60 * args.minutes
    until = time.monotonic() + seconds

    async def everything() -> list[dict[str, float]]:
        watching = asyncio.create_task(watch(pids, until, max(1.0, seconds / 240)))
        # More clients than the engine takes at once, so that some wait in its queue.
        await asyncio.gather(*(traffic.client(server.url, until) for _ in range(args.concurrency + 4)))
        return await watching

    samples = asyncio.run(everything())
    say(f"clients: {traffic.ended}; memory: {samples[0]} -> {samples[-1]}")
    return samples


def memory(samples: Sequence[dict[str, float]], pids: dict[str, int | None]) -> dict[str, Any]:
    """What the result says of the processes' memory."""
    return {
        "rss_mb": {name: [round(samples[0][name], 1), round(samples[-1][name], 1)] for name in pids},
        **{f"{name}_growth_mb": growth_mb(samples, name) for name in pids},
        "rss_over_time": [[round(sample[name], 1) for name in ("s", *pids)] for sample in samples],
    }


def run_without_tap(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    traffic = Traffic(args)
    with make_server(args, folder, {}) as server:
        pids = {"worker": worker_pid(server)}
        samples = load(args, traffic, server, pids)
        healthy = server.is_healthy()
    result = {
        "model": Path(args.model).name,
        "minutes": args.minutes,
        "concurrency": args.concurrency,
        "tap": False,
        "clients": traffic.ended,
        "problems": traffic.problems[:5],
        **memory(samples, pids),
    }
    return result, healthy and not traffic.problems


def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    shards = folder / "shards"
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "SPECDEC_TAP_DIR": str(shards),
        "SPECDEC_TAP_MAX_BYTES": args.max_bytes,
        "SPECDEC_TAP_MAX_SHARD_BYTES": "64MB",
    }
    traffic = Traffic(args)
    with make_server(args, folder, env) as server:
        pids = {"worker": worker_pid(server), "writer": writer_pid(control(server, "resume"))}
        samples = load(args, traffic, server, pids)
        counters, status = settle(server)
        healthy = server.is_healthy()
    while list(shards.glob("*/*.open")):  # the writer outlives the server until all is sealed
        time.sleep(0.1)
    store = open_shards(shards)
    stored = len(store)
    checked = sum(1 for record in itertools.islice(store, 200) if not record.gaps and len(record.aux(0, 1)))
    dropped = {k: n for k, n in counters.items() if k.startswith("dropped_") and n}
    adds_up = counters["requests_started"] == ended(counters)
    result = {
        "model": Path(args.model).name,
        "minutes": args.minutes,
        "concurrency": args.concurrency,
        "clients": traffic.ended,
        "requests_started": counters["requests_started"],
        "requests_sealed": counters["requests_sealed"],
        "skipped": {k: n for k, n in counters.items() if k.startswith("skipped_") and n},
        "dropped": dropped,
        "adds_up": adds_up,
        "known_requests_at_the_end": status["known_requests"],
        "live_requests_at_the_end": status["live_requests"],
        "hook_errors": counters["hook_errors"],
        "writer_restarts": counters["writer_restarts"],
        "tokens": counters["tokens"],
        "stored_records": stored,
        "checked_records": checked,
        "retired_bytes": counters["retired_bytes"],
        "hook_us_per_step": round(counters["hook_ns"] / 1e3 / max(1, counters["steps"]), 1),
        "problems": traffic.problems[:5],
        **memory(samples, pids),
    }
    whole = stored == counters["requests_sealed"] or counters["retired_bytes"] > 0
    good = (
        adds_up and whole and healthy and not dropped and not traffic.problems and not status["live_requests"]
    )
    return result, good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--concurrency", type=int, default=32, help="requests that the engine runs at once (32)"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="longest answer, in tokens (200)")
    parser.add_argument(
        "--max-bytes", default="2GB", help="the tap removes its oldest shards above this (2GB)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moods")
    parser.add_argument("--without-tap", action="store_true", help="capture nothing: vLLM's own memory")
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], help="more arguments of vllm serve")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="specdec-tap-soak-") as name:
        result, good = (run_without_tap if args.without_tap else run)(args, Path(name))
    print(json.dumps(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
