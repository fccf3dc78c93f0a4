"""All capture settings: one frozen dataclass, read from three places, checked in one."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError

ENV_PREFIX = "SPECDEC_TAP_"
ENV_SWITCH = "SPECDEC_TAP"
ENV_FILE = "SPECDEC_TAP_CONFIG"
ADDITIONAL_CONFIG_KEY = "specdec_tap"
SECRET_FIELDS = frozenset({"admin_token"})
"""Never printed, logged, or passed on to another process than the one that checks them."""
MIN_TOKEN_CHARS = 16

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True, slots=True)
class TapConfig:
    """Settings of one tap. Capture is off unless ``dir`` is set."""

    dir: Path
    """Folder that receives the shards; created with mode 0700. Setting it turns capture on."""

    aux_layer_ids: tuple[int, ...] | None = None
    """Aux layer ids in vLLM's convention (id i = residual stream entering layer i); None takes the
    model's own EAGLE-3 default, (2, N//2, N-3). A drafter is trained on exactly these layers."""

    final_hidden: Literal["response", "all", "none"] = "response"
    """Where the post-norm final hidden state is kept: where it trains a response token, at every
    position (needed to train on prompt tokens), or nowhere."""

    codec: Literal["lossless", "fp8", "int8"] = "lossless"
    """How states are stored. ``lossless`` keeps every bit; the others trade bits for size."""

    sample_rate: float = 1.0
    """Share of requests to capture, 0 to 1; decided once per request from a hash of its id."""

    consent: Literal["opt_out", "opt_in"] = "opt_out"
    """``opt_out`` captures a request unless it sends ``vllm_xargs: {"specdec_tap": 0}``; ``opt_in``
    captures it only if it sends ``{"specdec_tap": 1}``."""

    min_tokens: int = 2
    """Shortest sequence (prompt + response, in tokens) worth keeping."""

    max_tokens: int | None = None
    """Longest prompt + response to keep, in tokens; None keeps every length."""

    response_window: tuple[int, int] | None = None
    """Keep only response positions [a, b), counted from the first response token; None keeps all.
    The prompt's aux states are kept either way, since a drafter attends to them."""

    given_answers: bool = False
    """Take a request's prompt for a whole conversation: its answers lie at the token ranges in
    ``specdec_tap_spans`` of ``vllm_xargs`` (``"10-40,60-90"``), and what is sampled after it is left out.
    This is how ``specdec-tap extract`` captures answers that somebody else wrote; no server needs it."""

    ring_bytes: int = 0
    """Size of the shared-memory ring between worker and writer; 0 sizes it to four of the largest
    steps that the scheduler can make, at least 64 MiB."""

    max_shard_bytes: int = 1 << 30
    """A shard is sealed when it reaches this size, in bytes."""

    max_shard_age_s: float = 600.0
    """A shard that holds records is sealed after this time, in seconds."""

    max_bytes: int | None = None
    """Largest total size of the folder, in bytes; the oldest sealed shards go first. None: no limit."""

    min_free_bytes: int = 1 << 30
    """Capture drops requests while the disk has less than this free, in bytes."""

    max_age_s: float | None = None
    """Sealed shards older than this are removed, in seconds. None keeps them."""

    upload_url: str | None = None
    """Store that receives every sealed shard, such as ``s3://bucket/shards`` (any fsspec URL). Shards are
    written to ``dir`` first; ``max_bytes`` and ``max_age_s`` then remove only what the store has."""

    upload_remove_local: bool = False
    """True: a sealed shard is removed here once the store has it, but for the newest of a stream."""

    writer_nice: int = 5
    """Scheduling niceness of the writer process, 0 to 19: serving comes first on a busy CPU. At 5 the writer
    still gets a quarter of a busy core; at 10 it could not keep up beside a small model on two cores."""

    strict: bool = True
    """True: a server whose model or vLLM cannot be tapped refuses to start. False: it serves
    without capture and says so once."""

    admin_token: str | None = dataclasses.field(default=None, repr=False)
    """Secret that a client of /specdec_tap/ must send as ``Authorization: Bearer TOKEN``; at least 16
    characters. Without one nothing can be changed over HTTP. Set it in the environment or in the YAML
    file: vLLM logs its arguments, so --additional-config may not hold it."""

    public_status: bool = False
    """True: GET /specdec_tap/status and /specdec_tap/events answer without the token."""

    def __post_init__(self) -> None:
        problems = []
        if self.admin_token is not None and (problem := token_problem(self.admin_token)):
            problems.append(problem)
        if not 0.0 <= self.sample_rate <= 1.0:
            problems.append(f"sample_rate is {self.sample_rate}; expected 0 to 1")
        if self.aux_layer_ids is not None:
            ids = self.aux_layer_ids
            if not ids or any(i < 0 for i in ids) or list(ids) != sorted(set(ids)):
                problems.append(
                    f"aux_layer_ids is {list(ids)}; expected distinct ascending ids >= 0 such as [2, 15, 27]"
                )
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            problems.append(f"max_tokens is {self.max_tokens:,}, below min_tokens {self.min_tokens:,}")
        window = self.response_window
        if window is not None and (len(window) != 2 or not 0 <= window[0] < window[1]):
            problems.append(f"response_window is {list(window)}; expected [a, b] with 0 <= a < b, in tokens")
        if self.max_shard_bytes < 1 << 16:
            problems.append(f"max_shard_bytes is {self.max_shard_bytes:,}; expected at least 65,536")
        if self.max_bytes is not None and self.max_bytes < 2 * self.max_shard_bytes:
            problems.append(
                f"max_bytes is {self.max_bytes:,}; expected at least two shards (max_shard_bytes is "
                f"{self.max_shard_bytes:,}; lower it too)"
            )
        if self.upload_url is not None and "://" not in self.upload_url:
            problems.append(f"upload_url is {self.upload_url!r}; expected a URL such as s3://bucket/shards")
        if self.upload_remove_local and self.upload_url is None:
            problems.append("upload_remove_local is true but upload_url is not set, so it has no effect")
        for name in ("min_tokens", "ring_bytes", "min_free_bytes"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name):,}; expected 0 or more")
        for name in ("max_shard_age_s", "max_age_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(f"{name} is {value}; expected more than 0 seconds")
        if not 0 <= self.writer_nice <= 19:
            problems.append(f"writer_nice is {self.writer_nice}; expected 0 to 19")
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def load(
        cls, env: Mapping[str, str] | None = None, additional_config: Mapping[str, Any] | None = None
    ) -> tuple[TapConfig | None, dict[str, str]]:
        """Read settings from a YAML file, the environment and ``--additional-config``, later ones winning.

        Args:
            env: Usually ``os.environ``. ``SPECDEC_TAP_<FIELD>`` sets a field, ``SPECDEC_TAP_CONFIG`` names
                a YAML file, ``SPECDEC_TAP=off`` turns capture off whatever else is set.
            additional_config: vLLM's ``additional_config``; only its key ``specdec_tap`` is read.

        Returns:
            ``(config, sources)``; config is None when capture is off. ``sources`` names where each field
            that is not a default came from.

        Raises:
            ConfigError: Lists every unknown key (with the nearest name) and every bad value at once.
        """
        env = os.environ if env is None else env
        if env.get(ENV_SWITCH, "").strip().lower() in {"off", "0", "false", "no"}:
            return None, {}
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        layers: list[tuple[str, Mapping[str, Any]]] = []
        if file := env.get(ENV_FILE):
            layers.append((file, _read_yaml(Path(file))))
        reserved = {ENV_FILE}
        from_env = {
            key.removeprefix(ENV_PREFIX).lower(): value
            for key, value in env.items()
            if key.startswith(ENV_PREFIX) and key not in reserved
        }
        layers.append(("environment", from_env))
        section = (additional_config or {}).get(ADDITIONAL_CONFIG_KEY) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"--additional-config {ADDITIONAL_CONFIG_KEY!r} is {section!r}; expected an object such as "
                '{"dir": "shards"}'
            )
        layers.append(("--additional-config", section))
        fields = {f.name: f for f in dataclasses.fields(cls)}
        types = typing.get_type_hints(cls)
        problems = []
        for source, layer in layers:
            for key, raw in layer.items():
                if key not in fields:
                    near = difflib.get_close_matches(key, fields, n=1)
                    name = f"{ENV_PREFIX}{key.upper()}" if source == "environment" else key
                    suggestion = near and (
                        f"{ENV_PREFIX}{near[0].upper()}" if source == "environment" else near[0]
                    )
                    hint = f"; did you mean {suggestion}?" if near else ""
                    problems.append(f"{name} ({source}) is not a setting of the tap{hint}")
                    continue
                if key in SECRET_FIELDS and layer is section:
                    problems.append(
                        f"{key} is in --additional-config, which vLLM writes to its log; set "
                        f"{ENV_PREFIX}{key.upper()} in the environment instead"
                    )
                    continue
                try:
                    values[key] = _convert(key, raw, types[key])
                    sources[key] = source
                except ValueError as err:
                    problems.append(f"{err} ({source})")
        if problems:
            raise ConfigError("; ".join(problems))
        if not values.get("dir") or str(values["dir"]) == ".":
            if values:
                raise ConfigError(
                    f"{', '.join(sorted(values))} set but dir is not; set {ENV_PREFIX}DIR to the folder "
                    "for the shards"
                )
            return None, {}
        return cls(**values), sources

    def to_json(self) -> dict[str, Any]:
        """Return the settings but the secrets as JSON-able values; :meth:`from_json` reads them back."""
        out = {k: v for k, v in dataclasses.asdict(self).items() if k not in SECRET_FIELDS}
        out["dir"] = str(self.dir)
        return out

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TapConfig:
        types = typing.get_type_hints(cls)
        return cls(**{k: None if v is None else _convert(k, v, types[k]) for k, v in values.items()})


