"""Checks before a first capture: versions, the model, the disk, and how much data to expect.

Importing this module loads neither torch nor vLLM. What only vLLM knows is asked in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import plan
from .config import TapConfig, left_out_by_vllm
from .errors import ConfigError, InputError
from .serving import is_cpu_build, vllm_version
from .shards import huffman
from .vllm_plugin.support import version_problem, version_warning

Status = Literal["ok", "warn", "fail"]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Measured on SmolLM2's bf16 states with the lossless codec; docs/design.md says where the bits go.
LOSSLESS_RATIO = 1.5
PROBE_TIMEOUT_S = 300.0
# A torchvision that does not match torch's +cpu build breaks the import of transformers' models.
UNMATCHED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it is, and what that means."""

    name: str
    status: Status
    detail: str


@dataclass(kw_only=True)
class Report:
    """All findings, and the numbers behind the size estimate."""

    checks: list[Check] = field(default_factory=list)
    model: dict[str, Any] | None = None
    sizes: dict[str, Any] | None = None
    training: dict[str, Any] | None = None

    def add(self, name: str, status: Status, detail: str) -> None:
        self.checks.append(Check(name, status, detail))

    @property
    def failed(self) -> bool:
        return any(check.status == "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.failed,
            "checks": [{"name": c.name, "status": c.status, "detail": c.detail} for c in self.checks],
            "model": self.model,
            "sizes": self.sizes,
            "training": self.training,
        }


def check_versions(report: Report) -> bool:
    """Look at Python, vLLM, torch and the plugin's registration; return whether vLLM can be asked."""
    report.add("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    version = vllm_version()
    if version is None:
        report.add("vllm", "fail", "not installed here; install it with 'pip install \"specdec-tap[vllm]\"'")
    elif problem := version_problem(version):
        report.add("vllm", "fail", problem)
    elif warning := version_warning(version):
        report.add("vllm", "warn", warning)
    else:
        report.add("vllm", "ok", version)
    torch = _version("torch")
    if torch is None:
        report.add(
            "torch", "fail", "not installed here; install it with 'pip install \"specdec-tap[train]\"'"
        )
    else:
        report.add("torch", "ok", torch)
    if is_cpu_build() and (extra := [name for name in UNMATCHED if _version(name)]):
        names = " ".join(extra)
        report.add("extras", "warn", f"{names} may not match torch {torch}: run 'pip uninstall {names}'")
    if huffman.native:
        report.add("codec", "ok", "shards are encoded and decoded by compiled code")
    else:
        detail = "the shard codec is not compiled and several times slower; reinstall where gcc or clang is"
        report.add("codec", "warn", detail)
    _check_plugin(report)
    return version is not None and version_problem(version) is None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_plugin(report: Report) -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.name == "specdec_tap" for point in points):
        report.add("plugin", "fail", "not registered with vLLM; install specdec-tap into vLLM's environment")
        return
    if problem := left_out_by_vllm(os.environ):
        report.add("plugin", "fail", problem)
        return
    report.add("plugin", "ok", "registered with vLLM as specdec_tap")


def check_settings(report: Report, env: Mapping[str, str]) -> TapConfig | None:
    """Read the capture settings as a server started from here would; return them if capture is on."""
    try:
        config, _ = TapConfig.load(env)
    except ConfigError as err:
        report.add("settings", "fail", str(err))
        return None
    if config is None:
        report.add("settings", "ok", "capture is off; SPECDEC_TAP_DIR=shards turns it on")
    else:
        report.add("settings", "ok", f"capture is on, to {config.dir}")
    return config


