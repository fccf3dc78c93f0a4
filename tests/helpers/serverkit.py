"""Folders that a dashboard is opened on: real shards with readable text, status files, logs of runs."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec_tap.capture.ring import WORKER_COUNTERS, WRITER_COUNTERS
from specdec_tap.shards import (
    BlockRef,
    Piece,
    RecordMeta,
    ShardHeader,
    ShardWriter,
    Span,
    TargetInfo,
    encode_block,
)

BLOCK = 16


def make_header(stream: str = "s0", **target: object) -> ShardHeader:
    fields = dict(
        name="tiny", revision=None, architecture="LlamaForCausalLM", model_type="llama", num_hidden_layers=8,
        hidden_size=8, vocab_size=300, config_sha256="c" * 64, tokenizer_sha256=None, quantization=None,
    )  # fmt: skip
    return ShardHeader(
        stream=stream, shard=0, created_unix_s=0.0, target=TargetInfo(**(fields | target)),
        aux_layer_ids=(2, 4, 5), block_tokens=BLOCK, engine={"vllm": "0.32.0", "runner": "v1"},
    )  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that any text has token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
States = Callable[[np.ndarray, int, int], np.ndarray]
"""(token ids, start, stop) to bfloat16 bits ``[3 aux layers and the final state, stop - start, H]``."""


def ids_of(text: str | np.ndarray) -> np.ndarray:
    return np.array(TOKENIZER.encode(text).ids, np.int32) if isinstance(text, str) else text


def put(
    writer: ShardWriter,
    prompt: str | np.ndarray,
    response: str | np.ndarray,
    *,
    reuse: tuple[RecordMeta, int] | None = None,
    started: float = 1_796_045_800.0,
    request_id: str = "chatcmpl-1",
    gap: int = 0,
    lora: str | None = None,
    states: States | None = None,
) -> RecordMeta:
    """Store one conversation.

    Args:
        writer: Of the stream.
        prompt: Text of the prompt, or token ids of another tokenizer.
        response: Text of the answer, likewise.
        reuse: ``(record, tokens)``: its first tokens' states are taken from that record's blocks.
        started: When the request came in.
        request_id: As the engine named it.
        gap: Leave the first so many positions without states.
        lora: Adapter.
        states: Gives the states of rows ``[start, stop)`` of the token ids; random ones by default.
    """
    ids = np.concatenate([ids_of(prompt), ids_of(response)])
    num_prompt, rows = len(ids_of(prompt)), len(ids) - 1
    pieces = []
    at = gap
    if reuse is not None:
        source, tokens = reuse
        for piece in source.pieces:
            stop = min(piece.stop, tokens)
            if piece.position < stop:
                pieces.append(
                    Piece(
                        piece.position, piece.block, piece.row_start, piece.row_start + stop - piece.position
                    )
                )
        at = tokens
    header = writer.header
    rng = np.random.default_rng(len(ids))
    for start in range(at, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        if states is None:
            bits = rng.integers(0x3C00, 0x4200, (4, stop - start, header.hidden_size)).astype(np.uint16)
        else:
            bits = states(ids, start, stop)
        first = max(start, num_prompt - 1)
        final = bits[3, first - start :] if first < stop else None
        payload = encode_block(
            header, position=start, aux=bits[:3], final=final, final_row=first - start if first < stop else 0
        )
        ref = writer.append_block(payload, position=start, num_rows=stop - start)
        pieces.append(Piece(start, BlockRef(*ref), 0, stop - start))
    spans = [Span(0, num_prompt, "prompt")] if num_prompt else []
    meta = RecordMeta(
        request_id=request_id, token_ids=ids, spans=(*spans, Span(num_prompt, len(ids), "response")),
        pieces=tuple(pieces), finish_reason="stop", started_unix_s=started, finished_unix_s=started + 1.5,
        sampling={"temperature": 0.0}, lora=lora,
    )  # fmt: skip
    writer.append_record(meta)
    return meta


def put_target(root: Path) -> None:
    """Write the tokenizer where the tap puts it."""
    (root / "target").mkdir(exist_ok=True)
    (root / "target" / "tokenizer.json").write_text(TOKENIZER.to_str())


def put_tiktoken(root: Path, pieces: list[bytes], special: dict[int, str], *, code: str) -> None:
    """Write the files of a tiktoken model in their place, with its tokenizer's code as the hub has it."""
    folder = root / "target"
    folder.mkdir(exist_ok=True)
    lines = [base64.b64encode(piece).decode() + f" {rank}" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(i): {"content": text, "special": True} for i, text in special.items()}
    config = {
        "added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_kimi.py").write_text(code)


def make_folder(root: Path, *, conversations: int = 5) -> Path:
    """A sealed shard of small conversations with a tokenizer beside it."""
    root.mkdir(parents=True, exist_ok=True)
    put_target(root)
    with ShardWriter(root, make_header(), min_free_bytes=0) as writer:
        for i in range(conversations):
            put(writer, f"question {i}? ", f"answer number {i} " * (i + 1), request_id=f"chatcmpl-{i:04d}")
    return root


