"""Check on a GPU what the tap's device path costs: copy rate, host time per step, effect on computing.

Needs a CUDA device and no vLLM; takes about a minute. Prints one JSON line; exits 1 when rows arrive wrong.

    python benchmarks/gpu_staging.py --hidden 4096 --rows 256
    python benchmarks/gpu_staging.py --hidden 7168 --rows 8192        # a long prefill of a large model
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec_tap.capture.protocol import StepLayout
from specdec_tap.capture.ring import Ring
from specdec_tap.vllm_plugin.staging import DeviceStager, StepRows, make_stager

NUM_LAYERS = 4


def make_step(hidden: int, rows: int, requests: int, device: torch.device, share: float) -> StepRows:
    """A step of random rows on the device; ``share`` of its rows are wanted."""
    states = [torch.randn(rows, hidden, device=device).bfloat16() for _ in range(NUM_LAYERS)]
    index = None if share >= 1 else np.arange(0, rows, max(1, round(1 / share)))
    return StepRows(
        StepLayout(NUM_LAYERS, hidden, 2, rows if index is None else len(index), requests, 1),
        states,
        torch.arange(rows, device=device),
        torch.arange(rows, device=device, dtype=torch.int32),
        index,
        torch.zeros(requests, 1, dtype=torch.int64, device=device),
        torch.ones(requests, dtype=torch.int32, device=device),
    )


def is_right(ring: Ring, step: StepRows) -> bool:
    """Whether the ring's first step holds exactly the step's rows."""
    layout = step.layout
    size = layout.num_layers * layout.num_rows * layout.hidden_size
    got = torch.from_numpy(ring.data[: 2 * size].copy()).view(torch.bfloat16).view(layout.num_layers, -1)
    take = (
        slice(layout.num_rows) if step.rows is None else torch.from_numpy(step.rows).to(step.states[0].device)
    )
    want = torch.stack([state[take] for state in step.states]).cpu().view(layout.num_layers, -1)
    return torch.equal(got, want)


def seconds(work: Callable[[], None], repeat: int) -> float:
    """Return the device's time for one call, the median of ``repeat``."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def run(args: argparse.Namespace) -> tuple[dict[str, object], bool]:
    device = torch.device("cuda")
    step = make_step(args.hidden, args.rows, min(args.rows, 256), device, args.share)
    at = step.layout.offsets()
    ring = Ring.create(4 * at[-1])
    stager = make_stager(ring, torch.bfloat16, at[-1], device)
    assert isinstance(stager, DeviceStager), "a CUDA device gets the device stager"
    stager.stage(step, at, 0)
    torch.cuda.synchronize()
    right = is_right(ring, step)

    # The machine's own copy rate, device to pinned host memory.
    flat = torch.empty(at[5], dtype=torch.uint8, device=device)
    pinned = torch.empty(at[5], dtype=torch.uint8, pin_memory=True)
    copy_s = seconds(lambda: pinned.copy_(flat, non_blocking=True), args.repeat)
    stage_s = seconds(lambda: stager.stage(step, at, 0), args.repeat)

    host = []
    for i in range(args.repeat):
        begin = time.perf_counter()
        ticket = stager.stage(step, at, (i % 4) * at[-1])
        host.append(time.perf_counter() - begin)
        while not ticket.query():
            time.sleep(0.0005)

    # A stand-in for the model: matrix products, with one step staged after every ten of them.
    a = torch.randn(4096, 4096, device=device).bfloat16()

    def compute(staged: bool) -> None:
        for i in range(200):
            a @ a
            if staged and i % 10 == 9:
                stager.stage(step, at, (i // 10 % 4) * at[-1])

    compute(True)
    alone = seconds(lambda: compute(False), 10)
    beside = seconds(lambda: compute(True), 10)
    result = {
        "device": torch.cuda.get_device_name(),
        "hidden_size": args.hidden,
        "rows": args.rows,
        "share": args.share,
        "rows_are_right": right,
        "step_bytes": at[5],
        "copy_bytes_per_s": round(at[5] / copy_s),
        "stage_bytes_per_s": round(at[5] / stage_s),
        "stage_of_copy_rate": round(copy_s / stage_s, 3),
        "host_us_per_step": round(1e6 * statistics.median(host), 1),
        "matmul_slowdown_ratio": round(beside / alone, 4),
        "device_buffer_bytes": 2 * len(stager._buffers[0]),
    }
    return result, right


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (4096)")
    parser.add_argument("--rows", type=int, default=256, help="rows of one step (256)")
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows that is captured (1)")
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; the same logic is tested without one in tests/unit/capture")
    result, right = run(args)
    print(json.dumps(result))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