def probe_model(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Ask vLLM about a model in a process of its own; see ``vllm_plugin/probe.py`` for the keys.

    Args:
        model: Folder, hub name, a config.json, or a recipe.
        trust_remote_code: Let the model's own configuration code run.

    Returns:
        The answer; ``{"error": ...}`` if there is none.
    """
    if Path(model).is_file():
        with tempfile.TemporaryDirectory(prefix="specdec-tap-doctor-") as folder:
            config = dict(plan.read_config(Path(model)).config)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            return probe_model(folder, trust_remote_code=trust_remote_code)
    env = os.environ | {"SPECDEC_TAP": "off", "VLLM_LOGGING_LEVEL": "ERROR"}
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="specdec-tap-doctor-") as folder:
        out = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "specdec_tap.vllm_plugin.probe", model, str(out)]
        if trust_remote_code:
            command.append("--trust-remote-code")
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"vLLM did not answer within {PROBE_TIMEOUT_S:.0f} s"}
        if out.is_file():
            return json.loads(out.read_text())
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"error": f"vLLM cannot be asked: {last}"}


def check_model(report: Report, model: str, answer: dict[str, Any]) -> None:
    """Turn the probe's answer into findings."""
    if "architecture" not in answer:
        report.add("model", "fail", f"{model}: {answer['error']}")
        return
    report.model = answer | {"name": model}
    if "error" in answer:
        report.add(
            "device", "warn", f"vLLM cannot run it here ({answer['error']}); looked at its config only"
        )
    else:
        report.add("runner", "ok", f"model runner {answer['runner'].upper()} on {answer['device']}")
    if answer["why_not"]:
        report.add("model", "fail", answer["why_not"])
        return
    report.add(
        "model",
        "ok",
        f"{answer['architecture']} has the EAGLE-3 interface; {answer['num_hidden_layers']} layers, "
        f"hidden size {answer['hidden_size']:,}, {answer['dtype']}",
    )
    ids = answer["aux_layer_ids"]
    if ids is None:
        report.add("aux layers", "ok", f"{answer['model_class']} chooses its own by default")
    elif len(ids) < 3 or ids[0] < 1:
        report.add(
            "aux layers",
            "warn",
            f"the default (2, N//2, N-3) is {ids} for N = {answer['num_hidden_layers']}, fewer than the "
            "three that drafters expect; set aux_layer_ids",
        )
    else:
        report.add("aux layers", "ok", f"{ids} by default (2, N//2, N-3)")
    _add_algorithms(report)


def _add_algorithms(report: Report) -> None:
    from specdec_trainer.algorithms import ALGORITHMS

    whole = [n for n, kind in ALGORITHMS.items() if kind.reads == "final" and kind.needs_context]
    need = "needs" if len(whole) == 1 else "need"
    report.add("algorithms", "ok", f"{', '.join(ALGORITHMS)} ({', '.join(whole)} {need} final_hidden: all)")


def target_config(model: str) -> plan.ConfigOnly | None:
    """The config of a model that is on this machine; None for a hub name that is not in the cache."""
    path = Path(model)
    if not path.exists():
        try:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json", local_files_only=True))
        except Exception:  # whatever the hub library raises means: not in its cache
            return None
    return plan.read_config(path)


def check_drafter_layer(report: Report, target: plan.ConfigOnly) -> None:
    """Say which drafter layer fits, and why."""
    layer, reason = plan.recommended_layer(target)
    report.add("drafter", "ok", f"layer {layer}: {reason}")


def add_training_plan(report: Report, target: plan.ConfigOnly, settings: Mapping[str, Any]) -> None:
    """Compute the memory of a training run; a drafter that cannot be made is a failed check."""
    layer, _ = plan.recommended_layer(target)
    try:
        numbers = plan.plan_training(target, plan.check_settings({"layer": layer, **settings}))
    except (ConfigError, InputError) as err:
        report.add("trainer", "fail", str(err))
        return
    report.training = numbers.to_json()
    gb = {name: value / 1e9 for name, value in report.training.items() if isinstance(value, int)}
    report.add(
        "trainer",
        "ok",
        f"{numbers.algorithm}, layer {numbers.layer}: {numbers.trainable_parameters / 1e6:,.0f} M of "
        f"{numbers.parameters / 1e6:,.0f} M parameters trained; {gb['total']:,.1f} GB a process (weights "
        f"{gb['weights']:,.1f}, gradients {gb['gradients']:,.1f}, optimizer {gb['optimizer']:,.1f}, tables "
        f"{gb['tables']:,.1f}, casts {gb['casts']:,.1f}, activations of {numbers.batch_tokens:,} rows x "
        f"{numbers.ttt_steps} steps {gb['activations']:,.1f})",
    )


def estimate_sizes(
    report: Report, *, tokens_per_s: float, response_share: float, config: TapConfig | None
) -> None:
    """Estimate bytes per token and GB per hour for the probed model.

    Every row holds the aux layers; the final state is stored for response tokens unless ``final_hidden`` says
    otherwise.

    Args:
        report: Receives the finding; needs ``report.model``.
        tokens_per_s: Prompt and response tokens that the server computes per second.
        response_share: Share of them that are response tokens, 0 to 1.
        config: Settings, if capture is on.
    """
    model = report.model
    if model is None or model["why_not"]:
        return
    ids = config.aux_layer_ids if config is not None and config.aux_layer_ids else model["aux_layer_ids"]
    num_aux = 3 if ids is None else len(ids)
    scope = config.final_hidden if config is not None else "response"
    share = {"all": 1.0, "none": 0.0, "response": response_share}[scope]
    state_bytes = model["hidden_size"] * DTYPE_BYTES.get(model["dtype"], 2)
    raw_all = (num_aux + 1) * state_bytes
    raw = (num_aux + share) * state_bytes
    stored = raw / LOSSLESS_RATIO if model["dtype"] == "bfloat16" else raw
    report.sizes = {
        "num_aux_layers": num_aux,
        "raw_bytes_per_token": raw_all,
        "raw_bytes_per_token_kept": raw,
        "stored_bytes_per_token": stored,
        "tokens_per_s": tokens_per_s,
        "response_share": response_share,
        "gb_per_hour": stored * tokens_per_s * 3600 / 1e9,
    }
    report.add(
        "size",
        "ok",
        f"about {stored:,.0f} bytes/token stored (raw bf16 of {num_aux} aux + final: {raw_all:,}); at "
        f"{tokens_per_s:,.0f} tokens/s {report.sizes['gb_per_hour']:,.1f} GB/hour"
        " before prefixes are deduplicated",
    )


def check_directory(report: Report, folder: Path, config: TapConfig | None) -> None:
    """Prove that a file can be written in ``folder`` (or where it would be made); look at the space."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    where = str(folder) if existing == folder.absolute() else f"{folder} (to be made in {existing})"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as err:
        report.add("directory", "fail", f"{where} cannot be written: {err.strerror or err}; choose another")
        return
    report.add("directory", "ok", f"{where} can be written")
    keep_free = config.min_free_bytes if config is not None else TapConfig(dir=folder).min_free_bytes
    usable = free - keep_free
    if usable <= 0:
        report.add(
            "disk",
            "fail",
            f"{free / 1e9:,.1f} GB free, and capture stops below min_free_bytes ({keep_free / 1e9:,.1f} GB); "
            "free some space, or choose another --dir",
        )
        return
    if not report.sizes or not report.sizes["gb_per_hour"]:
        report.add("disk", "ok", f"{free / 1e9:,.1f} GB free")
        return
    hours = usable / 1e9 / report.sizes["gb_per_hour"]
    report.sizes["hours_until_full"] = hours
    status: Status = "ok" if hours >= 1 else "warn"
    report.add("disk", status, f"{free / 1e9:,.1f} GB free: room for about {hours:,.1f} hours")


def diagnose(
    model: str | None,
    folder: Path | None,
    *,
    env: Mapping[str, str],
    tokens_per_s: float = 1000.0,
    response_share: float = 0.6,
    trust_remote_code: bool = False,
    training: Mapping[str, Any] | None = None,
) -> Report:
    """Run every check that applies and return the report.

    Args:
        model: Folder or hub name; None skips what depends on a model.
        folder: Shard folder to look at; None takes the one that the settings name, if any.
        env: Usually ``os.environ``.
        tokens_per_s: For the size estimate, tokens per second.
        response_share: For the size estimate, 0 to 1.
        trust_remote_code: Let the model's own configuration code run, as ``vllm serve`` would.
        training: Settings of training to plan memory for; None plans none.
    """
    report = Report()
    usable = check_versions(report)
    config = check_settings(report, env)
    if model is not None and usable:
        check_model(report, model, probe_model(model, trust_remote_code=trust_remote_code))
        estimate_sizes(report, tokens_per_s=tokens_per_s, response_share=response_share, config=config)
    can_be_tapped = report.model is not None and not report.model["why_not"]
    target = target_config(model) if model is not None and (can_be_tapped or training is not None) else None
    if target is not None and can_be_tapped:
        check_drafter_layer(report, target)
    if training is not None:
        if target is None:
            report.add("trainer", "fail", f"{model} is not on this machine; name its folder or config.json")
        else:
            add_training_plan(report, target, training)
    if folder is None and config is not None:
        folder = config.dir
    if folder is not None:
        check_directory(report, folder, config)
    return report
