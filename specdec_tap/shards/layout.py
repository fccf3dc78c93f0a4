"""What a shard says about itself: header, spans, pieces, records, and their validation.

Everything here is plain data. Bytes come from files that anybody may have written, so every
``from_json`` checks type and range of every field and raises ``CorruptShardError`` (or
``UnsupportedFormatError`` for a newer version); nothing else escapes. ``docs/format.md`` is
the specification.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import ConfigError, CorruptShardError, UnsupportedFormatError

FORMAT_VERSION = 1

DTYPES = ("bfloat16", "float16", "float32")
CODECS = ("lossless", "fp8", "int8")
FINAL_HIDDEN = ("post_norm", "pre_norm", "none")
FINAL_SCOPES = ("response", "all", "none")
LAYER_CONVENTIONS = ("residual_in",)
SPAN_KINDS = ("prompt", "response")
FINISH_REASONS = ("stop", "length", "abort", "interrupted")
FOREIGN_ANSWER_FLAGS = frozenset({"imported", "given_answers"})
"""Flags of records whose response tokens were perhaps not sampled from the target."""

_CHOICES = {
    "dtype": DTYPES,
    "codec": CODECS,
    "final_hidden": FINAL_HIDDEN,
    "final_scope": FINAL_SCOPES,
    "layer_convention": LAYER_CONVENTIONS,
}

MAX_HIDDEN_SIZE = 1 << 18
MAX_AUX_LAYERS = 256
MAX_BLOCK_TOKENS = 1 << 14
MAX_BLOCK_BYTES = 1 << 27
"""Most bytes of one block's states uncompressed; bounds what decoding any block can take."""
MAX_TOKENS = 1 << 24
"""Longest sequence of one record; 16.7 million tokens."""
MAX_REQUEST_ID_CHARS = 256

_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED_STREAMS = ("target",)


def check_stream_name(name: object) -> str:
    """Return ``name`` if it is safe as a directory name, else raise ``ConfigError``."""
    if not isinstance(name, str) or not _STREAM.fullmatch(name) or name in _RESERVED_STREAMS:
        raise ConfigError(
            f"stream is {name!r}; expected 1 to 128 characters from A-Z a-z 0-9 . _ -, "
            "starting with a letter or a digit, and not 'target'"
        )
    return name


def bits_dtype(dtype: str) -> np.dtype:
    """NumPy dtype that holds the raw bits of one number of a shard's ``dtype``."""
    return np.dtype("<u4") if dtype == "float32" else np.dtype("<u2")


