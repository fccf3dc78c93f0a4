"""Ask vLLM about a model without loading its weights: ``python -m specdec_tap.vllm_plugin.probe MODEL OUT``.

A process of its own, because importing vLLM takes seconds and hundreds of MB, and because vLLM logs to
standard output; the answer goes to the file OUT as one JSON object. ``specdec-tap doctor`` runs it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def ask(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return what vLLM would do with ``model`` on this machine.

    Keys: ``vllm``, ``device``, ``runner`` (``v1`` or ``v2``, None if unknown), ``architecture``,
    ``model_class``, ``num_hidden_layers``, ``hidden_size``, ``vocab_size``, ``dtype``, ``aux_layer_ids``
    (None if the model class decides by itself or has no EAGLE-3 interface) and ``why_not`` (None: it can be
    tapped).
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    from .attach import why_not

    config = EngineArgs(model=model, trust_remote_code=trust_remote_code).create_engine_config()
    runner = "v2" if config.use_v2_model_runner else "v1"
    model_config = config.model_config
    reason = why_not(config, runner)
    model_class, architecture = get_model_architecture(model_config)
    return {
        "vllm": vllm.__version__,
        "device": config.device_config.device_type,
        "runner": runner,
        "architecture": architecture,
        "model_class": model_class.__name__,
        "num_hidden_layers": model_config.hf_text_config.num_hidden_layers,
        "hidden_size": model_config.get_hidden_size(),
        "vocab_size": model_config.get_vocab_size(),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "aux_layer_ids": None
        if reason
        else default_aux_layer_ids(model_class, model_config.hf_text_config.num_hidden_layers),
        "why_not": reason,
    }


def ask_without_device(config: dict[str, Any]) -> dict[str, Any]:
    """Return what can be said from a config.json alone, where vLLM finds no device to run on.

    Raises:
        LookupError: vLLM has no class for the architecture.
    """
    import vllm
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    text = config.get("text_config") or config
    architecture = next((a for a in config.get("architectures") or [] if a in ModelRegistry.models), None)
    if architecture is None:
        raise LookupError(
            f"architectures {config.get('architectures')} are not in vllm {vllm.__version__}'s registry"
        )
    model_class = ModelRegistry.models[architecture].load_model_cls()
    reason = None
    if not supports_eagle3(model_class):
        reason = (
            f"{architecture} has no EAGLE-3 interface in vllm {vllm.__version__} (class "
            f"{model_class.__name__} lacks set_aux_hidden_state_layers), so its aux hidden states cannot be "
            "read"
        )
    layers = text["num_hidden_layers"]
    return {
        "vllm": vllm.__version__,
        "device": None,
        "runner": None,
        "architecture": architecture,
        "model_class": model_class.__name__,
        "num_hidden_layers": layers,
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        "aux_layer_ids": None if reason else default_aux_layer_ids(model_class, layers),
        "why_not": reason,
    }


def default_aux_layer_ids(model_class: Any, num_layers: int) -> list[int] | None:
    """Return the layers that vLLM takes by default; None if the class has a rule of its own.

    Source: ``SupportsEagle3.get_eagle3_default_aux_hidden_state_layers`` in vLLM's models/interfaces.py; ids
    are sorted and de-duplicated as vLLM does.
    """
    from vllm.model_executor.models.interfaces import SupportsEagle3

    own = getattr(model_class, "get_eagle3_default_aux_hidden_state_layers", None)
    if own is not SupportsEagle3.get_eagle3_default_aux_hidden_state_layers:
        return None
    return sorted({2, num_layers // 2, num_layers - 3})


def answer(model: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return what :func:`ask` says; where vLLM refuses, ``error`` and what the config alone says."""
    found: dict[str, Any]
    try:
        return ask(model, trust_remote_code=trust_remote_code)
    except Exception as err:  # vLLM raises whatever its parts raise; all of it is the answer here
        found = {"error": f"{type(err).__name__}: {' '.join(str(err).split())[:1000]}"}
    config_file = Path(model) / "config.json"
    if config_file.is_file():
        try:
            found |= ask_without_device(json.loads(config_file.read_text()))
        except Exception as again:  # as above; the first error stays
            found["second_error"] = f"{type(again).__name__}: {again}"
    return found


def main() -> None:
    """Write the answer, or ``{"error": ...}``, to the file that the caller named."""
    parser = argparse.ArgumentParser(prog="python -m specdec_tap.vllm_plugin.probe", description=ask.__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    args.out.write_text(json.dumps(answer(args.model, trust_remote_code=args.trust_remote_code)))


if __name__ == "__main__":
    main()
