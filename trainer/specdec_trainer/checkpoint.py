"""Checkpoints without pickle: one safetensors file for everything, written beside and renamed.

A checkpoint holds weights, optimizer state, the weight average, the generator and the loop's counters. A
killed process leaves either the old files or the old files and one more; a torn temporary file is never
looked at.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec_tap.errors import InputError

from .distributed import like, whole, whole_state
from .optim import Optimizers, WeightAverage

_NAME = re.compile(r"step-(\d{9})\.safetensors")
_FORMAT = 1


@dataclass(slots=True)
class LoopState:
    """Where a run is; saved whole."""

    epoch: int = 0
    """Pass under way, from 0."""
    batch: int = 0
    """Next batch of this pass."""
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Rows trained on, over all processes."""
    elapsed: float = 0.0
    """Seconds of training, over all sessions."""
    best: float = 0.0
    """Best simulated acceptance length on the held-out records."""
    best_step: int = 0
    evaluated_step: int = -1
    """Step of the last evaluation."""
    stale: int = 0
    """Evaluations since the best one."""
    processes: int = 1
    """How many trained this pass so far; ``batch`` counts those of one of them."""
    known: dict[str, list[int]] = field(default_factory=dict)
    """With --follow: shard and ordinal of the last record used, by stream."""


def regroup(state: LoopState, processes: int) -> bool:
    """Go on with another number of processes, at the same place of the pass; returns whether it is
    another one. Up to one batch a process is left out of this pass."""
    if state.processes == processes:
        return False
    state.batch = -(-state.batch * state.processes // processes)
    state.processes = processes
    return True


def save(
    path: Path, model: nn.Module, optimizers: Optimizers, average: WeightAverage | None,
    generator: torch.Generator, state: LoopState, facts: dict[str, Any], *, write: bool = True,
) -> None:  # fmt: skip
    """Write one checkpoint atomically. Every process that holds a share of the weights must call this.

    Args:
        path: Final name.
        model: Its trainable parameters and buffers that persist are kept.
        optimizers: Their state.
        average: Or None.
        generator: Of the data noise.
        state: Of the loop.
        facts: JSON-able settings that a resumed run must share.
        write: This is the process that writes the file.
    """
    tensors = {f"model.{n}": t for n, t in whole_state(model).items()}
    outline = []
    for i, part in enumerate(optimizers.state_dict()):
        slots = {}
        for index, values in part["state"].items():
            slots[str(index)] = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{i}.{index}.{name}"] = whole(value)
                else:
                    slots[str(index)][name] = value
        outline.append({"state": slots, "param_groups": part["param_groups"]})
    if average is not None:
        tensors |= {f"average.{i}": whole(t) for i, t in enumerate(average.shadow)}
    if not write:
        return
    tensors["generator"] = generator.get_state()
    tensors["global_generator"] = torch.get_rng_state()  # drop-out draws from this one
    meta = {
        "format": _FORMAT,
        "state": asdict(state),
        "optimizers": outline,
        "average_updates": None if average is None else average.updates,
        "facts": facts,
    }
    # safetensors refuses tensors that share memory or are not contiguous.
    tensors = {n: t.detach().contiguous().clone() for n, t in tensors.items()}
    part_path = path.with_name(f".{path.name}.part")
    save_file(tensors, part_path, metadata={"specdec_tap_checkpoint": json.dumps(meta)})
    part_path.chmod(0o600)
    with part_path.open("rb") as file:
        os.fsync(file.fileno())
    part_path.rename(path)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(
    path: Path, model: nn.Module, optimizers: Optimizers | None, average: WeightAverage | None,
    generator: torch.Generator | None, facts: dict[str, Any] | None,
) -> LoopState:  # fmt: skip
    """Restore everything that ``save`` kept.

    Raises:
        InputError: Not a checkpoint, damaged, or of another run.
    """
    tensors, meta = read(path)
    if facts is not None:
        wrong = [k for k, v in facts.items() if meta["facts"].get(k) != v]
        if wrong:
            k = wrong[0]
            raise InputError(
                f"{str(path)!r} was written with {k} {meta['facts'].get(k)!r}, now it is "
                f"{facts[k]!r}; resume with "
                "the same settings and shards, or start a new run"
            )
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    mine = model.state_dict()
    weights = {n: like(t, mine[n]) if n in mine else t for n, t in weights.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as err:
        raise InputError(f"{str(path)!r} does not fit this drafter: {err}") from err
    if optimizers is not None:
        states = []
        parameters = [[p for g in part.param_groups for p in g["params"]] for part in optimizers.parts]
        for i, part in enumerate(meta["optimizers"]):
            values: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in part["state"].items()}
            prefix = f"optimizer.{i}."
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    index, _, slot = name.removeprefix(prefix).partition(".")
                    values.setdefault(int(index), {})[slot] = like(tensor, parameters[i][int(index)])
            states.append({"state": values, "param_groups": part["param_groups"]})
        optimizers.load_state_dict(states)
    if average is not None and meta["average_updates"] is not None:
        shadow = [tensors[f"average.{i}"] for i in range(len(average.shadow))]
        average.load_state_dict({"updates": meta["average_updates"], "shadow": shadow})
    if generator is not None:
        generator.set_state(tensors["generator"])
        torch.set_rng_state(tensors["global_generator"])
    return LoopState(**meta["state"])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a checkpoint."""
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get("specdec_tap_checkpoint", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (OSError, ValueError, SafetensorError) as err:
        raise InputError(f"cannot read checkpoint {str(path)!r}: {err}") from err
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise InputError(f"{str(path)!r} is not a checkpoint of this version (format {_FORMAT})")
    return tensors, meta


def name_for(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def newest(folder: Path) -> list[Path]:
    """Checkpoints of a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints and torn temporary files."""
    for path in newest(folder)[keep:]:
        path.unlink(missing_ok=True)
    for path in folder.glob(".step-*.part"):
        path.unlink(missing_ok=True)
