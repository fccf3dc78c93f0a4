"""Decides whether a vLLM engine can be tapped, and makes the tap when its model is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..config import ADDITIONAL_CONFIG_KEY, TapConfig, prepare_directory
from ..errors import ConfigError, InputError, SpecdecTapError, UnsupportedVllmError
from ..shards.layout import ShardHeader, TargetInfo
from ..target import Fingerprint, file_sha256, fingerprint, load_target, save_target
from .support import version_problem, version_warning
from .tap import Limits, Tap

logger = logging.getLogger("vllm.specdec_tap")


@dataclass(slots=True)
class Plan:
    """What was decided before the model was loaded."""

    config: TapConfig
    runner: str
    """``v1`` or ``v2``: the model runner that is really in use."""
    own_flag: bool = False
    """Whether a drafter of the server itself asked for aux states."""
    attached: bool = False
    """The model gives aux states for the tap, on every rank."""
    tap: Tap | None = None
    """On the one rank that captures."""
    state: Any = None
    """The forward's outputs, between entering ``sample_tokens`` and sampling."""
    tap_slots: tuple[int, ...] = ()
    """Which of the model's aux outputs the tap keeps."""
    own_slots: tuple[int, ...] | None = None
    """Which of them the server's own drafter expects; None when it expects none."""
    num_reloads: int = 0
    has_failed: bool = False
    """Said once, on a rank that does not capture."""

    def hook_failed(self, where: str, err: Exception) -> None:
        """Count an exception of the code around vLLM and drop what it may have spoilt; never raises."""
        if self.tap is not None:
            self.tap.hook_failed(where, err)
        elif not self.has_failed:
            self.has_failed = True
            logger.error(
                "capture failed in %s on a rank that does not write; serving continues", where, exc_info=err
            )

    def weights_changed(self, path: str | None) -> None:
        """The engine's weights were replaced: begin a stream under a revision of its own."""
        assert self.tap is not None, "only the capturing rank is told"
        self.num_reloads += 1
        try:
            revision = f"{Path(path).name}+" if path else ""
            self.tap.on_weights_changed(f"{revision}reload{self.num_reloads}")
        except Exception as err:  # capture must not mix weights, and serving must go on, whatever failed
            self.tap.active = False
            logger.error("capture is off for this process: %s; serving continues", err)


def make_plan(vllm_config: Any, runner: str) -> Plan | None:
    """Read the settings and refuse what cannot be tapped, before any weight is loaded.

    Raises:
        ConfigError: Wrong settings.
        UnsupportedVllmError: This engine cannot be tapped and ``strict`` is on.
    """
    additional = vllm_config.additional_config
    additional = additional if isinstance(additional, dict) else {}
    config, _ = TapConfig.load(additional_config=additional)
    if config is None:
        return None
    prepare_directory(config.dir)
    reason = why_not(vllm_config, runner)
    if reason is not None:
        return refuse(config, reason)
    model_config = vllm_config.model_config
    if config.aux_layer_ids:
        check_layers(config.aux_layer_ids, model_config.hf_text_config.num_hidden_layers, "aux_layer_ids")
    checkpoint, known = checkpoint_dir(model_config), config.dir / "target"
    if checkpoint is not None and known.is_dir():  # make_tap looks again: it may be downloaded only now
        check_same_target(known, describe_target(model_config, checkpoint))
    return Plan(config, runner)


def refuse(config: TapConfig, reason: str) -> None:
    """Stop the start-up (strict) or say once that this server does not capture."""
    if config.strict:
        raise UnsupportedVllmError(
            f"{reason}; serve without capture by unsetting SPECDEC_TAP_DIR, or set strict to false to be "
            "told and served anyway"
        )
    logger.error("capture is off for this server: %s; serving continues", reason)


def why_not(vllm_config: Any, runner: str) -> str | None:
    """Return why this engine cannot be tapped, or None."""
    import vllm

    if problem := version_problem(vllm.__version__):
        return problem
    if warning := version_warning(vllm.__version__):
        logger.warning("%s", warning)
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model_config.runner_type == "pooling":
        return "the model is served for pooling (embedding, classification); only generation can be captured"
    if model_config.is_encoder_decoder:
        return "the model is an encoder-decoder; only decoder-only models can be captured"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "--kv-sharing-fast-prefill skips layers for prompt tokens; turn it off to capture"
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (getattr(parallel, name, 1) or 1) > 1:
            return f"{name} is {getattr(parallel, name)}: rows are split over ranks; set it to 1 to capture"
    if parallel.pipeline_parallel_size > 1 and runner == "v1":
        return (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size} on the V1 runner, which does not "
            "relay aux hidden states; use the V2 runner (VLLM_USE_V2_MODEL_RUNNER=1) or tensor parallelism"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "method", None) == "extract_hidden_states":
        return "--speculative-config uses extract_hidden_states, which the tap replaces; remove it"
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, name = get_model_architecture(model_config)
    if not supports_eagle3(model_class):
        return (
            f"{name} has no EAGLE-3 interface in vllm {vllm.__version__} (class {model_class.__name__} lacks "
            "set_aux_hidden_state_layers), so its aux hidden states cannot be read"
        )
    return None


