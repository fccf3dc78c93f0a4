"""What people who look cost a server: inter-token latency with and without many readers of its status.

One server captures all the time. Windows of 32 generating clients take turns: in every other one 200 readers
ask for ``/specdec_tap/status`` once a second each, and 50 hold ``/specdec_tap/events`` open. Neighbours are
compared, so slow drifts of the machine cancel. The readers are a process of their own with the lowest
priority, so that their own work does not count as the server's; on a machine with few cores it still takes
some. One JSON line.

    python benchmarks/dashboard_load.py MODEL                 # about half an hour on 2 cores
    python benchmarks/dashboard_load.py MODEL --windows 4 --max-tokens 24
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serving_overhead import Window, cpu_seconds, interval, noise, percentile, ratios, say, send

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
            "errors": self.errors, "cpu_s": time.process_time(),
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


# -- windows ------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Windows with and without readers, alternating, inside one server's life."""
    prompts = (prompt["turns"][0][:600] for prompt in iterate_prompts(0))
    requests = max(args.clients, args.requests)
    taken: dict[bool, list[Window]] = {True: [], False: []}
    api_cpu_s = {True: 0.0, False: 0.0}
    seen: list[dict[str, Any]] = []
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

            def window(read: bool) -> Window:
                texts = [next(prompts) for _ in range(requests)]
                with reading(root_url(server.url), args, seen) if read else contextlib.nullcontext():
                    before = cpu_seconds(server.pid)
                    one = asyncio.run(send(server.url, texts, args.clients, args.max_tokens))
                    api_cpu_s[read] += cpu_seconds(server.pid) - before
                return one

            window(False)  # warm up
            for number in range(args.windows):
                # with without without with ...: neither kind is always first.
                for read in (True, False) if number % 2 == 0 else (False, True):
                    taken[read].append(window(read))
                    say(f"window {number} {'with' if read else 'without'} readers: "
                        f"{taken[read][-1].throughput:.1f} tokens/s, "
                        f"itl p99 {1e3 * percentile(taken[read][-1].itl_s, 0.99):.1f} ms")  # fmt: skip
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
    seconds = {kind: sum(w.seconds for w in windows) for kind, windows in taken.items()}
    tokens = {kind: sum(w.num_tokens for w in windows) for kind, windows in taken.items()}
    p99 = {kind: [percentile(w.itl_s, 0.99) for w in windows] for kind, windows in taken.items()}
    extra = api_cpu_s[True] - api_cpu_s[False] * tokens[True] / tokens[False]
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
        "status_requests_per_s": round(len(latency) / seconds[True], 1),
        "status_ms_p50": round(1e3 * percentile(latency, 0.5), 2),
        "status_ms_p99": round(1e3 * percentile(latency, 0.99), 2),
        "events": sum(one["num_events"] for one in seen), "errors": errors,
        "connected": min(one["num_open"] for one in seen),
        "api_server_cpu_ms_per_status": round(1e3 * extra / max(1, len(latency)), 3),
        "readers_cpu_share": round(sum(one["cpu_s"] for one in seen) / seconds[True], 3),
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
    parser.add_argument("--windows", type=int, default=16, help="windows of each kind (16)")
    parser.add_argument("--requests", type=int, default=32, help="requests of one window, at least (32)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each answer (48)")
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
