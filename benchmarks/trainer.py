"""Trains the same drafter on the same sequences with speculators 0.9 and with this trainer, in turn, in one
run.

Prints one JSON line for each sequence length: ``tokens_per_s_ratio``, ``peak_memory_ratio``, ``accuracy`` and
``peer_accuracy`` (held-out, first draft token, after the same tokens). Same shape, norms, draft vocabulary,
TTT steps, optimizers, sequences and order, in several passes; each with its own default learning rates,
falling linearly, and its own start. Three things of this trainer are on as they are by default: a drafter
starts by copying (``start_s`` seconds before the first step, in no rate; ``--init random`` goes without), the
teacher's answers are kept from the first pass, and most chains whose token was wrong are not unrolled further
(``--broken-keep 1`` unrolls all); ``first_pass_tokens_per_s_ratio`` is without the teacher's answers kept.

The peer runs in a venv of its own::

    python3.11 -m venv peer && peer/bin/pip install speculators==0.9.0
    peer/bin/pip uninstall -y torchvision torchaudio torchcodec
    python benchmarks/trainer.py SHARDS --peer-python peer/bin/python --lengths 1024 4096 16384
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from specdec_trainer import build, data, vocab
from specdec_trainer.config import TrainConfig
from specdec_trainer.evaluate import evaluate
from specdec_trainer.export import export_drafter, load_drafter
from specdec_trainer.loss import TeacherHead
from specdec_trainer.objective import Eagle3Objective
from specdec_trainer.optim import Optimizers, clip_gradients
from specdec_trainer.run import copy_into, keep_freed_memory, start_by_copying

from specdec_tap.shards import open_shards
from specdec_tap.target import load_target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path)
    parser.add_argument("--target", type=Path, help="whole checkpoint: the peer reads its config and tensors")
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens trained at each length")
    parser.add_argument("--passes", type=int, default=4, help="over tokens / passes different ones")
    parser.add_argument("--broken-keep", type=float, default=TrainConfig().broken_keep)
    parser.add_argument(
        "--init", choices=["auto", "random"], default="auto", help="of this trainer's drafter"
    )
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        ours(json.loads(args.worker.read_text()))
        return
    for length in args.lengths:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(args, length, Path(folder))), flush=True)


def compare(args: argparse.Namespace, length: int, folder: Path) -> dict[str, object]:
    """Both trainers on packs of one length."""
    store = open_shards(args.shards)
    target = load_target(args.target or store.target_dir)
    training, held = data.split(store, 0.05)
    survey = data.survey(store, training, vocab_size=target.vocab_size, max_length=length)
    ids = vocab.choose_draft_ids(survey.counts, args.draft_vocab_size, build.end_tokens(target))
    # The first batches of the first pass, then the same documents shuffled again.
    first = data.epoch_batches(survey.stretches, batch_tokens=length, seed=0, epoch=0)
    wanted, used = args.tokens // args.passes, []
    for batch in first:
        if sum(survey.stretches[i].num_rows for i in used) >= wanted:
            break
        used += batch
    chosen = [survey.stretches[i] for i in used]
    kept = []
    for epoch in range(args.passes):
        order = data.epoch_batches(chosen, batch_tokens=length, seed=1, epoch=epoch)
        kept += [[used[i] for i in batch] for batch in order]
    first_pass = len(kept) // args.passes
    dataset = data.Dataset(store, survey)
    packs = []
    for n, batch in enumerate(kept):
        packs.append(folder / f"{n}.safetensors")
        save_file(peer_pack(dataset, batch, length), packs[-1])
    d2t, t2d = vocab.mappings(ids, target.vocab_size)
    save_file({"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}, folder / "maps.safetensors")
    spec = {
        "packs": [str(p) for p in packs], "maps": str(folder / "maps.safetensors"),
        "ttt_steps": args.ttt_steps,
        "target": str(args.target or store.target_dir), "aux_layer_ids": list(store.header.aux_layer_ids),
        "num_kv_heads": drafter_of(args, target, store, ids).num_kv_heads,
        "decay": 1.0, "lr": 1e-3, "adamw_lr": 1e-3, "threads": args.threads, "shards": str(args.shards),
        "length": length, "batches": kept, "draft_vocab_size": args.draft_vocab_size,
        "broken_keep": args.broken_keep, "save": str(folder / "peer"), "out": str(folder / "peer.json"),
    }  # fmt: skip
    (folder / "peer_spec.json").write_text(json.dumps(spec))
    mine = {
        **spec, "lr": TrainConfig().lr, "adamw_lr": TrainConfig().adamw_lr, "init": args.init,
        "save": str(folder / "ours"), "out": str(folder / "ours.json"),
    }  # fmt: skip
    (folder / "ours_spec.json").write_text(json.dumps(mine))
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    worker = Path(__file__).with_name("_speculators_worker.py")
    subprocess.run([str(args.peer_python), str(worker), str(folder / "peer_spec.json")], check=True, env=env,
                   stdout=sys.stderr)  # fmt: skip
    subprocess.run([sys.executable, __file__, str(args.shards), "--peer-python", "-", "--worker",
                    str(folder / "ours_spec.json")], check=True, env=env, stdout=sys.stderr)  # fmt: skip
    peer, own = (json.loads((folder / f"{n}.json").read_text()) for n in ("peer", "ours"))
    assert own["rows"] == peer["rows"], "both must train the same packs"
    out: dict[str, object] = {
        "length": length,
        "tokens": own["tokens"],
        "tokens_per_s": rate(own),
        "peer_tokens_per_s": rate(peer),
        "tokens_per_s_ratio": rate(own) / rate(peer),
        "first_pass_tokens_per_s_ratio": (
            rate(own, first_pass) / rate(peer, first_pass) if first_pass > 1 else None
        ),
        "passes": args.passes,
        "broken_keep": args.broken_keep,
        "init": args.init,
        "start_s": own["start_s"],
        "threads": args.threads,
        "peak_memory_bytes": own["peak_bytes"],
        "peer_peak_memory_bytes": peer["peak_bytes"],
        "peak_memory_ratio": own["peak_bytes"] / peer["peak_bytes"],
    }
    held_survey = data.survey(store, held, vocab_size=target.vocab_size, max_length=length)
    for name in ("ours", "peer"):
        result = held_out(load_drafter(folder / name), target, store, held_survey)
        prefix = "" if name == "ours" else "peer_"
        out[prefix + "accuracy"] = result.accuracy[0]
        out[prefix + "accuracy_by_draft_token"] = result.accuracy
        out[prefix + "simulated_acceptance_length"] = result.simulated_acceptance_length
    return out


def drafter_of(args: argparse.Namespace, target, store, ids: np.ndarray) -> build.DraftConfig:
    """What this trainer would train on these records; the peer's drafter gets the same sizes."""
    return build.draft_config(
        TrainConfig(init=args.init), target, tuple(store.header.aux_layer_ids), len(ids)
    )


