"""How fast one GPU trains an EAGLE-3 drafter of an 8B-class target: tokens per second and MFU.

No shards and no target are needed: states, head and embedding are random, of the sizes asked for. One JSON
line for each sequence length. ``mfu`` counts the matrix products that were run (``FlopCounterMode``, forward
and backward) against the GPU's dense bfloat16 peak. Takes under six minutes; ``--tiny`` checks the script on
a CPU, where its numbers mean nothing.

    python benchmarks/gpu_trainer.py
    python benchmarks/gpu_trainer.py --lengths 16384 --ttt-steps 3 --peak-tflops 989
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from specdec_trainer.batch import Batch, Document, pack
from specdec_trainer.loss import TeacherHead
from specdec_trainer.model import DraftConfig, Eagle3Drafter
from specdec_trainer.objective import Eagle3Objective
from specdec_trainer.optim import Optimizers, clip_gradients
from torch.utils.flop_counter import FlopCounterMode

# Dense bfloat16 peaks from the makers' data sheets, TFLOP/s; the first name found in the device's counts.
PEAKS = {"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "A100": 312.0,
         "L40S": 362.0, "L4": 121.0, "A10": 125.0, "4090": 165.0}  # fmt: skip
TINY = {"hidden": 64, "vocab": 512, "draft_vocab": 128, "heads": 4, "kv_heads": 2, "intermediate": 96,
        "batch_tokens": 512, "lengths": [128, 512], "steps": 3, "ttt_steps": 3}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any device")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=14_336)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16_384])
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--response-share", type=float, default=0.7, help="supervised share of the rows")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="timed steps at each length, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="timed seconds at each length, at most")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the device")
    if (args := parser.parse_args(argv)).tiny:
        parser.set_defaults(**TINY)
        args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.tiny:
        print("no CUDA device; --tiny checks the script without one", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = args.peak_tflops or peak_of(device)
    objective, optimizers = build(args, device)
    for length in args.lengths:
        print(json.dumps(measure(args, objective, optimizers, length, device, peak)), flush=True)
    return 0


def peak_of(device: torch.device) -> float | None:
    """TFLOP/s that the device's name promises; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in PEAKS.items() if key in name), None)


def build(args: argparse.Namespace, device: torch.device) -> tuple[Eagle3Objective, Optimizers]:
    """A drafter of one Llama layer with random tables of the target."""
    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=args.hidden, intermediate_size=args.intermediate, num_heads=args.heads,
        num_kv_heads=args.kv_heads, head_dim=args.hidden // args.heads, rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 500_000.0}, max_position_embeddings=131_072,
        vocab_size=args.vocab, draft_vocab_size=args.draft_vocab, aux_layer_ids=(2, 16, 29),
        norm_before_fc=True, norm_before_residual=True, norm_output=True,
    )  # fmt: skip
    model = Eagle3Drafter(config, compute_dtype=torch.bfloat16)
    model.start(torch.Generator().manual_seed(0))
    model.to(device)
    head = torch.randn(args.vocab, args.hidden, device=device, dtype=torch.bfloat16)
    ids = torch.randperm(args.vocab, device=device)[: args.draft_vocab].sort().values
    model.d2t.copy_(ids - torch.arange(args.draft_vocab, device=device))
    model.lm_head.to(torch.bfloat16)
    model.lm_head.weight.data = head[ids]
    model.lm_head.weight.requires_grad_(False)
    model.embed_weight = torch.randn(args.vocab, args.hidden, device=device, dtype=torch.bfloat16)
    model.train()
    objective = Eagle3Objective(model, TeacherHead(head, ids), steps=args.ttt_steps)
    optimizers = Optimizers(
        model, name=args.optimizer, lr=1e-4, adamw_lr=1e-4, weight_decay=0.01, adamw_weight_decay=0.01,
        momentum=0.95, ns_steps=5,
    )  # fmt: skip
    return objective, optimizers


def make_batch(args: argparse.Namespace, length: int, seed: int) -> Batch:
    """Random documents of one length, a prompt and a response each, up to ``batch_tokens`` rows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    prompt = round(length * (1 - args.response_share))
    documents = []
    for i in range(max(1, args.batch_tokens // length)):
        weight = np.zeros(length, dtype=np.float32)
        weight[prompt:-1] = 1.0

        def states(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, args.hidden, generator=generator, dtype=torch.bfloat16)

        documents.append(
            Document(
                record_id=str(i), first_position=0, aux=states(length, 3),
                tokens=rng.integers(0, args.vocab, length), labels=rng.integers(0, args.vocab, length),
                weight=weight, final=states(int(weight.sum())), has_final=weight > 0,
            )
        )  # fmt: skip
    return pack(documents)


def train_step(
    objective: Eagle3Objective, optimizers: Optimizers, batch: Batch, device: torch.device
) -> float:
    """One whole step, copies to the device included; returns the loss of a supervised token."""
    batch = batch.to(device)
    loss = objective.loss(batch).total / batch.weight.sum()
    loss.backward()
    clip_gradients(optimizers.parameters, 0.5)
    optimizers.step(1.0)
    optimizers.zero_grad()
    return float(loss.detach())


def measure(
    args: argparse.Namespace, objective: Eagle3Objective, optimizers: Optimizers, length: int,
    device: torch.device, peak: float | None,
) -> dict[str, object]:  # fmt: skip
    """Speed and memory at one sequence length."""
    batches = [make_batch(args, length, seed) for seed in range(2)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # The first step allocates; the second is counted.
    train_step(objective, optimizers, batches[0], device)
    with FlopCounterMode(display=False) as counter:
        losses = [train_step(objective, optimizers, batches[1], device)]
    flops = counter.get_total_flops()
    rows, steps = 0, 0
    started = time.perf_counter()
    while steps < args.steps and time.perf_counter() - started < args.seconds:
        batch = batches[steps % len(batches)]
        losses.append(train_step(objective, optimizers, batch, device))
        rows += batch.num_rows
        steps += 1
    seconds = time.perf_counter() - started
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"loss is not finite at length {length}: {losses}")
    rate = flops * steps / seconds / 1e12
    return {
        "length": length,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "batch_tokens": batches[0].num_rows,
        "supervised_tokens": batches[0].num_supervised,
        "ttt_steps": args.ttt_steps,
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_s": rows / seconds,
        "tflops_per_step": flops / 1e12,
        "tflops_per_s": rate,
        "mfu": rate / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "loss": losses[-1],
    }


if __name__ == "__main__":
    sys.exit(main())
