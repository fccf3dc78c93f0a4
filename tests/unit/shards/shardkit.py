"""Builders shared by the shard tests."""

from __future__ import annotations

import numpy as np

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


def make_header(**changes: object) -> ShardHeader:
    target_fields = dict(
        name="tiny", revision=None, architecture="LlamaForCausalLM", model_type="llama", num_hidden_layers=8,
        hidden_size=16, vocab_size=100, config_sha256="c" * 64, tokenizer_sha256=None, quantization=None,
    )  # fmt: skip
    target_fields |= {k: changes.pop(k) for k in list(changes) if k in target_fields}
    fields = dict(
        stream="s0", shard=0, created_unix_s=0.0, target=TargetInfo(**target_fields), aux_layer_ids=(2, 4, 5),
        engine={"vllm": "0.32.0", "runner": "v1"},
    )  # fmt: skip
    return ShardHeader(**(fields | changes))


def random_states(header: ShardHeader, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bits that look like hidden states: aux [A, rows, H] and final [rows, H]."""
    rng = np.random.default_rng(seed)
    shape = (header.num_aux + 1, rows, header.hidden_size)
    scale = np.exp2(rng.integers(-6, 5, (header.num_aux + 1, 1, header.hidden_size))).astype(np.float32)
    floats = rng.standard_normal(shape, dtype=np.float32) * scale
    if header.dtype == "bfloat16":
        bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    elif header.dtype == "float16":
        bits = floats.astype(np.float16).view(np.uint16)
    else:
        bits = floats.view(np.uint32)
    return bits[:-1], bits[-1]


def write_request(
    writer: ShardWriter, prompt: int, response: int, *, seed: int = 0, request_id: str = "req", tokens=None
) -> tuple[RecordMeta, np.ndarray, np.ndarray]:
    """Store one request the plain way, final states at response positions only.

    Returns:
        The record, aux bits [A, T-1, H] and final bits [T-1, H] (all positions, stored or not).
    """
    header = writer.header
    total = prompt + response
    rows = total - 1
    aux, final = random_states(header, rows, seed)
    pieces = []
    for start in range(0, rows, header.block_tokens):
        stop = min(start + header.block_tokens, rows)
        first = max(start, prompt - 1)
        kept = final[first:stop] if first < stop and header.final_hidden != "none" else None
        payload = encode_block(
            header,
            position=start,
            aux=aux[:, start:stop],
            final=kept,
            final_row=first - start if first < stop else 0,
        )
        ref = writer.append_block(payload, position=start, num_rows=stop - start)
        pieces.append(Piece(start, BlockRef(*ref), 0, stop - start))
    rng = np.random.default_rng(seed + 1000)
    ids = rng.integers(0, header.target.vocab_size, total).astype(np.int32) if tokens is None else tokens
    meta = RecordMeta(
        request_id=request_id,
        token_ids=ids,
        spans=(Span(0, prompt, "prompt"), Span(prompt, total, "response")),
        pieces=tuple(pieces),
        finish_reason="stop",
        started_unix_s=1.0,
        finished_unix_s=2.5,
        sampling={"temperature": 0.0, "max_tokens": response, "stop": None},
    )
    writer.append_record(meta)
    return meta, aux, final
