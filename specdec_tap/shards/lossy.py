"""The lossy codecs: two ways to spend about six and a half bits a number.

``fp8`` keeps sign, exponent and three mantissa bits, the precision of an e4m3 float, with the exponent
relative to its channel's level, so nothing overflows or underflows: every number is within 1/16 of itself.

``int8`` rounds to multiples of a step: the channel's level (a power of two) times a step of the row. On
the same bytes its error is half that of ``fp8``, but it is absolute within a row and channel, so a number
far below its channel's level can become 0. Numbers too large for the range are kept exactly.

In both, final states are stored as ``int8`` with a finer step: they are what a drafter is taught with.
Zero stays zero, and what is not finite stays not finite. Decoding is exact arithmetic: any two readers
get the same bits.

Sections of an ``fp8`` matrix [n, W]: centres (W bytes), signs (W bits), symbols (n x W bytes: sign,
four-bit centred exponent, three mantissa bits), escapes (true exponents where the centred one is 15).
Sections of an ``int8`` matrix [n, L x H]: centres (W bytes), steps (float32 [n, L]), symbols (n x W
signed bytes), escapes (raw bits where the symbol is -128). Symbols and escapes are in the order of
the lossless codec.
"""

from __future__ import annotations

import numpy as np

from ..errors import CorruptShardError
from .sections import CONSTANT, MIN_CENTRED_ROWS, SECTION, Sections, from_groups, section, to_groups, u1, u2

MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
EXPONENT_BIAS = {"bfloat16": 127, "float16": 15, "float32": 127}

FP8_OFFSET = 11
"""Centred exponents 0 to 14 stand for centre - 11 to centre + 3; 15 is an escape."""
FP8_ESCAPE = 15
INT8_ESCAPE = -128
AUX_STEPS = 20.0
"""Steps per standard deviation: relative error 1.5 %, 6.4 bits."""
FINAL_STEPS = 36.0
"""Relative error 0.85 %, 7.2 bits; the target's top token changes at 0.7 % of positions of SmolLM2."""


def _group(width: int) -> int:
    return 8 if width % 8 == 0 else 1