def token_problem(token: str) -> str | None:
    """Return why a string cannot be an admin token, without repeating it; None if it can."""
    if len(token) < MIN_TOKEN_CHARS:
        return (
            f"admin_token has {len(token)} characters; expected at least {MIN_TOKEN_CHARS} "
            "(openssl rand -hex 16 makes one)"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        return "admin_token holds spaces or characters outside printable ASCII; no HTTP header can carry them"
    return None


def field_docs() -> dict[str, str]:
    """Return each setting's documentation, read from the docstring under the field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(TapConfig)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, doc in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs


def left_out_by_vllm(env: Mapping[str, str]) -> str | None:
    """Why a vLLM started from here would not load the tap: then nothing of it runs that could say so."""
    allowed = env.get("VLLM_PLUGINS")
    if allowed is None or "specdec_tap" in allowed.split(","):
        return None
    return f"VLLM_PLUGINS is {allowed!r}; add specdec_tap to it, or unset it"


def prepare_directory(path: Path) -> None:
    """Create the shard folder (mode 0700) and prove that a file can be written in it.

    Raises:
        ConfigError: The folder cannot be created or written; names it and the reason.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(fd, b"x" * 4096)
            os.fsync(fd)
        finally:
            os.close(fd)
            probe.unlink()
    except OSError as err:
        raise ConfigError(
            f"dir is {str(path)!r} but no file can be written there ({err.strerror or err}); choose a "
            f"writable folder with free space, or unset {ENV_PREFIX}DIR to serve without capture"
        ) from err


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{ENV_FILE} is {str(path)!r}, which cannot be read: {reason}") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path} is not valid YAML: {err}") from err
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; expected a mapping of settings")
    return loaded


