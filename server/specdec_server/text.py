"""Token ids to text that is safe to show: per token, nothing a terminal or a browser would act on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec_tap.errors import InputError

_JOINERS = "\u200c\u200d"  # emoji and Indic scripts need them; they move nothing
MAX_PENDING = 12
MAX_TOKENIZER_BYTES = 256 << 20


def visible(text: str) -> str:
    """Return text with every control and format character (ANSI escapes, bidi overrides) spelled out.

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


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int], context: Sequence[int]) -> list[str]:
    """Split decoded text by token.

    A character that several tokens make up is given to the last of them; the others get an empty string.

    Args:
        decode: Token ids to text; an incomplete character at the end becomes U+FFFD.
        ids: Tokens to show.
        context: Tokens before them (a few are enough): some tokenizers treat the first token specially.

    Returns:
        One string per token of ``ids``, not yet made visible.
    """
    before = list(context[-4:])
    base = decode(before) if before else ""
    pending: list[int] = []
    out = []
    for token in ids:
        pending.append(int(token))
        text = decode(before + pending)
        new = text[len(base) :] if text.startswith(base) else decode(pending)
        if new.endswith("\ufffd") and len(pending) < MAX_PENDING:
            out.append("")
            continue
        out.append(new)
        before, pending = (before + pending)[-4:], []
        base = decode(before)
    if pending:
        text = decode(before + pending)
        out[-1] = text[len(base) :] if text.startswith(base) else decode(pending)
    return out


class TargetTokenizer:
    """The tokenizer in ``target/tokenizer.json``, loaded when it is first needed. Thread-safe."""

    def __init__(self, target_dir: Path) -> None:
        self._path = target_dir / "tokenizer.json"
        self._lock = threading.Lock()
        self._loaded: tuple[tuple[int, int], Callable[[list[int]], str]] | None = None

    def decoder(self) -> Callable[[list[int]], str]:
        """Return a function from token ids to text.

        Raises:
            InputError: There is no tokenizer, it is damaged, or the package tokenizers is missing.
        """
        with self._lock:
            try:
                stat = self._path.stat()
            except OSError as err:
                raise InputError(
                    f"{self._path} cannot be read ({err.strerror or err}); token ids are shown, not text"
                ) from err
            stamp = (stat.st_mtime_ns, stat.st_size)
            if self._loaded is None or self._loaded[0] != stamp:
                self._loaded = (stamp, self._load(stat.st_size))
            return self._loaded[1]

    def _load(self, size: int) -> Callable[[list[int]], str]:
        if size > MAX_TOKENIZER_BYTES:
            raise InputError(f"{self._path} has {size:,} bytes; expected at most {MAX_TOKENIZER_BYTES:,}")
        try:
            from tokenizers import Tokenizer
        except ImportError as err:
            raise InputError("showing text needs the package tokenizers; pip install tokenizers") from err
        try:
            tokenizer = Tokenizer.from_file(str(self._path))
        except Exception as err:  # the library raises plain Exception for a bad file
            raise InputError(f"{self._path} is no tokenizer ({err})") from err
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