def _levels(exponents: np.ndarray) -> np.ndarray:
    """Level of each channel [W] from exponents [n, W]: the mean over the largest of four rows."""
    quarter = len(exponents) // 4
    if not quarter:
        return exponents.max(axis=0)
    top = exponents[: 4 * quarter].reshape(4, quarter, -1).max(axis=0)
    return (top.sum(axis=0, dtype=np.uint32) // quarter).astype(u1)


def _matrix(layers: np.ndarray) -> np.ndarray:
    """Bits [L, n, H] as a contiguous [n, L * H]."""
    num_layers, rows, hidden = layers.shape
    return np.ascontiguousarray(layers.transpose(1, 0, 2)).reshape(rows, num_layers * hidden)


# ---- fp8


def encode_fp8(layers: np.ndarray, dtype: str) -> list[bytes]:
    """Sections for bits [L, n, H]."""
    bits = _matrix(layers)
    rows, width = bits.shape
    drop = MANTISSA_BITS[dtype] - 3
    word = bits.dtype.type
    sign_bit = word(1 << (bits.dtype.itemsize * 8 - 1))
    size = bits & word(int(sign_bit) - 1)
    infinity = word(int(sign_bit) - 1 - ((1 << MANTISSA_BITS[dtype]) - 1))
    # Round half to even; a carry moves to the exponent. Finite stays finite, NaN stays NaN.
    rounded = (size + word((1 << (drop - 1)) - 1) + ((size >> word(drop)) & word(1))) >> word(drop)
    top = word(int(infinity) >> drop)
    rounded = np.minimum(rounded, top - word(1))
    rounded = np.where(size < infinity, rounded, top + (size > infinity).astype(bits.dtype)).astype(u2)
    exponents = (rounded >> 3).astype(u1)
    negative = (bits & sign_bit) != 0
    if rows >= MIN_CENTRED_ROWS:
        centres = _levels(exponents)
        signs = negative.sum(axis=0, dtype=np.uint32) > rows // 2
        parts = section(centres.tobytes(), zstd=True)
        parts += section(np.packbits(signs, bitorder="little").tobytes(), zstd=False)
    else:
        centres = np.full(width, int(exponents.mean()) + 2, u1)
        signs = np.zeros(width, bool)
        parts = [SECTION.pack(CONSTANT, 1), centres[:1].tobytes(), SECTION.pack(CONSTANT, 1), b"\0"]
    centred = exponents.astype(np.int16) - centres + FP8_OFFSET
    escaped = (centred < 0) | (centred >= FP8_ESCAPE)
    centred[escaped] = FP8_ESCAPE
    symbols = ((negative ^ signs).astype(u1) << 7) | (centred.astype(u1) << 3) | (rounded & u2(7)).astype(u1)
    ordered = np.empty(rows * width, u1)
    to_groups(symbols, ordered, _group(width))
    ordered_exponents = np.empty(rows * width, u1)
    to_groups(exponents, ordered_exponents, _group(width))
    escapes = ordered_exponents[(ordered & u1(0x78)) == FP8_ESCAPE << 3]
    parts += section(ordered, zstd=True)
    return parts + section(escapes.tobytes(), zstd=False)


def decode_fp8(sections: Sections, rows: int, width: int, dtype: str) -> np.ndarray:
    """Bits [rows, width]."""
    group = _group(width)
    centres = sections.take(width, "centres")
    signs = np.unpackbits(sections.take(-(-width // 8), "signs"), bitorder="little")[:width]
    ordered = sections.take(rows * width, "symbols")
    escapes = sections.take_some(rows * width, "escapes")
    symbols = np.empty((rows, width), u1)
    from_groups(ordered, symbols, group)
    exponents = ((symbols >> 3) & u1(15)) + (centres - u1(FP8_OFFSET))
    marked = (ordered & u1(0x78)) == FP8_ESCAPE << 3
    if int(marked.sum()) != len(escapes):
        raise CorruptShardError(
            f"block has {len(escapes):,} escapes and {int(marked.sum()):,} symbols that need one"
        )
    if len(escapes):
        in_order = np.zeros(rows * width, u1)
        in_order[marked] = escapes
        true = np.empty((rows, width), u1)
        from_groups(in_order, true, group)
        exponents = np.where(((symbols >> 3) & u1(15)) == FP8_ESCAPE, true, exponents)
    if dtype == "float16":
        exponents &= u1(31)
    mantissa = MANTISSA_BITS[dtype]
    word = np.dtype("<u4" if dtype == "float32" else "<u2").type
    bits = (exponents.astype(word) << word(3)) | (symbols & u1(7))
    bits <<= word(mantissa - 3)
    negative = (symbols >> 7) ^ signs
    return bits | (negative.astype(word) << word(word(0).itemsize * 8 - 1))


# ---- int8


def to_float(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bits as float32, exactly."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Finite float32 as raw bits, rounded half to even and kept below infinity."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return np.clip(values, -65504.0, 65504.0).astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    rounded = ((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        u2
    )
    return np.where((rounded & u2(0x7FFF)) >= 0x7F80, (rounded & u2(0x8000)) | u2(0x7F7F), rounded)


def encode_int8(layers: np.ndarray, dtype: str, steps_per_deviation: float) -> list[bytes]:
    """Sections for bits [L, n, H]."""
    num_layers, rows, hidden = layers.shape
    bits = _matrix(layers)
    width = bits.shape[1]
    mantissa = MANTISSA_BITS[dtype]
    exponent_mask = (1 << (bits.dtype.itemsize * 8 - 1 - mantissa)) - 1
    centres = _levels(((bits >> bits.dtype.type(mantissa)) & bits.dtype.type(exponent_mask)).astype(u1))
    values = to_float(bits, dtype)
    if rows < 4:
        steps_per_deviation *= 1.3  # levels of so few rows are those of the numbers themselves
    with np.errstate(all="ignore"):
        level = _power_of_two(EXPONENT_BIAS[dtype] - centres.astype(np.int32))
        scaled = (values * level).reshape(rows, num_layers, hidden)
        # For a normal distribution the mean size is 0.8 deviations. Sizes are capped, so that an outlier
        # does not coarsen its whole row, and what is not finite counts for nothing.
        sizes = np.nan_to_num(np.minimum(np.abs(scaled), np.float32(4.0)), nan=0.0)
        steps = (sizes.mean(axis=2, dtype=np.float32) * np.float32(1.2533 / steps_per_deviation)).astype(
            "<f4"
        )
        steps = np.where(steps < 1e-30, np.float32(0), steps)
        quotient = np.rint(scaled / np.where(steps > 0, steps, np.float32(1))[:, :, None]).reshape(
            rows, width
        )
        escaped = ~(np.abs(quotient) <= 127)
    zero_step = np.repeat(steps == 0, hidden, axis=1)
    escaped |= zero_step & (values != 0)
    # A step times 127 may round beyond the largest finite number; keep such numbers exactly.
    symbols = np.where(escaped, INT8_ESCAPE, quotient).astype(np.int8).view(u1)
    group = _group(width)
    ordered = np.empty(rows * width, u1)
    to_groups(symbols, ordered, group)
    row, channel = np.nonzero(escaped)
    order = np.argsort((channel // group * rows + row) * group + channel % group)
    parts = section(centres.tobytes(), zstd=True)
    parts += section(steps.tobytes(), zstd=False)
    parts += section(ordered, zstd=True)
    return parts + section(bits[row[order], channel[order]].tobytes(), zstd=False)


def decode_int8(sections: Sections, rows: int, num_layers: int, hidden: int, dtype: str) -> np.ndarray:
    """Bits [rows, num_layers * hidden]."""
    width = num_layers * hidden
    group = _group(width)
    itemsize = 4 if dtype == "float32" else 2
    centres = sections.take(width, "centres")
    steps = sections.take(4 * rows * num_layers, "steps").view("<f4").reshape(rows, num_layers, 1)
    ordered = sections.take(rows * width, "symbols")
    escapes = sections.take_some(rows * width * itemsize, "escapes")
    if len(escapes) % itemsize:
        raise CorruptShardError(
            f"block's escapes have {len(escapes):,} bytes; expected a multiple of {itemsize}"
        )
    escapes = escapes.view(f"<u{itemsize}")
    symbols = np.empty((rows, width), u1)
    from_groups(ordered, symbols, group)
    signed = symbols.view(np.int8)
    with np.errstate(all="ignore"):
        values = signed.astype(np.float32).reshape(rows, num_layers, hidden) * steps
        values = values.reshape(rows, width) * _power_of_two(centres.astype(np.int32) - EXPONENT_BIAS[dtype])
    # Only a hostile file has steps that overflow; keep such values out of the rounding below.
    values = np.nan_to_num(values, nan=0.0, posinf=np.finfo(np.float32).max, neginf=np.finfo(np.float32).min)
    bits = from_float(np.ascontiguousarray(values), dtype)
    marked = np.flatnonzero(ordered.view(np.int8) == INT8_ESCAPE)
    if len(marked) != len(escapes):
        raise CorruptShardError(
            f"block has {len(escapes):,} escapes and {len(marked):,} symbols that need one"
        )
    outer, inner = np.divmod(marked, rows * group)
    row, lane = np.divmod(inner, group)
    bits[row, outer * group + lane] = escapes
    return bits


def _power_of_two(exponents: np.ndarray) -> np.ndarray:
    """float32 2**exponents, exact from -149 to 127, and no overflow at 128 (where 2**127 is used)."""
    return np.ldexp(np.float32(1.0), np.minimum(exponents, 127)).astype(np.float32)