def parse_json(text: bytes | str, what: str) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN or Infinity, no runaway nesting. Half a surrogate pair,
    which no UTF-8 can say, becomes a question mark.

    Raises:
        CorruptShardError: If it is not such JSON. ``what`` starts the message.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a key occurs twice")
        return out

    def no_constants(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(number: str) -> float:
        value = float(number)
        if math.isinf(value):
            raise ValueError(f"{number[:20]} is no finite number")
        return value

    try:
        value = json.loads(
            text, object_pairs_hook=no_duplicates, parse_constant=no_constants, parse_float=finite
        )
        if isinstance(text, str) or b"\\u" in text or b"\xed" in text:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except (ValueError, RecursionError) as err:
        raise CorruptShardError(f"{what} is not valid JSON ({err})") from err


def dump_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


class _Fields:
    """Reads checked fields out of a parsed JSON object."""

    def __init__(self, data: Any, what: str) -> None:
        if not isinstance(data, dict):
            raise CorruptShardError(f"{what} is {type(data).__name__}; expected a JSON object")
        self._data = data
        self._what = what

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise CorruptShardError(f"{self._what} lacks the field {name!r}")
        return self._data[name]

    def _bad(self, name: str, value: Any, expected: str) -> CorruptShardError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CorruptShardError(f"{self._what}: {name} is {shown}; expected {expected}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._get(name)
        if type(value) is not int or not low <= value <= high:
            raise self._bad(name, value, f"a whole number from {low:,} to {high:,}")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if type(value) not in (int, float) or not -1e300 < value < 1e300:
            raise self._bad(name, value, "a number")
        return float(value)

    def text(self, name: str, max_chars: int = 1024) -> str:
        value = self._get(name)
        if not isinstance(value, str) or len(value) > max_chars:
            raise self._bad(name, value, f"a string of at most {max_chars:,} characters")
        return value

    def optional_text(self, name: str, max_chars: int = 1024) -> str | None:
        return None if self._get(name) is None else self.text(name, max_chars)

    def added_text(self, name: str, max_chars: int) -> str | None:
        """A field that older files lack."""
        return self.optional_text(name, max_chars) if name in self._data else None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._get(name)
        if not isinstance(value, str) or value not in choices:
            raise self._bad(name, value, f"one of {', '.join(map(repr, choices))}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self._get(name)
        if not isinstance(value, dict):
            raise self._bad(name, value, "a JSON object")
        return value

    def array(self, name: str, max_items: int) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or len(value) > max_items:
            raise self._bad(name, value, f"a list of at most {max_items:,} items")
        return value

    def scalars(self, name: str, *, allow_none: bool, max_items: int = 256) -> dict[str, Any]:
        """A flat object of strings and numbers."""
        value = self.object(name)
        if len(value) > max_items:
            raise self._bad(name, value, f"at most {max_items} entries")
        for key, item in value.items():
            ok = type(item) in (int, float, bool) or (isinstance(item, str) and len(item) <= 1024)
            if not ok and not (item is None and allow_none):
                raise self._bad(f"{name}[{key!r}]", item, "a string or a number")
        return value


FINGERPRINTS = ("tables_sha256", "layers_sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """Which model the states came from; enough to refuse a wrong one later."""

    name: str
    """As the server was told: a hub id or a path's last part."""
    revision: str | None
    architecture: str
    """First entry of ``architectures`` in the model's config.json."""
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    config_sha256: str
    tokenizer_sha256: str | None
    quantization: str | None
    tables_sha256: str | None = None
    """Of samples of embedding, head and final norm (``target.fingerprint``); None where unknown."""
    layers_sha256: str | None = None
    """The same of all other weights."""

    def to_json(self) -> dict[str, Any]:
        """Plain dict of JSON values, without the fingerprints that are not known."""
        out = dataclasses.asdict(self)
        return {name: value for name, value in out.items() if value is not None or name not in FINGERPRINTS}

    @classmethod
    def from_json(cls, data: Any) -> TargetInfo:
        """Inverse of ``to_json``; checks every field, ignores unknown ones."""
        f = _Fields(data, "header.target")
        return cls(
            name=f.text("name"),
            revision=f.optional_text("revision"),
            architecture=f.text("architecture"),
            model_type=f.text("model_type"),
            num_hidden_layers=f.integer("num_hidden_layers", 1, 1 << 16),
            hidden_size=f.integer("hidden_size", 1, MAX_HIDDEN_SIZE),
            vocab_size=f.integer("vocab_size", 1, 1 << 31),
            config_sha256=f.text("config_sha256", 64),
            tokenizer_sha256=f.optional_text("tokenizer_sha256", 64),
            quantization=f.optional_text("quantization"),
            tables_sha256=f.added_text("tables_sha256", 64),
            layers_sha256=f.added_text("layers_sha256", 64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """Everything a reader needs to know before the first frame; one per shard file."""

    format_version: int = FORMAT_VERSION
    stream: str
    """Name of the writer's stream; the directory's name when the file was written."""
    shard: int
    """Number inside the stream, from 1; the file's name."""
    created_unix_s: float
    target: TargetInfo
    aux_layer_ids: tuple[int, ...]
    """Ascending; id i is the residual stream entering decoder layer i (0 = embeddings)."""
    layer_convention: str = "residual_in"
    final_hidden: Literal["post_norm", "pre_norm", "none"] = "post_norm"
    """Whether the stored final states went through the model's last norm."""
    final_scope: Literal["response", "all", "none"] = "response"
    """At which positions the writer kept final states; blocks say exactly which rows have them."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    codec: Literal["lossless", "fp8", "int8"] = "lossless"
    block_tokens: int = 64
    """Most rows of one block."""
    engine: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    """Provenance: vllm, tap, runner, tensor/pipeline/data parallel sizes and ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layer_ids", tuple(int(i) for i in self.aux_layer_ids))
        object.__setattr__(self, "engine", dict(self.engine))
        self._check(ConfigError)

    def _check(self, error: type[Exception]) -> None:
        ids = self.aux_layer_ids
        if len(ids) > MAX_AUX_LAYERS or list(ids) != sorted(set(ids)):
            raise error(f"header.aux_layer_ids is {list(ids)}; expected ascending ids without repeats")
        if ids and not 0 <= ids[0] <= ids[-1] <= self.target.num_hidden_layers:
            raise error(
                f"header.aux_layer_ids is {list(ids)}; expected ids from 0 to num_hidden_layers = "
                f"{self.target.num_hidden_layers}"
            )
        if (self.final_hidden == "none") != (self.final_scope == "none"):
            raise error(
                f"header.final_hidden is {self.final_hidden!r} and final_scope {self.final_scope!r}; "
                "expected both or neither to be 'none'"
            )
        if not ids and self.final_hidden == "none":
            raise error("header names neither aux layers nor final states; expected at least one")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise error(f"header.block_tokens is {self.block_tokens}; expected 1 to {MAX_BLOCK_TOKENS:,}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise error(f"header.{name} is {getattr(self, name)!r}; expected one of {choices}")
        if self.raw_bytes(self.block_tokens, self.block_tokens) > MAX_BLOCK_BYTES:
            raise error(
                f"a block of {self.block_tokens} rows x ({len(ids)} aux layers + 1) x {self.hidden_size:,} "
                f"numbers is over the format's {MAX_BLOCK_BYTES:,} bytes; choose fewer block_tokens"
            )

    @property
    def num_aux(self) -> int:
        """Number of aux layers, A."""
        return len(self.aux_layer_ids)

    @property
    def hidden_size(self) -> int:
        """Width of one state, H."""
        return self.target.hidden_size

    @property
    def bits_dtype(self) -> np.dtype:
        """NumPy dtype of the raw bits: uint16, or uint32 for float32."""
        return bits_dtype(self.dtype)

    def raw_bytes(self, num_rows: int, final_rows: int) -> int:
        """Bytes that so many aux rows and final rows take uncompressed."""
        return (num_rows * self.num_aux + final_rows) * self.hidden_size * self.bits_dtype.itemsize

    def replace(self, **changes: Any) -> ShardHeader:
        """Copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Plain dict of JSON values; ``dump_json`` of it is what the META frame holds."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out["target"] = self.target.to_json()
        out["aux_layer_ids"] = list(self.aux_layer_ids)
        out["engine"] = dict(self.engine)
        return out

    @classmethod
    def from_json(cls, data: Any) -> ShardHeader:
        """Inverse of ``to_json``; checks every field, ignores unknown ones.

        Raises:
            UnsupportedFormatError: For another format version.
            CorruptShardError: For a missing field or one out of range.
        """
        f = _Fields(data, "header")
        version = f.integer("format_version", 1, 1 << 31)
        if version != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"format_version is {version}; this specdec-tap reads version {FORMAT_VERSION}. "
                "Update specdec-tap"
            )
        ids = f.array("aux_layer_ids", MAX_AUX_LAYERS)
        if not all(type(i) is int and 0 <= i <= 1 << 16 for i in ids):
            raise CorruptShardError("header.aux_layer_ids holds something that is no layer id")
        try:
            return cls(
                format_version=version,
                stream=check_stream_name(f.text("stream")),
                shard=f.integer("shard", 0, MAX_SHARD),
                created_unix_s=f.number("created_unix_s"),
                target=TargetInfo.from_json(f.object("target")),
                aux_layer_ids=tuple(ids),
                layer_convention=f.choice("layer_convention", LAYER_CONVENTIONS),
                final_hidden=f.choice("final_hidden", FINAL_HIDDEN),  # type: ignore[arg-type]  # choice() checked it
                final_scope=f.choice("final_scope", FINAL_SCOPES),  # type: ignore[arg-type]  # choice() checked it
                dtype=f.choice("dtype", DTYPES),  # type: ignore[arg-type]  # choice() checked it
                codec=f.choice("codec", CODECS),  # type: ignore[arg-type]  # choice() checked it
                block_tokens=f.integer("block_tokens", 1, MAX_BLOCK_TOKENS),
                engine=f.scalars("engine", allow_none=False),
            )
        except ConfigError as err:
            raise CorruptShardError(str(err)) from err


MAX_SHARD = 10**9 - 1


class BlockRef(NamedTuple):
    """Address of a block inside one stream."""

    shard: int
    block: int
    """Ordinal among the BLOCK frames of that shard, from 0."""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of token positions of one kind."""

    start: int
    stop: int
    kind: Literal["prompt", "response"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[row_start, row_stop)`` of a block are positions ``position``, ``position + 1``, ..."""

    position: int
    block: BlockRef
    row_start: int
    row_stop: int

    @property
    def stop(self) -> int:
        """Position after the last one covered."""
        return self.position + self.row_stop - self.row_start


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordMeta:
    """One captured request: its tokens and where the states of its positions are stored."""

    request_id: str
    """The engine's id; data only, never part of a path. At most 256 characters."""
    token_ids: np.ndarray
    """int32 [T]: prompt, then response."""
    spans: tuple[Span, ...]
    pieces: tuple[Piece, ...]
    """Sorted and disjoint. Positions below T - 1 that no piece covers are gaps."""
    finish_reason: Literal["stop", "length", "abort", "interrupted"]
    started_unix_s: float
    finished_unix_s: float
    sampling: Mapping[str, float | int | str | None]
    lora: str | None = None
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = np.ascontiguousarray(self.token_ids, dtype=np.int32)
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "spans", tuple(self.spans))
        object.__setattr__(self, "pieces", tuple(self.pieces))
        object.__setattr__(self, "flags", tuple(self.flags))
        object.__setattr__(self, "sampling", dict(self.sampling))
        self._check(ids)

    def _check(self, ids: np.ndarray) -> None:
        num_tokens = ids.shape[0] if ids.ndim == 1 else 0
        if ids.ndim != 1 or not 1 <= num_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"record has {ids.size:,} tokens in {ids.ndim} axes; expected 1 to {MAX_TOKENS:,}"
            )
        if int(ids.min()) < 0:
            raise ConfigError(f"record has the token id {int(ids.min())}; expected ids from 0")
        if len(self.request_id) > MAX_REQUEST_ID_CHARS:
            raise ConfigError(f"request_id has {len(self.request_id):,} characters; expected at most 256")
        if self.finish_reason not in FINISH_REASONS:
            raise ConfigError(f"finish_reason is {self.finish_reason!r}; expected one of {FINISH_REASONS}")
        end = 0
        for span in self.spans:
            if span.kind not in SPAN_KINDS or not end <= span.start < span.stop <= num_tokens:
                raise ConfigError(f"{span} is out of order or outside the record's {num_tokens:,} tokens")
            end = span.stop
        end = 0
        for piece in self.pieces:
            rows_ok = 0 <= piece.row_start < piece.row_stop <= MAX_BLOCK_TOKENS
            block_ok = 0 <= piece.block.shard <= MAX_SHARD and 0 <= piece.block.block < 1 << 31
            if not rows_ok or not block_ok or piece.position < end or piece.stop > num_tokens - 1:
                raise ConfigError(
                    f"{piece} is out of order or outside the record's {num_tokens - 1:,} rows (tokens "
                    "less one)"
                )
            end = piece.stop

    @property
    def num_tokens(self) -> int:
        """T, prompt and response."""
        return int(self.token_ids.shape[0])

    @property
    def covered_rows(self) -> int:
        """Positions that some piece covers."""
        return sum(p.row_stop - p.row_start for p in self.pieces)

    @property
    def response_tokens(self) -> int:
        """Tokens inside response spans."""
        return sum(s.stop - s.start for s in self.spans if s.kind == "response")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordMeta):
            return NotImplemented
        names = [f.name for f in dataclasses.fields(self) if f.name != "token_ids"]
        return np.array_equal(self.token_ids, other.token_ids) and all(
            getattr(self, n) == getattr(other, n) for n in names
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array
