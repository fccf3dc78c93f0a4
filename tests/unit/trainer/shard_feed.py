"""Captures learnable records into real shards, as a server's writer process would."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from trainer_fakes import LAYERS, TARGET_CONFIG, learnable_store

from specdec_tap.shards import (
    Piece,
    RecordMeta,
    ShardHeader,
    ShardWriter,
    Span,
    TargetInfo,
    encode_block,
)


def append_records(
    out: Path, target: Path, *, first: int, count: int, pause_s: float, tokens: int = 30
) -> None:
    """Append records ``[first, first + count)`` of ``learnable_store``, one every ``pause_s`` seconds."""
    header = ShardHeader(
        stream=f"feed-{first}", shard=0, created_unix_s=0.0,
        target=TargetInfo(
            name="tiny", revision=None, architecture="LlamaForCausalLM", model_type="llama",
            num_hidden_layers=TARGET_CONFIG["num_hidden_layers"], hidden_size=TARGET_CONFIG["hidden_size"],
            vocab_size=TARGET_CONFIG["vocab_size"], config_sha256="0" * 64, tokenizer_sha256=None,
            quantization=None,
        ),
        aux_layer_ids=LAYERS, final_hidden="post_norm", final_scope="all", dtype="float32", codec="lossless",
        engine={"vllm": "none"},
    )  # fmt: skip
    writer = ShardWriter(out, header, fsync_interval_s=0.0)
    store = learnable_store(target, records=first + count, tokens=tokens)
    for i in range(first, first + count):
        record = store[i]
        aux = record._aux.view(np.uint32).transpose(1, 0, 2)
        final = record._final.view(np.uint32)
        pieces = []
        for start in range(0, record.num_rows, header.block_tokens):
            stop = min(start + header.block_tokens, record.num_rows)
            payload = encode_block(
                header, position=start, aux=aux[:, start:stop], final=final[start:stop], final_row=0
            )
            pieces.append(Piece(start, writer.append_block(payload), 0, stop - start))
        spans = tuple(Span(s.start, s.stop, s.kind) for s in record.spans)
        writer.append_record(
            RecordMeta(
                request_id=f"r{i}",
                token_ids=record.token_ids,
                spans=spans,
                pieces=tuple(pieces),
                finish_reason="stop",
                started_unix_s=1.0,
                finished_unix_s=2.0,
                sampling={},
            )
        )
        writer.flush()
        time.sleep(pause_s)
    writer.close()
