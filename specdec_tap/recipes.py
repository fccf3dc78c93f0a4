"""Recipes: one YAML file for capture, training and serving of one target, and the commands it stands for.

Sections: ``target`` (folder or hub name), ``model`` (its config, for the plan), ``serve`` (arguments of
``vllm serve``), ``tap`` (settings of the capture), ``train`` (settings of training), ``draft`` (how the
drafter is served), ``expect`` (traffic, for the plan).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, InputError

SECTIONS = ("target", "model", "serve", "tap", "train", "draft", "expect")
STEPS = ("serve", "train", "draft")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as read; sections that a file lacks are empty."""

    path: Path
    target: str
    serve: Mapping[str, Any] = field(default_factory=dict)
    tap: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        InputError: The file cannot be read.
        ConfigError: A section is unknown or of the wrong kind; lists all of them.
    """
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as err:
        raise InputError(f"cannot read the recipe {str(path)!r}: {err.strerror or err}") from err
    except yaml.YAMLError as err:
        raise InputError(f"{str(path)!r} is not valid YAML: {err}") from err
    if not isinstance(loaded, dict):
        raise InputError(f"{str(path)!r} is not a recipe; expected sections {', '.join(SECTIONS)}")
    problems = []
    for key, value in loaded.items():
        if key not in SECTIONS:
            near = difflib.get_close_matches(str(key), SECTIONS, n=1)
            problems.append(f"{key} is not a section" + (f"; did you mean {near[0]}?" if near else ""))
        elif key != "target" and not isinstance(value, dict):
            problems.append(f"{key} is {value!r}; expected a mapping")
    if not isinstance(loaded.get("target"), str):
        problems.append(f"target is {loaded.get('target')!r}; expected a folder or a hub name")
    if problems:
        raise ConfigError("; ".join(problems) + f" ({path})")
    return Recipe(path=path, **loaded)


def serve_command(recipe: Recipe, *, model: str | None, shards: Path, extra: list[str]) -> list[str]:
    """``vllm serve`` with the tap, as an argument list."""
    tap = {"dir": str(shards), **recipe.tap}
    return [
        *_vllm(recipe, model), "--additional-config", json.dumps({"specdec_tap": tap}), *extra,
    ]  # fmt: skip


def draft_command(recipe: Recipe, *, model: str | None, drafter: Path, extra: list[str]) -> list[str]:
    """``vllm serve`` with the trained drafter."""
    from specdec_trainer.algorithms import ALGORITHMS

    kind = ALGORITHMS[str(recipe.train.get("algorithm", "eagle3"))]
    speculative = {"method": kind.method, "model": str(drafter), **kind.serving, **recipe.draft}
    return [*_vllm(recipe, model), "--speculative-config", json.dumps(speculative), *extra]


def train_command(
    recipe: Recipe, *, shards: Path, out: Path, nproc: int, nnodes: int = 1, rendezvous: str | None = None,
    extra: list[str],
) -> list[str]:  # fmt: skip
    """``specdec-tap train``, under ``torchrun`` when there are several processes."""
    if nnodes > 1 and rendezvous is None:
        raise ConfigError("--nnodes is above 1 but --rendezvous is not set; name the first node, HOST:29500")
    flags = []
    for name, value in recipe.train.items():
        flags += [f"--{name.replace('_', '-')}", _text(value)]
    where = [str(shards), "--out", str(out), "--target-name", recipe.target, *flags, *extra]
    if nproc == 1 and nnodes == 1:
        return ["specdec-tap", "train", *where]
    launch = ["torchrun", f"--nproc-per-node={nproc}"]
    if nnodes > 1:
        launch += [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"]
    else:
        launch.append("--standalone")
    return [*launch, "-m", "specdec_trainer", *where]


def _vllm(recipe: Recipe, model: str | None) -> list[str]:
    out = ["vllm", "serve", model or recipe.target]
    for name, value in recipe.serve.items():
        if value is True:
            out.append(f"--{name}")
        elif value is False:
            out.append(f"--no-{name}")
        else:
            out += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return out


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