def _convert(name: str, raw: Any, kind: Any) -> Any:
    """Turn a YAML, JSON or environment value into the field's type; ValueError names the setting."""
    args = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in {"", "none", "null"}):
            return None
        return _convert(name, raw, next(a for a in args if a is not type(None)))
    origin = typing.get_origin(kind)
    if origin is Literal:
        if raw not in args:
            raise ValueError(f"{name} is {raw!r}; expected one of {', '.join(map(repr, args))}")
        return raw
    if origin is tuple:
        return _convert_ints(name, raw)
    if kind is bool:
        text = str(raw).strip().lower()
        if text in {"1", "true", "yes", "on"}:
            return True
        if text in {"0", "false", "no", "off"}:
            return False
        raise ValueError(f"{name} is {raw!r}; expected true or false")
    if kind is str:
        if not isinstance(raw, str):
            raise ValueError(f"{name} is not a string; put it in quotes")
        return raw.strip()
    if kind is Path:
        if not isinstance(raw, (str, Path)):
            raise ValueError(f"{name} is {raw!r}; expected a path")
        return Path(raw).expanduser() if str(raw) else None
    if kind in (int, float):
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError(f"{name} is {raw!r}; expected a number")
        return _parse_number(name, raw, kind)
    raise AssertionError(f"no conversion for {name}: {kind}")


def _convert_ints(name: str, raw: Any) -> tuple[int, ...]:
    try:
        items = raw
        if isinstance(raw, str):
            items = json.loads(raw) if raw.strip().startswith("[") else raw.split(",")
        return tuple(int(item) for item in items)
    except (TypeError, ValueError) as err:  # json.JSONDecodeError is a ValueError
        raise ValueError(f"{name} is {raw!r}; expected integers such as 2,15,27") from err


def _parse_number(name: str, raw: float | str, kind: type) -> float | int:
    """Read a number; ``..._bytes`` settings accept 50MB or 1GiB, ``..._s`` settings 30m or 7d."""
    if isinstance(raw, str):
        units = _UNITS if name.endswith("bytes") else _SECONDS if name.endswith("_s") else {"": 1}
        match = re.fullmatch(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", raw.strip().lower())
        if match is None or match[2] not in units:
            allowed = " or a unit such as " + "/".join(list(units)[-4:]) if len(units) > 1 else ""
            raise ValueError(f"{name} is {raw!r}; expected a number{allowed}")
        try:
            raw = float(match[1]) * units[match[2]]
        except ValueError as err:
            raise ValueError(f"{name} is {raw!r}; expected a number") from err
    if not math.isfinite(raw):
        raise ValueError(f"{name} is {raw}; expected a finite number")
    if kind is int and float(raw) != int(raw):
        raise ValueError(f"{name} is {raw!r}; expected a whole number")
    return kind(raw)