def choose_layers(plan: Plan, model: Any, vllm_config: Any) -> tuple[int, ...]:
    """Ask the model for the tap's layers and those of the server's own drafter; note who gets which.

    Returns:
        The tap's aux layer ids, ascending.

    Raises:
        ConfigError: An id is outside what the model can give.
        UnsupportedVllmError: Nothing says which layers the server's drafter takes.
    """
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    asked = plan.config.aux_layer_ids
    ids = tuple(sorted(set(asked or model.get_eagle3_default_aux_hidden_state_layers())))
    check_layers(ids, num_layers, "aux_layer_ids" if asked else "the model's default aux_layer_ids")
    own = tuple(sorted(set(_current_layers(model)))) if plan.own_flag else ()
    if plan.own_flag and not own:
        raise UnsupportedVllmError(
            f"the server's drafter takes aux hidden states, and {type(model).__name__} does not say of which "
            "layers; capture without the drafter, or serve it without capture by unsetting SPECDEC_TAP_DIR"
        )
    union = tuple(sorted({*ids, *own}))
    if union != own:
        model.set_aux_hidden_state_layers(union)
    plan.tap_slots = tuple(union.index(i) for i in ids)
    plan.own_slots = tuple(union.index(i) for i in own) if plan.own_flag else None
    # The compiled graph depends on the layers and on nothing else of the tap: exactly that goes into
    # vLLM's compile-cache key (its hash covers additional_config), not the folder.
    additional = vllm_config.additional_config
    rest = dict(additional) if isinstance(additional, dict) else {}
    rest[ADDITIONAL_CONFIG_KEY] = {"aux_layer_ids": list(union)}
    vllm_config.additional_config = rest
    return ids


def check_layers(ids: tuple[int, ...], num_layers: int, origin: str) -> None:
    """Refuse ids that the model does not have.

    Raises:
        ConfigError: Names ``origin``, where they came from.
    """
    if wrong := [i for i in ids if not 1 <= i <= num_layers]:
        raise ConfigError(
            f"{origin} {list(ids)}: {wrong} outside 1 to {num_layers} (id i is the residual stream entering "
            f"layer i; {num_layers} is the stream after the last layer); set aux_layer_ids to such ids"
        )


def _current_layers(model: Any) -> tuple[int, ...]:
    """Return the aux layers that vLLM has set on the model.

    Most models inherit the attribute from vLLM's EagleModelMixin; DeepSeek's (and Kimi's) has one of its own.
    """
    for module in model.modules():
        if layers := getattr(module, "aux_hidden_state_layers", ()):
            return tuple(layers)
    return ()


def is_capture_rank() -> bool:
    """True on the one rank of a replica that writes: the states are equal on all tensor-parallel ranks."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank


def make_tap(plan: Plan, vllm_config: Any, aux_layer_ids: tuple[int, ...], device: Any) -> Tap:
    """Start the writer process for this rank and save what training needs of the target."""
    config, model_config = plan.config, vllm_config.model_config
    checkpoint = checkpoint_dir(model_config)
    header = make_header(plan, vllm_config, aux_layer_ids, checkpoint)
    check_same_target(config.dir / "target", header.target)
    check_drafter_is_for(header.target, vllm_config.speculative_config)
    scheduler = vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    cache = vllm_config.cache_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0

    def cache_tokens() -> int:
        return (cache.num_gpu_blocks or 0) * cache.block_size if cache.enable_prefix_caching else 0

    limits = Limits(
        max_rows=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + drafts)),
        max_requests=scheduler.max_num_seqs,
        max_columns=1 + drafts,
        max_model_len=model_config.max_model_len,
        cache_tokens=cache_tokens,
        cache_block_tokens=cache.block_size,
    )
    tap = Tap(config, header, limits, device)
    row_bytes = header.raw_bytes(1, 1)
    logger.info(
        "capturing aux layers %s of %s to %s (stream %s, %s runner, %s bytes/token raw)",
        list(aux_layer_ids), header.target.name, config.dir, tap.channel.header.stream, plan.runner,
        f"{row_bytes:,}",
    )  # fmt: skip
    if checkpoint is not None:
        threading.Thread(
            target=_save_target,
            args=(checkpoint, config.dir / "target"),
            name="specdec-tap-target",
            daemon=True,
        ).start()
    else:
        logger.warning(
            "no local checkpoint of %s was found, so %s is not written; name one with "
            "'specdec-tap train --target'",
            model_config.model, config.dir / "target",
        )  # fmt: skip
    return tap


def make_header(
    plan: Plan, vllm_config: Any, aux_layer_ids: tuple[int, ...], checkpoint: Path | None
) -> ShardHeader:
    """Describe this engine and its model as every shard will."""
    import vllm

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    try:
        distribution = version("vllm")
    except PackageNotFoundError:
        distribution = vllm.__version__
    scope = plan.config.final_hidden
    return ShardHeader(
        stream="starting",
        shard=0,
        created_unix_s=0.0,
        target=describe_target(model_config, checkpoint),
        aux_layer_ids=aux_layer_ids,
        final_hidden="none" if scope == "none" else "post_norm",
        final_scope=scope,
        dtype=str(model_config.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # layout checks it
        codec=plan.config.codec,
        engine={
            "vllm": distribution,
            "specdec_tap": __version__,
            "runner": plan.runner,
            "tp_size": parallel.tensor_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "dp_size": parallel.data_parallel_size,
            # For dense models vLLM sets the rank of every engine to 0; the index stays.
            "dp_rank": getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
            "enforce_eager": int(bool(model_config.enforce_eager)),
        },
    )


def describe_target(model_config: Any, checkpoint: Path | None) -> TargetInfo:
    """Describe the model, from its config and samples of its weights' files."""
    text_config = model_config.hf_text_config
    name = str(model_config.model)
    if checkpoint is not None and Path(name).exists():
        name = Path(name).resolve().name
    config_file = checkpoint / "config.json" if checkpoint is not None else None
    if config_file is not None and config_file.is_file():
        config_hash = file_sha256(config_file)
    else:
        text = json.dumps(model_config.hf_config.to_dict(), sort_keys=True, default=str)
        config_hash = hashlib.sha256(text.encode()).hexdigest()
    tokenizer = checkpoint / "tokenizer.json" if checkpoint is not None else None
    weights = weights_of(checkpoint)
    return TargetInfo(
        name=name,
        revision=model_config.revision,
        architecture=(model_config.architectures or ["unknown"])[0],
        model_type=str(getattr(model_config.hf_config, "model_type", "unknown")),
        num_hidden_layers=text_config.num_hidden_layers,
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        config_sha256=config_hash,
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer is not None and tokenizer.is_file() else None,
        quantization=None if model_config.quantization is None else str(model_config.quantization),
        tables_sha256=weights.tables,
        layers_sha256=weights.layers,
    )


