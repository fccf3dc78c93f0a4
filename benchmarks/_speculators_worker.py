"""Runs inside the venv of speculators 0.9: trains its Eagle3DraftModel on packs that trainer.py wrote.

Its trainer's step is repeated here (autocast, backward, clip to 1.0, its own optimizers); what is left out
are its data loader and logging, so the comparison is kinder to it than its command line. Usage:
python _speculators_worker.py SPEC.json, where SPEC names the packs, the target, the settings and the output.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers
from transformers import AutoConfig


def main(spec: dict) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(spec["threads"])
    maps = load_file(spec["maps"])
    config = AutoConfig.from_pretrained(spec["target"])
    config.num_hidden_layers = 1
    config.num_key_value_heads = spec.get("num_kv_heads", config.num_key_value_heads)
    model = Eagle3DraftModel.from_training_args(
        config, t2d=maps["t2d"], d2t=maps["d2t"], verifier_name_or_path=spec["target"],
        draft_vocab_size=len(maps["d2t"]), norm_before_residual=True, norm_before_fc=True, norm_output=True,
        ttt_steps=spec["ttt_steps"], target_layer_ids=spec["aux_layer_ids"], draft_attn_impl="sdpa",
    )  # fmt: skip
    # The captured last states are already normed.
    model.verifier_norm = torch.nn.Identity()
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager",
        ttt_steps=spec["ttt_steps"],
        ttt_step_loss_decay=spec["decay"],
    )
    optimizers = build_optimizers(model, SimpleNamespace(
        optimizer="muon", lr=spec["adamw_lr"], weight_decay=0.01, muon_lr=spec["lr"], muon_momentum=0.95,
        muon_weight_decay=0.1, muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw",
    ))  # fmt: skip
    bases = [[g["lr"] for g in o.param_groups] for o in optimizers]
    model.train()
    base_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, rows = [], []
    for i, path in enumerate(spec["packs"]):
        pack = load_file(path)
        started = time.perf_counter()
        factor = 1.0 - i / len(spec["packs"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = model(**{k: v[None] for k, v in pack.items()}, **call)
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, lrs in zip(optimizers, bases, strict=True):
            for g, lr in zip(o.param_groups, lrs, strict=True):
                g["lr"] = lr * factor
            o.step()
        seconds.append(time.perf_counter() - started)
        rows.append(int((pack["document_ids"] >= 0).sum()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = {"seconds": seconds, "rows": rows, "peak_bytes": peak * 1024, "base_bytes": base_rss * 1024}
    model.save_pretrained(spec["save"])
    Path(spec["out"]).write_text(json.dumps(out))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