def rate(result: dict, steps: int | None = None) -> float:
    """Tokens a second of the first ``steps`` steps, without the very first one (allocation, lazy set-up)."""
    return sum(result["rows"][1:steps]) / sum(result["seconds"][1:steps])


def peer_pack(dataset: data.Dataset, indices: list[int], length: int) -> dict[str, torch.Tensor]:
    """A batch in the peer's layout: one padded row, states and tokens aligned as its ``shift_batch`` does."""
    batch = dataset.load(indices)
    rows = batch.num_rows
    size = max(length, rows)
    document = torch.full((size,), -1, dtype=torch.int64)
    document[:rows] = torch.searchsorted(batch.starts, torch.arange(rows), right=True) - 1
    hidden = torch.zeros(size, batch.aux.shape[1] * batch.aux.shape[2], dtype=batch.aux.dtype)
    hidden[:rows] = batch.aux.flatten(1)
    last = torch.zeros(size, batch.final.shape[1], dtype=batch.final.dtype)
    last[batch.rows[batch.taught]] = batch.final
    tokens, positions = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    tokens[:rows], positions[:rows] = batch.tokens, batch.positions + 1
    mask = torch.zeros(size, dtype=torch.bool)
    mask[batch.rows] = True
    return {
        "hidden_states": hidden, "input_ids": tokens, "document_ids": document, "loss_mask": mask,
        "position_ids": positions, "verifier_last_hidden_states": last,
    }  # fmt: skip


