"""How small and how fast: the shard codecs against ZipNN, blosc2, zstd and gzip on real hidden states.

    pip install zipnn blosc2                     # the peers; those that are missing are left out
    python benchmarks/codec.py --shards shards/  # states that the tap captured
    python benchmarks/codec.py --model MODEL_DIR # or: states of a Hugging Face forward over docs/*.md

Prints one JSON line. ``ratio`` is original bytes over stored bytes, ``encode_mb_s`` and ``decode_mb_s``
are megabytes (10^6) of original numbers per second on one core, splitting and transposing included. The
unit is a block of 64 tokens with all aux layers and the final state. Every result is checked bit for
bit. Peers get each block, and again 4 MB at a time, and are credited with the better of the two in every
number. ``wide`` repeats our codec and the peers on hidden sizes 4096 and 7168, made of real channels: each
channel of the wide state is a channel of the real one over other tokens, times a power of two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zstandard

from specdec_tap.errors import InputError, SpecdecTapError
from specdec_tap.shards import ShardHeader, TargetInfo, decode_block, encode_block, open_shards

ROWS = 64
LARGE_BYTES = 4_000_000


def blocks_from_shards(path: Path, wanted: int) -> np.ndarray:
    """uint16 [blocks, 64, A + 1, H] from positions that have aux and final states."""
    out: list[np.ndarray] = []
    with open_shards(path) as store:
        if store.header.dtype != "bfloat16":
            raise InputError(f"{path} holds {store.header.dtype} states; this benchmark compares bfloat16")
        for record in store:
            for start, stop in record.final_span:
                for at in range(start, stop - ROWS + 1, ROWS):
                    aux, final = record.aux(at, at + ROWS), record.final(at, at + ROWS)
                    out.append(np.concatenate([aux, final[:, None]], axis=1))
            if len(out) >= wanted:
                break
    if not out:
        raise InputError(f"{path} has no response of {ROWS} tokens; send longer requests")
    return np.stack(out[:wanted])


def blocks_from_model(path: Path, wanted: int) -> np.ndarray:
    """uint16 [blocks, 64, 4, H] of a bfloat16 forward over this repository's documentation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    layers = model.config.get_text_config().num_hidden_layers
    text = "\n".join(p.read_text() for p in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids
    out: list[np.ndarray] = []
    with torch.inference_mode():
        for start in range(0, ids.shape[1] - 512, 512):
            states = model(ids[:, start : start + 512], output_hidden_states=True).hidden_states
            picked = torch.stack([states[i][0] for i in (2, layers // 2, layers - 3, layers)], dim=1)
            bits = picked.view(torch.int16).numpy().view(np.uint16)
            out += list(bits.reshape(-1, ROWS, *bits.shape[1:]))
            if len(out) >= wanted:
                break
    return np.stack(out[:wanted])


def widen(blocks: np.ndarray, hidden: int, count: int, seed: int = 0) -> np.ndarray:
    """Wide states [count, 64, A + 1, hidden]: real channels over other tokens, times powers of two."""
    rng = np.random.default_rng(seed)
    num_blocks, rows, layers, narrow = blocks.shape
    out = np.empty((count, rows, layers, hidden), np.uint16)
    for layer in range(layers):
        channel = rng.integers(0, narrow, hidden)
        shift = np.round(rng.normal(0, 1, hidden)).astype(np.int32)
        for number in range(count):
            source = rng.integers(0, num_blocks, hidden)
            bits = blocks[source, :, layer, channel].T.astype(np.int32)
            exponent = (bits >> 7) & 0xFF
            moved = np.where((exponent > 8) & (exponent < 240), bits + (shift << 7), bits)
            out[number, :, layer] = moved.astype(np.uint16)
    return out


def header_for(blocks: np.ndarray, codec: str) -> ShardHeader:
    """A header whose blocks have the shape of ``blocks``."""
    layers = blocks.shape[2] - 1
    target = TargetInfo(
        name="benchmark",
        revision=None,
        architecture="",
        model_type="",
        num_hidden_layers=layers + 1,
        hidden_size=blocks.shape[3],
        vocab_size=1,
        config_sha256="",
        tokenizer_sha256=None,
        quantization=None,
    )
    return ShardHeader(
        stream="benchmark",
        shard=0,
        created_unix_s=0.0,
        target=target,
        aux_layer_ids=tuple(range(layers)),
        codec=codec,
        block_tokens=ROWS,
    )


def measure(
    units: list[object], raw_bytes: int, encode: Callable, decode: Callable, seconds: float
) -> dict[str, float]:
    """Ratio and the median and best speed of several rounds; results are dropped, as a reader's would be."""
    packed = [encode(u) for u in units]
    result = {"ratio": raw_bytes / sum(len(p) for p in packed)}
    for name, function, inputs in (("encode", encode, units), ("decode", decode, packed)):
        rounds: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(rounds) < 3:
            begun = time.perf_counter()
            for item in inputs:
                function(item)
            rounds.append(time.perf_counter() - begun)
        result[f"{name}_mb_s"] = raw_bytes / min(rounds) / 1e6
        result[f"{name}_median_mb_s"] = raw_bytes / statistics.median(rounds) / 1e6
    return result


def ours(blocks: np.ndarray, codec: str, seconds: float) -> dict[str, float]:
    """Our codec on blocks, checked: bit for bit if lossless, by its error if not."""
    header = header_for(blocks, codec)
    for block in blocks:
        back = decode_block(header, encode_one(header, block))
        if codec == "lossless" and not (
            np.array_equal(back.aux.transpose(1, 0, 2), block[:, :-1])
            and np.array_equal(back.final, block[:, -1])
        ):
            raise SystemExit("our codec lost something")
    result = measure(
        list(blocks),
        blocks.nbytes,
        lambda block: encode_one(header, block),
        lambda packed: decode_block(header, packed),
        seconds,
    )
    if codec != "lossless":
        back = decode_block(header, encode_one(header, blocks[0]))
        for name, got, truth in (
            ("aux", back.aux.transpose(1, 0, 2), blocks[0][:, :-1]),
            ("final", back.final, blocks[0][:, -1]),
        ):
            a, b = as_float(got), as_float(truth)
            error = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
            result[f"{name}_relative_error_median"] = float(np.median(error))
    return result


def encode_one(header: ShardHeader, block: np.ndarray) -> bytes:
    """One block [64, A + 1, H] through ``encode_block``."""
    return encode_block(header, position=0, aux=block[:, :-1].transpose(1, 0, 2), final=block[:, -1])


def as_float(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def peers() -> dict[str, tuple[Callable, Callable]]:
    """name -> (encode bytes, decode bytes), for those that are installed."""
    found: dict[str, tuple[Callable, Callable]] = {}
    try:
        import zipnn

        coder = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1)
        # It reorders bits in the buffer it is given, even in an immutable one, so it gets a copy.
        found["zipnn"] = (lambda data: coder.compress(bytearray(data)), coder.decompress)
    except ImportError as err:
        print(f"zipnn is left out: {err}", file=sys.stderr)
    try:
        import blosc2

        blosc2.set_nthreads(1)
        options = {"typesize": 2, "clevel": 5, "codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE]}
        found["blosc2_shuffle_zstd"] = (
            lambda data: blosc2.compress2(data, **options, nthreads=1),
            lambda data: blosc2.decompress2(data, nthreads=1),
        )
        fast = options | {"clevel": 1}
        found["blosc2_shuffle_zstd_level_1"] = (
            lambda data: blosc2.compress2(data, **fast, nthreads=1),
            lambda data: blosc2.decompress2(data, nthreads=1),
        )
    except ImportError as err:
        print(f"blosc2 is left out: {err}", file=sys.stderr)
    for level in (1, 3):
        packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        found[f"zstd_level_{level}"] = (packer.compress, unpacker.decompress)
    found["gzip_level_1"] = (lambda data: gzip.compress(data, 1), gzip.decompress)
    found["gzip_level_6"] = (lambda data: gzip.compress(data, 6), gzip.decompress)
    return found


def measure_peers(blocks: np.ndarray, seconds: float) -> dict[str, dict[str, float]]:
    """Each peer on single blocks and on 4 MB units; the better number of the two."""
    single = [block.tobytes() for block in blocks]
    per_unit = max(1, LARGE_BYTES // len(single[0]))
    large = [b"".join(single[i : i + per_unit]) for i in range(0, len(single), per_unit)]
    results: dict[str, dict[str, float]] = {}
    for name, (encode, decode) in peers().items():
        best: dict[str, float] = {}
        for units in (single, large):
            # Some peers are a hundred times slower than ours: a part of the data tells the same.
            part = units[: max(1, len(units) // 8)] if name.startswith("gzip") else units
            for unit in part[:3]:
                if bytes(decode(encode(unit))) != unit:
                    raise SystemExit(f"{name} lost something")
            for key, value in measure(part, sum(map(len, part)), encode, decode, seconds / 4).items():
                best[key] = max(best.get(key, 0.0), value)
        results[name] = best
    return results


def main() -> int:
    """Run everything and print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shards", type=Path, metavar="DIR", help="captured shards")
    source.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument("--blocks", type=int, default=160, metavar="N", help="blocks to use (default: 160)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time per measurement (default: 2)")
    parser.add_argument("--no-wide", action="store_true", help="leave out hidden sizes 4096 and 7168")
    args = parser.parse_args()
    try:
        blocks = (
            blocks_from_shards(args.shards, args.blocks)
            if args.shards
            else blocks_from_model(args.model, args.blocks)
        )
    except SpecdecTapError as err:
        print(f"codec.py: {err}", file=sys.stderr)
        return 2
    result: dict[str, object] = {
        "benchmark": "codec",
        "blocks": len(blocks),
        "hidden_size": blocks.shape[3],
        "layers": blocks.shape[2],
        "raw_bytes": blocks.nbytes,
        "machine": cpu_name(),
        "numpy": np.__version__,
        "zstandard": zstandard.__version__,
    }
    result |= ours(blocks, "lossless", args.seconds)
    result["peers"] = measure_peers(blocks, args.seconds)
    result["lossy"] = {codec: ours(blocks, codec, args.seconds / 2) for codec in ("fp8", "int8")}
    if not args.no_wide:
        result["wide"] = {}
        for hidden in (4096, 7168):
            wide = widen(blocks, hidden, 16)
            result["wide"][str(hidden)] = ours(wide, "lossless", args.seconds)
            result["wide"][str(hidden)]["peers"] = measure_peers(wide, args.seconds / 2)
    print(json.dumps(result))
    return 0


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
