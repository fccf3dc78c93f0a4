"""A target that is not on this machine: its two or three tensors, and none of the others.

Training needs the embedding, the output head and the final norm. From a checkpoint on the Hugging Face hub,
or at any URL that fsspec opens, only the headers of the files that may hold them are read, then the bytes of
these tensors. The copy keeps the checkpoint's layout: its weight files have their full size, but are sparse.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import uuid
from pathlib import Path
from typing import Any

from .errors import InputError
from .shards.remote import is_url, open_filesystem
from .target import TARGET_JSON, Checkpoint, Target, TensorRef, is_candidate, load_target, tokenizer_names

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_INDEX = "model.safetensors.index.json"
_BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100 << 20
_MAX_JSON_BYTES = 256 << 20


def local_target(name: str, cache: Path | None = None) -> Path:
    """A folder for ``load_target``.

    Args:
        name: A folder, a URL, or a hub id such as ``org/model`` or ``org/model@revision``.
        cache: Where copies are kept; below ``~/.cache`` by default.

    Returns:
        The folder itself; for a hub id the hub's own cache when it has the model, else a copy of what is
        needed.

    Raises:
        InputError: It cannot be read.
    """
    if Path(name).exists() or not (is_url(name) or _HUB_ID.fullmatch(name)):
        return Path(name)
    if not is_url(name):
        found = _in_hub_cache(name)
        if found is not None:
            return found
        name = f"hf://{name}"
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec-tap" / "targets"
    folder = cache / hashlib.sha256(name.encode()).hexdigest()[:16]
    if not folder.is_dir():
        fetch(name, folder)
    return folder


def fetch(url: str, folder: Path) -> Target:
    """Copy what a drafter needs of the checkpoint at ``url`` into a new ``folder``.

    Raises:
        InputError: It is not there, not allowed, or no checkpoint.
    """
    fs, root = open_filesystem(url)
    root = root.rstrip("/")
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    part.mkdir(mode=0o700, parents=True)
    try:
        _fetch(fs, root, part)
        for path in part.iterdir():
            path.chmod(0o600)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process of the same run was faster
                raise
        return load_target(folder)
    except InputError as err:
        raise InputError(f"{url!r}: {err}".replace(str(part), url)) from err
    except Exception as err:  # drivers raise their libraries' own types: not found, no access, offline
        raise InputError(
            f"cannot read the target at {url!r} ({type(err).__name__}: {err}); name a local folder, or check "
            "the name, the network and your access"
        ) from err
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetch(fs: Any, root: str, folder: Path) -> None:
    names = {path.rsplit("/", 1)[-1]: path for path in fs.ls(root, detail=False)}
    if "config.json" not in names:
        raise InputError("no config.json; expected a Hugging Face model directory")
    if TARGET_JSON in names:  # a target/ folder of shards: small, taken whole
        for name in names:
            fs.get_file(names[name], str(folder / name))
        return
    for name in ("config.json", *tokenizer_names()):
        if name in names and fs.size(names[name]) <= _MAX_JSON_BYTES:
            fs.get_file(names[name], str(folder / name))
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if _INDEX in names:
        if (size := int(fs.size(names[_INDEX]))) > _MAX_JSON_BYTES:
            raise InputError(f"{_INDEX!r} has {size:,} bytes; expected at most {_MAX_JSON_BYTES:,}")
        index = json.loads(fs.cat_file(names[_INDEX]))
        wanted = {str(k): Path(str(v)).name for k, v in index["weight_map"].items() if is_candidate(str(k))}
        (folder / _INDEX).write_text(json.dumps({"weight_map": wanted}))
        weights = sorted(set(wanted.values()))
    for name in weights:
        if name not in names:
            raise InputError(f"its index lists {name!r}, which is not there")
        _sparse_copy(fs, names[name], folder / name)
    target = load_target(folder)
    refs = [target.embed, target.head, target.head_bias, target.norm, target.norm_bias]
    filled = {ref.name: ref for ref in refs if ref is not None}
    for ref in filled.values():
        _fill(fs, names[ref.path.name], ref)
    # Only what was filled can be found again: every other tensor is a hole of zeros.
    index = {"weight_map": {name: ref.path.name for name, ref in filled.items()}}
    (folder / _INDEX).write_text(json.dumps(index))


def _sparse_copy(fs: Any, source: str, path: Path) -> None:
    """A file of the same size with the header only."""
    size = int(fs.size(source))
    first = fs.cat_file(source, start=0, end=8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise InputError(f"{path.name!r} is not a safetensors file (header length {length:,})")
    with path.open("wb") as file:
        file.write(first + fs.cat_file(source, start=8, end=8 + length))
        file.truncate(size)


def _fill(fs: Any, source: str, ref: TensorRef) -> None:
    """Copy the bytes of one tensor to where they belong."""
    with ref.path.open("r+b") as file:
        for at in range(ref.offset, ref.offset + ref.nbytes, _BLOCK_BYTES):
            end = min(at + _BLOCK_BYTES, ref.offset + ref.nbytes)
            data = fs.cat_file(source, start=at, end=end)
            if len(data) != end - at:
                raise InputError(f"{ref.path.name!r} ends inside tensor {ref.name!r}")
            file.seek(at)
            file.write(data)


def _in_hub_cache(name: str) -> Path | None:
    """The model's folder in the hub's own cache, with all its weights; None where it is not."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    repo, _, revision = name.partition("@")
    found = try_to_load_from_cache(repo, "config.json", revision=revision or None)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    try:
        for tensor in (checkpoint := Checkpoint(folder)):
            if is_candidate(tensor):
                checkpoint.ref(tensor)
    except InputError:  # a partial download
        return None
    return folder
