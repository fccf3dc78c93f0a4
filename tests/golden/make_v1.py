"""Make the golden shards of format version 1. A file that exists is never written again.

    python tests/golden/make_v1.py

Every reader of the format, of this version or a later one, must decode ``v1/STREAM/000001.safetensors`` to
what ``v1/expected.json`` says. The states follow a formula, so that nobody needs this program to check them.
The last two came later, with modes 3 and 4 of sections; writing them needs the compiled codec.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

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
    open_shards,
)

HERE = Path(__file__).parent
VARIANTS = [
    ("bfloat16-lossless", 8),
    ("float16-lossless", 5),
    ("float32-lossless", 8),
    ("bfloat16-fp8", 8),
    ("bfloat16-int8", 8),
    ("float16-lossless-huffman", 64),
    ("bfloat16-lossless-compact", 64),
]


def states(num_aux: int, rows: int, hidden: int, dtype: str) -> np.ndarray:
    """Bits [num_aux + 1, rows, hidden] of a smooth formula with a zero, an infinity and a large channel."""
    layer, row, channel = np.meshgrid(
        np.arange(num_aux + 1), np.arange(rows), np.arange(hidden), indexing="ij"
    )
    values = np.sin(0.7 * row + 1.3 * channel + 2.1 * layer) * np.exp2(channel % 4 - 2.0)
    values[:, :, 1] += 50.0
    values[0, 2, 3] = 0.0
    values = values.astype(np.float32)
    if dtype == "float32":
        bits = values.view(np.uint32)
    elif dtype == "float16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    bits = bits.copy()
    bits[0, 3, 2] = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    return bits


def make(stream: str, hidden: int) -> dict[str, object]:
    """Write one golden shard: a request of 40 tokens, one that shares its first block, one with a gap."""
    dtype, codec = stream.split("-")[:2]
    header = ShardHeader(
        stream=stream,
        shard=0,
        created_unix_s=0.0,
        target=TargetInfo(
            name="golden",
            revision="r1",
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_hidden_layers=8,
            hidden_size=hidden,
            vocab_size=1000,
            config_sha256="0" * 64,
            tokenizer_sha256=None,
            quantization=None,
        ),
        aux_layer_ids=(2, 5),
        dtype=dtype,
        codec=codec,
        block_tokens=32,
        engine={"vllm": "0.32.0", "tap": "0.1.0", "runner": "v1"},
    )
    bits = states(2, 39, hidden, dtype)
    with ShardWriter(HERE / "v1", header) as writer:
        blocks = []
        for start, stop, first in ((0, 32, 19), (32, 39, 32)):
            payload = encode_block(
                header,
                position=start,
                aux=bits[:2, start:stop],
                final=bits[2, first:stop],
                final_row=first - start,
            )
            blocks.append(writer.append_block(payload))
        whole = RecordMeta(
            request_id="request-a",
            token_ids=(np.arange(40) * 7 % 1000).astype(np.int32),
            spans=(Span(0, 20, "prompt"), Span(20, 40, "response")),
            pieces=(Piece(0, BlockRef(*blocks[0]), 0, 32), Piece(32, BlockRef(*blocks[1]), 0, 7)),
            finish_reason="stop",
            started_unix_s=1_700_000_000.25,
            finished_unix_s=1_700_000_001.5,
            sampling={"temperature": 0.0, "max_tokens": 20, "seed": None},
        )
        writer.append_record(whole)
        writer.append_record(
            dataclasses.replace(
                whole,
                request_id="request-b",
                token_ids=whole.token_ids[:30],
                spans=(Span(0, 20, "prompt"), Span(20, 30, "response")),
                pieces=(Piece(0, BlockRef(*blocks[0]), 0, 16),),
                finish_reason="length",
                lora="adapter",
                flags=("sampled",),
            )
        )
    with open_shards(HERE / "v1", streams=[stream]) as store:
        records = []
        for record in store:
            meta = dataclasses.asdict(record.meta)
            meta["token_ids"] = meta["token_ids"].tolist()
            stop = record.meta.pieces[-1].stop
            entry = {"id": record.id, "meta": meta, "gaps": record.gaps, "final_span": record.final_span}
            entry["aux_bits"] = record.aux(0, stop).tolist()
            entry["final_bits"] = [record.final(a, b).tolist() for a, b in record.final_span]
            records.append(entry)
        return {"header": store.header.to_json(), "records": records}


def main() -> None:
    """Write what does not exist yet."""
    expected_path = HERE / "v1" / "expected.json"
    expected = json.loads(expected_path.read_text()) if expected_path.exists() else {}
    for stream, hidden in VARIANTS:
        if stream not in expected:
            expected[stream] = make(stream, hidden)
    expected_path.write_text(json.dumps(expected, separators=(",", ":"), sort_keys=True) + "\n")
    for lock in (HERE / "v1").rglob(".writer.lock"):
        lock.unlink()


if __name__ == "__main__":
    main()