def ours(spec: dict) -> None:
    """The same steps with this trainer."""
    keep_freed_memory()
    torch.set_num_threads(spec["threads"])
    store = open_shards(Path(spec["shards"]))
    target = load_target(Path(spec["target"]))
    training, _ = data.split(store, 0.05)
    survey = data.survey(store, training, vocab_size=target.vocab_size, max_length=spec["length"])
    config = TrainConfig(
        ttt_steps=spec["ttt_steps"], ttt_decay=spec["decay"], broken_keep=spec["broken_keep"], lr=spec["lr"],
        adamw_lr=spec["adamw_lr"], draft_vocab_size=spec["draft_vocab_size"], norm_before_residual=True,
        norm_before_fc=True, norm_output=True, optimizer="muon", loss_vocab_size=spec["draft_vocab_size"],
        num_kv_heads=spec["num_kv_heads"], init=spec["init"],
    )  # fmt: skip
    ids = build.draft_vocabulary(config, target, survey.counts)
    draft = build.draft_config(config, target, tuple(spec["aux_layer_ids"]), len(ids))
    objective = build.build(config, draft, target, ids, torch.device("cpu"))
    optimizers = Optimizers(
        objective.model, name="muon", lr=config.lr, adamw_lr=config.adamw_lr, weight_decay=0.1,
        adamw_weight_decay=0.01, momentum=0.95, ns_steps=5,
    )  # fmt: skip
    dataset = data.Dataset(store, survey, cache_bytes=config.teacher_cache)
    started = time.perf_counter()
    if start_by_copying(config, objective.model):
        seen = [survey.stretches[i] for i in sorted({i for batch in spec["batches"] for i in batch})]
        sample = data.Dataset(store, dataclasses.replace(survey, stretches=seen))
        counts = torch.from_numpy(survey.counts[ids])
        print(copy_into(objective, sample, counts, seed=0), file=sys.stderr)
    start_s = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objective.model.train()
    seconds, rows = [], []
    for i, indices in enumerate(spec["batches"]):
        batch = dataset.load(indices)
        started = time.perf_counter()
        sums = objective.loss(batch, generator)
        (sums.total / batch.weight.sum()).backward()
        clip_gradients(optimizers.parameters, 1.0)
        optimizers.step(1.0 - i / len(spec["batches"]))
        optimizers.zero_grad()
        seconds.append(time.perf_counter() - started)
        dataset.remember(batch)
        rows.append(batch.num_rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = {
        "seconds": seconds,
        "rows": rows,
        "tokens": sum(rows),
        "peak_bytes": peak * 1024,
        "base_bytes": base * 1024,
        "start_s": start_s,
    }
    export_drafter(objective.model, Path(spec["save"]), target=target)
    Path(spec["out"]).write_text(json.dumps(out))


def held_out(model, target, store, survey):
    """Held-out numbers of a drafter folder, whoever trained it."""
    model.embed_weight = target.embed.torch()[: target.vocab_size]
    ids = torch.from_numpy(np.asarray(torch.arange(len(model.d2t)) + model.d2t))
    teacher = TeacherHead(target.head.torch()[: target.vocab_size].bfloat16(), ids)
    dataset = data.Dataset(store, survey)
    batches = data.epoch_batches(survey.stretches, batch_tokens=2048, seed=0, epoch=0, shuffle=False)
    return evaluate(
        Eagle3Objective(model, teacher, steps=4), (dataset.load(b) for b in batches), steps=4, draft_tokens=3
    )


if __name__ == "__main__":
    main()