def write_run(
    folder: Path, *, steps: int = 30, evals: int = 3, end: bool = True, started: float = 1_796_047_000.0
) -> Path:
    """A run's log as the trainer writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict] = [
        {"kind": "start", "time_unix_s": started, "settings": {"ttt_steps": 4, "lr": 0.002},
         "drafter": {"architecture": "EAGLE-3 llama", "parameters": 9_809_856}, "shards": "shards",
         "training": {"records": 5, "tokens": 500, "generated_tokens": 300, "supervised_tokens": 290,
                      "left_out": {"after rows that were not captured": 4}},
         "held_out": {"records": 1, "tokens": 50, "generated_tokens": 30, "supervised_tokens": 29,
                      "left_out": {}}}
    ]  # fmt: skip
    for i in range(1, steps + 1):
        step = i * 10
        lines.append(
            {"kind": "train", "time_unix_s": started + step, "step": step, "epoch": step / 100,
             "progress": i / steps, "loss": [20 / i + k for k in range(4)],
             "accuracy": [0.3 * i / steps / (k + 1) for k in range(4)], "rows": [100] * 4,
             "tokens": step * 900, "tokens_per_s": 1500.0 + i, "data_wait": 0.002,
             "peak_rss_bytes": 3_000_000_000, "lr": [0.002, 0.001]}
        )  # fmt: skip
        if evals and i % max(1, steps // evals) == 0:
            lines.append(
                {"kind": "eval", "time_unix_s": started + step, "step": step, "epoch": 1,
                 "tokens": step * 900, "loss": [5.0, 5.1, 5.2, 5.3], "accuracy": [0.3, 0.2, 0.1, 0.05],
                 "simulated_acceptance_length": 1 + 0.4 * i / steps,
                 "simulated_acceptance_per_position": [0.3, 0.08, 0.02], "drafts": 900, "rows": 1000}
            )  # fmt: skip
    if end:
        lines.append(
            {"kind": "end", "time_unix_s": started + 400, "step": steps * 10, "tokens": steps * 9000,
             "seconds": 400.0, "tokens_per_s": 1520.0, "best": 1.4, "best_step": steps * 10,
             "interrupted": False, "peak_rss_bytes": 3_000_000_000}
        )  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


EVALUATION = {
    "acceptance_length": 1.358, "acceptance_rate": 0.12, "acceptance_per_position": [0.262, 0.072, 0.023],
    "num_drafts": 9000, "num_draft_tokens": 27000, "num_accepted_tokens": 3222,
    "accepted_per_position": [2358, 648, 216], "requests": 80, "too_long": 0, "output_tokens": 10000,
    "output_tokens_per_s": 512.0, "baseline_output_tokens_per_s": 400.0, "speedup": 1.28,
    "identical_answers": 80, "compared_answers": 80,
    "loads": [
        {"concurrency": 1, "output_tokens_per_s": 90.0, "baseline_output_tokens_per_s": 60.0, "speedup": 1.5},
        {"concurrency": 8, "output_tokens_per_s": 512.0, "baseline_output_tokens_per_s": 400.0,
         "speedup": 1.28},
        {"concurrency": 32, "output_tokens_per_s": 760.0, "baseline_output_tokens_per_s": 750.0,
         "speedup": 1.0133},
    ],
    "categories": {
        "writing": {"acceptance_length": 1.2, "acceptance_rate": 0.1,
                    "acceptance_per_position": [0.17, 0.02, 0.01], "num_drafts": 4000},
        "math": {"acceptance_length": 1.6, "acceptance_rate": 0.2,
                 "acceptance_per_position": [0.4, 0.15, 0.05], "num_drafts": 5000},
    },
}  # fmt: skip


def status_json(
    stream: str,
    *,
    worker: dict | None = None,
    writer: dict | None = None,
    dp_rank: int = 0,
    age_s: float = 0.0,
    **more: object,
) -> dict:
    """A status as the writer process writes it, with counters that were not given at 0."""
    now = time.time()
    return {
        "stream": stream,
        "pid": 4242,
        "closed": False,
        "started_unix_s": now - 100,
        "updated_unix_s": now - age_s,
        "worker": dict.fromkeys(WORKER_COUNTERS, 0) | (worker or {}),
        "writer": dict.fromkeys(WRITER_COUNTERS, 0) | (writer or {}),
        "live_requests": 0,
        "ring_bytes": 1 << 26,
        "ring_used_bytes": 0,
        "disk_free_bytes": 50 * 10**9,
        "last_error": None,
        "engine": {"vllm": "0.32.0+cpu", "runner": "v1", "dp_rank": dp_rank},
        "aux_layer_ids": [2, 4, 5],
        **more,
    }


def write_status(root: Path, stream: str, **values: object) -> dict:
    """Write the status file of a stream into a shards folder; returns what is in it."""
    data = status_json(stream, **values)
    folder = root / stream
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".status.tmp"
    temporary.write_text(json.dumps(data))
    temporary.replace(folder / ".status.json")
    return data


def make_many(root: Path, count: int) -> Path:
    """A folder of one shard with many short records that share blocks."""
    root.mkdir(parents=True)
    header = make_header()
    ids = np.arange(40, dtype=np.int32)
    bits = np.full((3, BLOCK, header.hidden_size), 0x3F80, np.uint16)
    payload = encode_block(header, position=0, aux=bits, final=None, final_row=0)
    with ShardWriter(root, header, min_free_bytes=0, fsync_interval_s=1e9) as writer:
        for i in range(count):
            if i % 50 == 0:
                block = BlockRef(*writer.append_block(payload, position=0, num_rows=BLOCK))
            stop = 20 + i % 20
            writer.append_record(
                RecordMeta(
                    request_id=f"req-{i:06d}", token_ids=ids[:stop],
                    spans=(Span(0, 5, "prompt"), Span(5, stop, "response")),
                    pieces=(Piece(0, block, 0, BLOCK),), finish_reason="stop",
                    started_unix_s=float(i), finished_unix_s=i + 1.0, sampling={},
                )
            )  # fmt: skip
    return root
