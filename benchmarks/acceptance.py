"""Acceptance length in vLLM of a drafter trained here and of one trained by speculators 0.9, in one run.

Both are trained on the same records of the same shards for the same number of passes, with the same draft
vocabulary; then vLLM serves each and its own counters tell what was accepted. Settings of this trainer are
its defaults (or ``--config``); those of speculators are its own defaults (Muon and AdamW at 1e-3 falling
linearly, 3 TTT steps, its norms, frozen head). Prints one JSON line with ``acceptance_length``,
``peer_acceptance_length`` and the same by prompt category.

    python benchmarks/acceptance.py SHARDS --model DIR --prompts mt_bench.jsonl --peer-python peer/bin/python

``trainer.py`` beside this file says how to make the peer's venv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from specdec_trainer import build, data, vocab
from specdec_trainer.config import TrainConfig, read_yaml
from specdec_trainer.run import run

from specdec_tap import evaluate, replay, serving
from specdec_tap.cli.eval import evaluate_drafter
from specdec_tap.shards import open_shards
from specdec_tap.target import Target, load_target
from trainer import peer_pack

PEER_TTT_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the target's whole checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl with id, category and turns")
    parser.add_argument("--peer-python", type=Path, required=True, help="python of the peer's venv")
    parser.add_argument("--config", type=Path, help="settings of this trainer (default: its defaults)")
    parser.add_argument("--passes", type=int, default=2, help="passes over the records, for both")
    parser.add_argument("--records", type=int, help="use the first N records only")
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--peer-length", type=int, default=1024, help="the peer's pack length")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--limit", type=int, help="send the first N prompts only")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work-dir", type=Path, help="keep drafters and logs here (default: removed)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.work_dir is not None:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        print(json.dumps(compare(args, args.work_dir)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(args, Path(folder))))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Train both, serve both."""
    store: Any = open_shards(args.shards)
    if args.records is not None:
        store = FirstRecords(store, args.records)
    target = load_target(args.model)
    values = read_yaml(args.config) if args.config else {}
    config = TrainConfig(**values | {"epochs": args.passes, "draft_vocab_size": args.draft_vocab_size})

    started = time.perf_counter()
    result = run(config, args.shards, out=folder / "run", target_path=args.model, store=store)
    seconds = time.perf_counter() - started
    peer_seconds, peer_tokens = train_peer(args, folder, config, store, target)

    measured = {
        name: serve(args, drafter, folder / f"{name}-logs")
        for name, drafter in (("ours", result.drafter), ("peer", folder / "peer"))
    }
    out: dict[str, object] = {
        "passes": args.passes,
        "num_speculative_tokens": args.num_speculative_tokens,
        "train_tokens": result.state.tokens,
        "peer_train_tokens": peer_tokens,
        "train_s": seconds,
        "peer_train_s": peer_seconds,
    }
    categories: dict[str, dict[str, float | None]] = {}
    for name, prefix in (("ours", ""), ("peer", "peer_")):
        drafts = measured[name].drafts or evaluate.DraftCounts()
        out[prefix + "acceptance_length"] = drafts.acceptance_length
        out[prefix + "acceptance_per_position"] = drafts.acceptance_per_position
        for category, counts in measured[name].categories.items():
            categories.setdefault(category, {})[prefix + "acceptance_length"] = counts.acceptance_length
    return {**out, "categories": categories}


class FirstRecords:
    """The first records of a store."""

    def __init__(self, store: Any, count: int) -> None:
        self._store, self._count = store, min(count, len(store))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._store[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def train_peer(
    args: argparse.Namespace, folder: Path, config: TrainConfig, store: Any, target: Target
) -> tuple[float, int]:
    """Train the peer's drafter into ``folder/peer``; returns ``(seconds, tokens)``."""
    training, _ = data.split(store, config.held_out)
    survey = data.survey(store, training, vocab_size=target.vocab_size, max_length=args.peer_length)
    ids = vocab.choose_draft_ids(survey.counts, args.draft_vocab_size, build.end_tokens(target))
    dataset = data.Dataset(store, survey)
    packs = []
    batches = data.epoch_batches(survey.stretches, batch_tokens=args.peer_length, seed=config.seed, epoch=0)
    for n, batch in enumerate(batches):
        packs.append(str(folder / f"pack-{n}.safetensors"))
        save_file(peer_pack(dataset, batch, args.peer_length), packs[-1])
    d2t, t2d = vocab.mappings(ids, target.vocab_size)
    save_file({"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}, folder / "maps.safetensors")
    order = [
        packs[i]
        for epoch in range(args.passes)
        for i in np.random.default_rng([config.seed, epoch]).permutation(len(packs))
    ]
    spec = {
        "packs": order, "maps": str(folder / "maps.safetensors"), "target": str(args.model),
        "aux_layer_ids": list(store.header.aux_layer_ids), "ttt_steps": PEER_TTT_STEPS, "decay": 1.0,
        "lr": 1e-3, "adamw_lr": 1e-3, "threads": args.threads, "save": str(folder / "peer"),
        "out": str(folder / "peer.json"),
    }  # fmt: skip
    (folder / "peer_spec.json").write_text(json.dumps(spec))
    started = time.perf_counter()
    worker = Path(__file__).with_name("_speculators_worker.py")
    subprocess.run(
        [str(args.peer_python), str(worker), str(folder / "peer_spec.json")], check=True, stdout=sys.stderr,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    seconds = time.perf_counter() - started
    for path in packs:
        Path(path).unlink()
    return seconds, sum(json.loads((folder / "peer.json").read_text())["rows"])


def serve(args: argparse.Namespace, drafter: Path, logs: Path) -> evaluate.Measurement:
    """Measure a drafter in a server of its own."""
    logs.mkdir(exist_ok=True)
    prompts = evaluate.load_prompts(args.prompts, limit=args.limit)
    options = replay.ReplayOptions(concurrency=args.concurrency, max_tokens=args.max_tokens, temperature=0.0)
    with serving.stop_on_signal():
        return evaluate_drafter(
            drafter, str(args.model), prompts, num_speculative_tokens=args.num_speculative_tokens,
            options=options, arguments=serving.default_arguments(), log_dir=logs, baseline=False,
        ).drafter  # fmt: skip


if __name__ == "__main__":
    main()
