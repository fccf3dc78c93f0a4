"""Token ids to text that is safe to show: per token, nothing a terminal or a browser would act on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from specdec_tap.detokenize import Decode, load_decoder, tokenizer_file, visible
from specdec_tap.errors import InputError

__all__ = ["TargetTokenizer", "token_texts", "visible"]

MAX_PENDING = 12


def token_texts(decode: Decode, ids: Sequence[int], context: Sequence[int]) -> list[str]:
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
    """The tokenizer files in ``target/``, loaded when they are first needed. Thread-safe."""

    def __init__(self, target_dir: Path) -> None:
        self._dir = target_dir
        self._lock = threading.Lock()
        self._loaded: tuple[tuple[str, int, int], Decode] | None = None

    def decoder(self) -> Decode:
        """Return a function from token ids to text.

        Raises:
            InputError: There is no tokenizer, it is damaged, or the package tokenizers is missing.
        """
        with self._lock:
            path = tokenizer_file(self._dir)
            if path is None:
                raise InputError(
                    f"tokenizer.json cannot be read: neither it nor tiktoken.model is in {str(self._dir)!r}; "
                    "token ids are shown, not text"
                )
            stat = path.stat()
            stamp = (path.name, stat.st_mtime_ns, stat.st_size)
            if self._loaded is None or self._loaded[0] != stamp:
                self._loaded = (stamp, load_decoder(self._dir))
            return self._loaded[1]
