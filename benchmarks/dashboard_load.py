"""What people who look cost a server: inter-token latency with and without many readers of its status.

One server captures all the time, and 32 clients keep generating, one answer after the other. In every other
window of ten seconds 200 readers ask for ``/specdec_tap/status`` once a second each, and 50 hold
``/specdec_tap/events`` open. The clients never stop between windows, so that every window has the same share
of prompts and of long steps; neighbours are compared, so slow drifts of the machine cancel. The readers are a
process of their own with the lowest priority: their own work shall not count as the server's, but on a
machine with few cores it takes some. One JSON line.

    python benchmarks/dashboard_load.py MODEL                 # about 12 minutes
    python benchmarks/dashboard_load.py MODEL --windows 5     # about 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from serving_overhead import Window, cpu_seconds, interval, noise, percentile, ratios, say

from specdec_tap.prompts import iterate_prompts
from specdec_tap.serving import VllmServer, default_arguments, root_url

TOKEN = "a-token-of-this-benchmark-only"


# -- readers: a process of their own ------------------------------------------------------------------------


class Readers:
    """Many readers of one server, in one event loop.

    Args:
        url: The server's address.
        interval_s: Time between two looks of one reader, in seconds.
    """

    def __init__(self, url: str, interval_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._interval_s = interval_s
        self.latency_s: list[float] = []
        self.num_events = 0
        self.errors: dict[str, int] = {}
        self.num_open = 0

    async def _connect(self, path: str) -> tuple[asyncio.StreamReader, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        self._writers.append(writer)
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ).encode()
        return reader, request

    async def _poll(self, number: int, count: int) -> None:
        reader, request = await self._connect("/specdec_tap/status")
        writer = self._writers[-1]
        self.num_open += 1
        await asyncio.sleep(self._interval_s * number / count)  # not all at once, as people are not
        while True:
            begin = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            await reader.readexactly(length)
            code = head.split(b" ", 2)[1].decode()
            if code == "200":
                self.latency_s.append(time.perf_counter() - begin)
            else:
                self.errors[code] = self.errors.get(code, 0) + 1
            await asyncio.sleep(max(0.0, begin + self._interval_s - time.perf_counter()))

    async def _follow(self) -> None:
        reader, request = await self._connect("/specdec_tap/events")
        self._writers[-1].write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        code = head.split(b" ", 2)[1].decode()
        if code != "200":
            self.errors[code] = self.errors.get(code, 0) + 1
            return
        self.num_open += 1
        while line := await reader.readline():
            self.num_events += line.startswith(b"event: ")

    async def run(self, num_readers: int, num_streams: int) -> None:
        """Read until standard input ends; say ``ready`` when everybody is connected, then what was seen."""
        self._writers: list[asyncio.StreamWriter] = []
        tasks = [asyncio.create_task(self._poll(i, num_readers)) for i in range(num_readers)]
        tasks += [asyncio.create_task(self._follow()) for _ in range(num_streams)]
        deadline = time.monotonic() + 30
        while self.num_open < num_readers + num_streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        begin = time.perf_counter()
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            if task.done() and (err := task.exception()):
                name = type(err).__name__
                self.errors[name] = self.errors.get(name, 0) + 1
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        seen = {
            "num_open": self.num_open, "latency_s": self.latency_s, "num_events": self.num_events,
            "errors": self.errors, "cpu_s": time.process_time(), "seconds": time.perf_counter() - begin,
        }  # fmt: skip
        print(json.dumps(seen), flush=True)


@contextlib.contextmanager
def reading(url: str, args: argparse.Namespace, seen: list[dict[str, Any]]) -> Iterator[None]:
    """Readers for as long as the context lasts; what they saw is added to ``seen``."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--read", url, "--readers", str(args.readers),
         "--streams", str(args.streams), "--interval", str(args.interval)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19),
    )  # fmt: skip
    try:
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the readers did not start")
        yield
        process.stdin.close()
        seen.append(json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


# -- clients ------------------------------------------------------------------------------------------------


class Clients:
    """Clients that generate without a pause; what they see goes into the present window, where there is one.

    Args:
        url: The server's address for OpenAI clients.
        seed: Of the prompts and of the lengths of answers.
    """

    def __init__(self, url: str, seed: int = 0) -> None:
        self._url = url
        self._prompts = (prompt["turns"][0][:600] for prompt in iterate_prompts(seed))
        self._lengths = random.Random(seed)
        self.window: Window | None = None

    async def run(self, count: int, shortest: int, longest: int) -> None:
        """Generate until cancelled; answers of different lengths keep the clients out of step."""
        await asyncio.gather(*(self._client(shortest, longest) for _ in range(count)))

    async def _client(self, shortest: int, longest: int) -> None:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            while True:
                body = {
                    "model": "bench", "prompt": next(self._prompts), "temperature": 0.0, "ignore_eos": True,
                    "max_tokens": self._lengths.randint(shortest, longest), "stream": True,
                }  # fmt: skip
                last, first = time.perf_counter(), True
                async with http.stream("POST", self._url + "/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = time.perf_counter()
                        if self.window is not None:
                            (self.window.ttft_s if first else self.window.itl_s).append(now - last)
                            self.window.num_tokens += 1
                        last, first = now, False


# -- windows ------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Windows with and without readers, alternating, inside one server's life."""
    with tempfile.TemporaryDirectory(prefix="specdec-tap-bench-") as folder:
        env = {
            "SPECDEC_TAP_DIR": f"{folder}/shards", "SPECDEC_TAP_ADMIN_TOKEN": TOKEN,
            "SPECDEC_TAP_MIN_FREE_BYTES": "0", "VLLM_PLUGINS": "specdec_tap",
        }  # fmt: skip
        arguments = ["--max-model-len", "2048", "--max-num-seqs", "64", "--served-model-name", "bench"]
        arguments += ["--disable-access-log-for-endpoints", "/specdec_tap/status,/specdec_tap/events"]
        arguments += default_arguments() + args.vllm
        log = Path(folder, "serve.log")
        with VllmServer(args.model, log_path=log, arguments=arguments, env=env) as server:
            return asyncio.run(alternate(args, server))


async def alternate(args: argparse.Namespace, server: VllmServer) -> dict[str, Any]:
    """Keep the server busy and open the windows."""
    clients = Clients(server.url)
    load = asyncio.create_task(clients.run(args.clients, args.max_tokens // 2, args.max_tokens))
    taken: dict[bool, list[Window]] = {True: [], False: []}
    api_cpu_s = {True: 0.0, False: 0.0}
    seen: list[dict[str, Any]] = []

    async def window(read: bool) -> None:
        with reading(root_url(server.url), args, seen) if read else contextlib.nullcontext():
            await asyncio.sleep(args.settle)
            one, before, begin = Window(), cpu_seconds(server.pid), time.perf_counter()
            clients.window = one
            await asyncio.sleep(args.seconds)
            clients.window = None
            one.seconds = time.perf_counter() - begin
            api_cpu_s[read] += cpu_seconds(server.pid) - before
        if load.done():
            load.result()
        taken[read].append(one)

    await asyncio.sleep(3 * args.settle)  # the first answers
    for number in range(args.windows):
        # with without without with ...: neither kind is always first.
        for read in (True, False) if number % 2 == 0 else (False, True):
            await window(read)
            last = taken[read][-1]
            say(f"window {number} {'with' if read else 'without'} readers: {last.throughput:.1f} tokens/s, "
                f"itl p50 {1e3 * percentile(last.itl_s, 0.5):.1f} p99 "
                f"{1e3 * percentile(last.itl_s, 0.99):.1f} ms")  # fmt: skip
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return report(args, taken, api_cpu_s, seen)


def report(
    args: argparse.Namespace,
    taken: dict[bool, list[Window]],
    api_cpu_s: dict[bool, float],
    seen: list[dict[str, Any]],
) -> dict[str, Any]:
    """Put the numbers together."""
    errors: dict[str, int] = {}
    for one in seen:
        for name, count in one["errors"].items():
            errors[name] = errors.get(name, 0) + count
    latency = [value for one in seen for value in one["latency_s"]]
    looked_s = sum(one["seconds"] for one in seen)
    seconds = {kind: sum(w.seconds for w in windows) for kind, windows in taken.items()}
    tokens = {kind: sum(w.num_tokens for w in windows) for kind, windows in taken.items()}
    p99 = {kind: [percentile(w.itl_s, 0.99) for w in windows] for kind, windows in taken.items()}
    # Within the windows, and beyond what the tokens cost.
    extra = api_cpu_s[True] - api_cpu_s[False] * tokens[True] / tokens[False]
    share = extra / seconds[True]
    pooled = {kind: [value for w in windows for value in w.itl_s] for kind, windows in taken.items()}
    return {
        "benchmark": "dashboard_load", "model": Path(args.model).name, "clients": args.clients,
        "readers": args.readers, "streams": args.streams, "interval_s": args.interval,
        "windows": args.windows,
        **ratios(taken[True], taken[False]),
        "itl_p99_noise": noise(p99[False]),
        "itl_p99_ratio_pooled": round(percentile(pooled[True], 0.99) / percentile(pooled[False], 0.99), 4),
        "itl_p99_ms_without": round(1e3 * statistics.median(p99[False]), 2),
        "itl_p99_ms_without_interval": [round(1e3 * v, 2) for v in interval(p99[False])],
        "status_requests_per_s": round(len(latency) / looked_s, 1),
        "status_ms_p50": round(1e3 * percentile(latency, 0.5), 2),
        "status_ms_p99": round(1e3 * percentile(latency, 0.99), 2),
        "events": sum(one["num_events"] for one in seen), "errors": errors,
        "connected": min(one["num_open"] for one in seen),
        "api_server_cpu_share": round(share, 4),
        "readers_cpu_share": round(sum(one["cpu_s"] for one in seen) / looked_s, 3),
        "cores": os.cpu_count(),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model to serve")
    parser.add_argument("--clients", type=int, default=32, help="generating clients (32)")
    parser.add_argument("--readers", type=int, default=200, help="readers of the status (200)")
    parser.add_argument("--streams", type=int, default=50, help="open event streams (50)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between a reader's looks (1)")
    parser.add_argument("--windows", type=int, default=24, help="windows of each kind (24)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window (10)")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds between windows (2)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of the longest answers (128)")
    parser.add_argument("--vllm", nargs=argparse.REMAINDER, default=[], help="more arguments of vllm serve")
    parser.add_argument("--read", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.read:
        asyncio.run(Readers(args.read, args.interval).run(args.readers, args.streams))
        return 0
    if args.model is None:
        parser.error("name the model to serve")
    print(json.dumps(measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
