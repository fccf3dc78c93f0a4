"""Token ids to text from a tokenizer's files alone: no code that comes with a model is ever run.

Two kinds of files are read. ``tokenizer.json`` (a "fast" tokenizer) is decoded by the package tokenizers.
``tiktoken.model`` (Kimi and others) is a list of base64 byte strings with their ids; models that have only
this file bring Python code to read it, which is not needed: the bytes of the ids, one after the other, are
the text. Special tokens are named in ``tokenizer_config.json``; ids without a name are shown as a number.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from pathlib import Path

from .errors import InputError

FAST_FILE = "tokenizer.json"
TIKTOKEN_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
MAX_FILE_BYTES = 256 << 20
MAX_TOKENS = 1 << 22
MAX_TOKEN_BYTES = 1 << 16
_JOINERS = "\u200c\u200d"  # emoji and Indic scripts need them; they move nothing

Decode = Callable[[list[int]], str]
"""Token ids to text. Bytes that are no whole UTF-8 character become U+FFFD."""


def tokenizer_file(folder: Path) -> Path | None:
    """The file in ``folder`` that text can be decoded from, or None."""
    for name in (FAST_FILE, TIKTOKEN_FILE):
        if (folder / name).is_file():
            return folder / name
    return None


def load_decoder(folder: Path) -> Decode:
    """A function from token ids to text, special tokens included, safe to call from several threads.

    Args:
        folder: Usually ``shards/target``, or a model directory.

    Raises:
        InputError: No known tokenizer file, a damaged one, or a missing package; says what to do.
    """
    path = tokenizer_file(folder)
    if path is None:
        raise InputError(
            f"no {FAST_FILE} or {TIKTOKEN_FILE} in {str(folder)!r}, so token ids cannot be shown as text"
        )
    return _fast(path) if path.name == FAST_FILE else _tiktoken(path)


def visible(text: str) -> str:
    """Return text with every control and format character (ANSI escapes, bidi overrides) spelled out.

    Newlines and tabs stay.

    Example:
        >>> visible("a\\x1b[31mb")
        'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" or c in _JOINERS else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{str(path)!r} has {size:,} bytes; expected at most {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as err:
        raise InputError(f"{str(path)!r} cannot be read: {err.strerror or err}") from err


def _fast(path: Path) -> Decode:
    data = _read(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise InputError("showing text needs the package tokenizers; pip install tokenizers") from err
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as err:  # the library raises plain Exception for a bad file
        raise InputError(f"{str(path)!r} is no tokenizer ({err})") from err
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _tiktoken(path: Path) -> Decode:
    pieces = read_tiktoken(path)
    special = _special_tokens(path.with_name(CONFIG_FILE))

    def piece(token: int) -> bytes:
        known = special.get(token) or pieces.get(token)
        return known if known is not None else b"<|%d|>" % token

    return lambda ids: b"".join(piece(int(token)) for token in ids).decode("utf-8", "replace")


def read_tiktoken(path: Path) -> dict[int, bytes]:
    """Bytes of each token of a ``tiktoken.model`` file: lines of base64, a space, and the id.

    Raises:
        InputError: A line is neither; names it.
    """
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            text, token = parts
            token_id = int(token)
            value = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as err:
            raise InputError(
                f"{str(path)!r}, line {number:,}: {line[:40]!r} is not 'BASE64 ID'; is it a tiktoken file?"
            ) from err
        if not 0 <= token_id < MAX_TOKENS or len(value) > MAX_TOKEN_BYTES:
            raise InputError(
                f"{str(path)!r}, line {number:,}: id {token_id:,} of {len(value):,} bytes; expected ids "
                f"below {MAX_TOKENS:,} of at most {MAX_TOKEN_BYTES:,} bytes"
            )
        pieces[token_id] = value
    if not pieces:
        raise InputError(f"{str(path)!r} holds no token; expected lines of 'BASE64 ID'")
    return pieces


def _special_tokens(path: Path) -> dict[int, bytes]:
    """``added_tokens_decoder`` of a tokenizer's config: names of the ids beside the byte pieces."""
    if not path.is_file():
        return {}
    try:
        added = json.loads(_read(path)).get("added_tokens_decoder", {})
        return {int(token): str(entry["content"]).encode() for token, entry in added.items()}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as err:
        raise InputError(f"{str(path)!r}: added_tokens_decoder is not a table of ids and tokens") from err
