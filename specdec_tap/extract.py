"""Shards from written conversations, without live traffic.

``hf`` runs the model in Hugging Face code, one conversation at a time: slow, but it runs what vLLM cannot,
and it is the judge of what the tap captured. ``vllm`` sends each conversation, answers included, as a prompt
to an offline vLLM engine with the tap on; it runs in a process of its own (``vllm_plugin/offline.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._version import __version__
from .config import TapConfig
from .conversations import ChatTokenizer, TokenizedChat, read_chats
from .errors import InputError, SpecdecTapError
from .plan import default_aux_layer_ids
from .serving import is_cpu_build
from .shards.codec import encode_block
from .shards.layout import Piece, RecordMeta, ShardHeader, Span, TargetInfo, check_stream_name
from .shards.lossy import from_float
from .shards.reader import open_shards
from .shards.writer import ShardWriter
from .target import file_sha256, fingerprint, load_target, save_target

Progress = Callable[[int, str], None]
BATCH = 256
"""Conversations that are handed to vLLM at a time."""
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): \S.*")
"""The line of a traceback that says what was wrong."""


def stored_ids(root: Path) -> set[str]:
    """Ids of the conversations that are in ``root`` already.

    vLLM appends ``-`` and eight hexadecimal digits to a request's id; what it captured is known without them.
    """
    if not root.is_dir() or not any(root.glob("*/[0-9]*")):
        return set()
    with open_shards(root, follow=True) as store:
        return {
            record.meta.request_id[:-9] if "vllm" in record.header.engine else record.meta.request_id
            for record in store
        }


def tokenized(
    path: Path, tokenizer: ChatTokenizer, done: set[str], counts: Counter[str], *, limit: int | None,
    max_length: int,
) -> Iterator[TokenizedChat]:  # fmt: skip
    """Conversations of a file that are still to do; what is left out is counted with the reason."""
    for chat in read_chats(path, limit=limit):
        if chat.id in done:
            counts["done before"] += 1
            continue
        made = tokenizer.tokenize(chat)
        if isinstance(made, str):
            counts[f"left out: {made}"] += 1
        elif len(made.token_ids) > max_length:
            counts[f"left out: longer than {max_length:,} tokens"] += 1
        else:
            yield made


# ---- Hugging Face


def extract_hf(
    model_dir: Path,
    chats: Iterator[TokenizedChat],
    root: Path,
    counts: Counter[str],
    *,
    layers: Sequence[int] | None = None,
    final_hidden: str = "response",
    codec: str = "lossless",
    dtype: str | None = None,
    device: str = "cpu",
    stream: str = "extracted",
    progress: Progress | None = None,
) -> None:
    """Run the model on each conversation and store what the tap would have stored.

    Args:
        model_dir: A local Hugging Face directory.
        chats: What to run.
        root: Shards folder.
        counts: Grows by ``records``, ``tokens`` and ``response tokens``.
        layers: Aux layer ids (stream entering the layer); None takes ``(2, N // 2, N - 3)``.
        final_hidden: ``response``, ``all`` or ``none``, as the tap's setting.
        codec: As in the shard header.
        dtype: ``bfloat16``, ``float16`` or ``float32``; None takes the checkpoint's.
        device: A torch device.
        stream: Name of the stream to write.
        progress: Called with the number of records and a note.

    Raises:
        InputError: The model does not load, is not a causal one, or a layer is outside it.
    """
    from .shards.reference import ReferenceModel

    target = load_target(model_dir)
    num_layers = target.num_hidden_layers
    ids = tuple(sorted(set(layers or default_aux_layer_ids(num_layers))))
    if not all(1 <= i <= num_layers for i in ids):
        raise InputError(f"--layers are {list(ids)}; expected ids from 1 to {num_layers}")
    given = (
        target.text_config.get("dtype") or target.text_config.get("torch_dtype") or target.config.get("dtype")
    )
    dtype = dtype or str(given or "bfloat16")
    header = ShardHeader(
        stream=check_stream_name(stream),
        shard=0,
        created_unix_s=0.0,
        target=target_info(model_dir),
        aux_layer_ids=ids,
        final_hidden="none" if final_hidden == "none" else "post_norm",
        final_scope=final_hidden,  # type: ignore[arg-type]  # the layout checks it
        dtype=dtype,  # type: ignore[arg-type]
        codec=codec,  # type: ignore[arg-type]
        engine={"specdec_tap": __version__, "runner": "transformers"},
    )
    model = ReferenceModel(model_dir, dtype=dtype, device=device)
    # Before anything is written.
    model.check_captures(np.arange(min(8, target.vocab_size)))
    save_target(model_dir, root / "target")
    begun = time.monotonic()
    with ShardWriter(root, header) as writer:
        for chat in chats:
            started = time.time()
            tokens = np.array(chat.token_ids, np.int32)
            states = model.states(tokens, dtype, only={*ids, "final"})
            aux = np.stack([from_float(np.ascontiguousarray(states[i]), dtype) for i in ids])
            final = from_float(np.ascontiguousarray(states["final"]), dtype)
            _write(writer, chat, aux, final, started)
            counts.update(
                {"records": 1, "tokens": len(tokens), "response tokens": sum(b - a for a, b in chat.spans)}
            )
            if progress is not None:
                rate = counts["tokens"] / (time.monotonic() - begun)
                progress(counts["records"], f"{rate:,.0f} tokens/s")


def _write(
    writer: ShardWriter, chat: TokenizedChat, aux: np.ndarray, final: np.ndarray, started: float
) -> None:
    """One record: aux ``[A, T - 1, H]`` and final ``[T - 1, H]`` bits, final states where the scope says."""
    header = writer.header
    rows = aux.shape[1]
    first_final = {"all": 0, "none": rows, "response": max(chat.spans[0][0] - 1, 0)}[header.final_scope]
    pieces = []
    for start in range(0, rows, header.block_tokens):
        stop = min(start + header.block_tokens, rows)
        first = max(start, first_final)
        payload = encode_block(
            header,
            position=start,
            aux=aux[:, start:stop],
            final=final[first:stop] if first < stop else None,
            final_row=first - start if first < stop else 0,
        )
        pieces.append(Piece(start, writer.append_block(payload), 0, stop - start))
    spans, at = [], 0
    for a, b in chat.spans:
        spans += [Span(at, a, "prompt")] if a > at else []
        spans.append(Span(a, b, "response"))
        at = b
    writer.append_record(
        RecordMeta(
            request_id=chat.id,
            token_ids=np.array(chat.token_ids, np.int32),
            spans=tuple(spans),
            pieces=tuple(pieces),
            finish_reason="stop",
            started_unix_s=started,
            finished_unix_s=time.time(),
            sampling={},
            lora=None,
            flags=("given_answers",),
        )
    )


def target_info(model_dir: Path) -> TargetInfo:
    """The model as the tap describes it in its shards, so that both can lie in one folder."""
    target = load_target(model_dir)
    tokenizer = model_dir / "tokenizer.json"
    weights = fingerprint(target)
    quantization = target.config.get("quantization_config")
    return TargetInfo(
        name=model_dir.resolve().name,
        revision=None,
        architecture=str((target.config.get("architectures") or ["unknown"])[0]),
        model_type=str(target.config.get("model_type", "unknown")),
        num_hidden_layers=target.num_hidden_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        config_sha256=target.config_sha256,
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer.is_file() else None,
        quantization=str(quantization["quant_method"]) if isinstance(quantization, dict) else None,
        tables_sha256=weights.tables,
        layers_sha256=weights.layers,
    )


# ---- vLLM


def extract_vllm(
    model: str,
    chats: Iterator[TokenizedChat],
    root: Path,
    counts: Counter[str],
    *,
    layers: Sequence[int] | None = None,
    final_hidden: str = "response",
    codec: str = "lossless",
    dtype: str | None = None,
    max_length: int,
    engine: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Send conversations to an offline vLLM engine with the tap on, in a process of its own.

    Args:
        model: Folder or hub name.
        chats: What to send.
        root: Shards folder.
        counts: Grows by ``records``, ``tokens``, ``response tokens``, and ``lost: REASON``.
        layers: Aux layer ids; None takes the model's own default.
        final_hidden: ``response``, ``all`` or ``none``.
        codec: As in the shard header.
        dtype: Of the engine; None takes vLLM's choice: the checkpoint's, or 16 bits for float32 ones.
        max_length: Longest conversation, in tokens.
        engine: More arguments of ``vllm.LLM``.
        progress: Called with the number of records and a note.

    Raises:
        InputError: vLLM is not installed, or the engine ended; holds the last lines of what it said.
    """
    tap: dict[str, Any] = {
        "dir": str(root), "given_answers": True, "final_hidden": final_hidden, "codec": codec,
    }  # fmt: skip
    if layers is not None:
        tap["aux_layer_ids"] = list(layers)
    TapConfig.load(
        env={}, additional_config={"specdec_tap": tap}
    )  # wrong settings are said before vLLM starts
    job = {"model": model, "tap": tap, "engine": {"max_model_len": max_length + 1, **(engine or {})}}
    if dtype is not None:
        job["engine"]["dtype"] = dtype
    begun = time.monotonic()
    sent: Counter[str] = Counter()
    lost: dict[str, int] = {}
    before = _streams(root)  # of other servers, which may go on writing
    batch = list(itertools.islice(chats, BATCH))
    if not batch:  # all done before: no engine is needed
        return
    with _Offline(job) as worker:
        while batch:
            lost = worker.ask([{"id": c.id, "token_ids": c.token_ids, "spans": c.spans} for c in batch])
            sent.update({"records": len(batch), "tokens": sum(len(c.token_ids) for c in batch)})
            if progress is not None:
                progress(sent["records"], f"{sent['tokens'] / (time.monotonic() - begun):,.0f} tokens/s")
            batch = list(itertools.islice(chats, BATCH))
    wait_until_sealed(root, before)
    counts.update(_sums(root, before))
    counts.update({f"lost: {name}": n for name, n in lost.items()})
    if missing := sent["records"] - counts["records"] - sum(lost.values()):
        counts["lost: not stored"] += missing


def _streams(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} if root.is_dir() else set()


def _sums(root: Path, others: set[str]) -> Counter[str]:
    """Records and tokens in all streams but the ``others``."""
    with open_shards(root, follow=True) as store:
        totals = [info.totals for info in store.shards if info.stream not in others]
    return Counter(
        {
            "records": sum(t.num_records for t in totals),
            "tokens": sum(t.num_tokens for t in totals),
            "response tokens": sum(t.response_tokens for t in totals),
        }
    )


class _Offline:
    """The engine's process: one line of JSON in, one line out; its log goes to a file."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        ours, theirs = os.pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_TAP")}
        if Path(job["model"]).is_dir():
            env.setdefault("HF_HUB_OFFLINE", "1")
        if is_cpu_build():
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specdec_tap.vllm_plugin.offline", str(theirs), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=env,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self._replies = os.fdopen(ours, "rb")

    def ask(self, batch: list[dict[str, Any]]) -> dict[str, int]:
        """Send a batch; return its counts."""
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):  # what it printed before says more
            self._process.stdin.write(json.dumps(batch).encode() + b"\n")
            self._process.stdin.flush()
        line = self._replies.readline()
        if not line:
            raise InputError(f"the vLLM engine ended: {self._reason()}")
        return json.loads(line)

    def _reason(self) -> str:
        self._process.wait(timeout=60)
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 64_000))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        errors = [match[0] for line in lines if (match := _ERROR.search(line)) and "root cause" not in line]
        return errors[-1] if errors else " / ".join(lines[-3:]) or f"exit code {self._process.returncode}"

    def __enter__(self) -> _Offline:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._process.stdin is not None, "started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it ends, and the tap's writer seals
        try:
            self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        code = self._process.returncode
        if code and kind is None:
            raise InputError(f"the vLLM engine ended with exit code {code}: {self._reason()}")
        self._replies.close()
        self._log.close()


def wait_until_sealed(root: Path, others: Collection[str] = (), timeout_s: float = 120.0) -> None:
    """Wait for the tap's writer, which outlives the engine until its last shard is sealed.

    Args:
        root: Shards folder.
        others: Streams that are not waited for.
        timeout_s: In seconds.

    Raises:
        SpecdecTapError: A shard is still open after the time.
    """
    deadline = time.monotonic() + timeout_s
    while any(path.parent.name not in others for path in root.glob("*/*.open")):
        if time.monotonic() > deadline:
            raise SpecdecTapError(
                f"a shard in {str(root)!r} is still open {timeout_s:.0f} s after the engine ended; "
                f"'specdec-tap shards repair {root}' seals it"
            )
        time.sleep(0.1)