def checkpoint_dir(model_config: Any) -> Path | None:
    """Find the local folder that the weights were loaded from, or None."""
    path = Path(str(model_config.model))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(path), revision=model_config.revision, local_files_only=True))
    except Exception:  # whatever the hub library raises means: not in its cache
        return None


def check_same_target(target_dir: Path, target: TargetInfo) -> None:
    """Refuse to add a second model's shards to a folder.

    Raises:
        ConfigError: ``target_dir`` holds another model's tensors.
    """
    config_file = target_dir / "config.json"
    if config_file.is_file() and file_sha256(config_file) != target.config_sha256:
        raise ConfigError(
            f"dir is {str(target_dir.parent)!r}, which holds shards of another target (its "
            f"target/config.json is not {target.name}'s); choose another folder for this model"
        )
    if what := weights_of(target_dir).differs(Fingerprint(target.tables_sha256, target.layers_sha256)):
        raise ConfigError(
            f"dir is {str(target_dir.parent)!r}, which holds shards of other weights than {target.name}'s: "
            f"its target/ has another {what} under the same config.json; choose another folder for this model"
        )


def weights_of(folder: Path | None) -> Fingerprint:
    """Of a checkpoint or a ``target/`` folder; unknown where it is not there or its tables are quantized."""
    try:
        return Fingerprint(None, None) if folder is None else fingerprint(load_target(folder))
    except (InputError, OSError):
        return Fingerprint(None, None)


def check_drafter_is_for(target: TargetInfo, speculative: Any) -> None:
    """Say so when the server's own drafter learnt the states of other weights: it would guess badly."""
    draft = getattr(speculative, "draft_model_config", None)
    config = getattr(draft, "hf_config", None)
    learnt = Fingerprint(
        getattr(config, "target_tables_sha256", None), getattr(config, "target_layers_sha256", None)
    )
    if what := learnt.differs(Fingerprint(target.tables_sha256, target.layers_sha256)):
        logger.warning(
            "the drafter %s was trained for a model with another %s than %s (fingerprints differ); if drafts "
            "are seldom accepted, train one for this model", draft.model, what, target.name,
        )  # fmt: skip


def _save_target(checkpoint: Path, target_dir: Path) -> None:
    try:
        save_target(checkpoint, target_dir)
    except (InputError, OSError) as err:
        logger.warning(
            "%s is not written (%s); name the checkpoint with 'specdec-tap train --target'", target_dir, err
        )


def attach(plan: Plan, model: Any, runner: Any) -> None:
    """After the model is loaded: set its aux layers and, on the capturing rank, start the tap."""
    plan.own_flag = runner.use_aux_hidden_state_outputs
    try:
        ids = choose_layers(plan, model, runner.vllm_config)
        plan.attached = True
        if is_capture_rank():
            plan.tap = make_tap(plan, runner.vllm_config, ids, runner.device)
    except ConfigError:
        raise
    except Exception as err:  # whatever the tap lacks, a server that is not strict goes on without it
        if plan.config.strict:
            raise
        expected = isinstance(err, SpecdecTapError)
        logger.error(
            "capture is off for this server: %s; serving continues", err, exc_info=None if expected else err
        )
