/* The compiled half of the lossless codec: its Huffman coder and its passes over bfloat16 numbers.
 *
 * lossless.py and huffman.py hold the same in NumPy and use it where this file could not be compiled;
 * docs/format.md describes the bytes. Whatever decodes here treats its input as hostile: sizes are checked
 * before anything is touched, and an error is a ValueError. The GIL is free during all work; there is
 * no state between calls.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; specdec_tap works without this file"
#endif

#define INLINE static inline __attribute__((always_inline))

/* On x86-64 each hot loop is compiled twice from one body, for any processor and for those since 2013;
 * which to call is decided when the module is loaded. AVX-512 was no faster. */
#if defined(__x86_64__)
#define MODERN __attribute__((target("avx2,bmi,bmi2,lzcnt")))
#endif

/* Modes of sections (sections.py). */
enum { RAW = 0, HUFFMAN = 3, COMPACT = 4 };

/* Buffers come from anywhere: numbers in them need not be aligned. */
typedef uint16_t __attribute__((aligned(1), may_alias)) number;

INLINE uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

INLINE void store64(uint8_t *at, uint64_t value)
{
    memcpy(at, &value, 8);
}

/* Payloads come from memory or a file: ask for what a stream needs some hundred cycles from now. */
INLINE void prefetch(const uint8_t *at)
{
    __builtin_prefetch((const void *)((uintptr_t)at + 512));
}

/* ---- Huffman coder ------------------------------------------------------------------------------ */

enum {
    STREAMS = 8,
    MIN_BITS = 2,
    MAX_BITS = 11,
    ENTRIES = 1 << MAX_BITS,
    CHUNK = 1 << 18,
    LENGTHS_BYTES = 128,
    CHUNK_HEAD = LENGTHS_BYTES + 4 * STREAMS,
};

/* Codes in the order of length, then symbol; bit-reversed, because streams are filled from the lowest bit. */
static void assign_codes(const uint8_t lengths[256], uint16_t codes[256])
{
    unsigned counts[MAX_BITS + 1] = {0}, next[MAX_BITS + 2] = {0};
    for (unsigned symbol = 0; symbol < 256; symbol++)
        counts[lengths[symbol]]++;
    for (unsigned bits = MIN_BITS; bits <= MAX_BITS; bits++)
        next[bits + 1] = (next[bits] + counts[bits]) << 1;
    for (unsigned symbol = 0; symbol < 256; symbol++) {
        unsigned bits = lengths[symbol];
        if (!bits)
            continue;
        unsigned code = next[bits]++, reversed = 0;
        for (unsigned i = 0; i < bits; i++, code >>= 1)
            reversed = reversed << 1 | (code & 1);
        codes[symbol] = (uint16_t)reversed;
    }
}

/* Optimal code lengths of at most MAX_BITS (package-merge). 0 if there are too few symbols, or one is so
 * frequent that its code would be shorter than MIN_BITS: zstd does better then. */
static int choose_lengths(const uint32_t counts[256], uint8_t lengths[256])
{
    uint16_t symbols[256];
    int used = 0;
    for (int s = 0; s < 256; s++) {
        if (!counts[s])
            continue;
        int at = used++;
        for (; at > 0 && counts[symbols[at - 1]] > counts[s]; at--)
            symbols[at] = symbols[at - 1];
        symbols[at] = (uint16_t)s;
    }
    memset(lengths, 0, 256);
    if (used < 1 << MIN_BITS)
        return 0;
    /* Level by level, the list of single symbols merged with the pairs of the level before, by weight.
     * is_pair[level] remembers, in that order, which they were. */
    uint8_t is_pair[MAX_BITS][512];
    uint32_t before[512], merged[512];
    int have = 0;
    for (int level = 0; level < MAX_BITS; level++) {
        int single = 0, pair = 0, pairs = have / 2, total = used + pairs;
        for (int i = 0; i < total; i++) {
            uint32_t weight = pair < pairs ? before[2 * pair] + before[2 * pair + 1] : UINT32_MAX;
            int take = single == used || weight < counts[symbols[single]];
            merged[i] = take ? weight : counts[symbols[single]];
            is_pair[level][i] = (uint8_t)take;
            pair += take;
            single += !take;
        }
        memcpy(before, merged, sizeof(uint32_t) * (size_t)total);
        have = total;
    }
    int take = 2 * used - 2;
    for (int level = MAX_BITS - 1; level >= 0; level--) {
        int singles = 0;
        for (int i = 0; i < take; i++)
            singles += !is_pair[level][i];
        for (int i = 0; i < singles; i++)
            lengths[symbols[i]]++;
        take = 2 * (take - singles);
    }
    return lengths[symbols[used - 1]] >= MIN_BITS;
}

INLINE size_t stream_start(size_t count, size_t stream)
{
    size_t at = (count + STREAMS - 1) / STREAMS * stream;
    return at < count ? at : count;
}

/* One stream's writer: the newest bits are the highest of `bits`; the low byte of `held` counts those that
 * were not yet written. */
struct writer {
    uint64_t bits, held;
    uint8_t *out;
    const uint8_t *in, *end;
};

/* A code comes in the highest bits, with its length in the low byte: what else that adds to `held` and to
 * the low bits of `bits`, nobody reads. */
INLINE void put(struct writer *w, uint64_t code)
{
    w->bits = w->bits >> (code & 63) | code;
    w->held += code;
}

INLINE void flush(struct writer *w)
{
    store64(w->out, w->bits >> (-w->held & 63));
    w->out += (w->held & 63) >> 3;
    w->held &= 7;
}

/* The last symbols, without writing beyond the stream's own bytes. */
static void finish_writer(struct writer *w, const uint64_t table[256])
{
    while (w->in < w->end) {
        put(w, table[*w->in++]);
        for (w->held &= 255; w->held >= 8; w->held -= 8)
            *w->out++ = (uint8_t)(w->bits >> (64 - w->held));
    }
    if (w->held)
        *w->out++ = (uint8_t)(w->bits >> (64 - w->held));
}

INLINE size_t encode_chunk_body(const uint8_t *in, size_t count, uint8_t *out, size_t room)
{
    uint32_t counts[STREAMS][256 + 16], sums[256];
    memset(counts, 0, sizeof counts);
    size_t starts[STREAMS + 1];
    for (size_t s = 0; s <= STREAMS; s++)
        starts[s] = stream_start(count, s);
    /* The last stream is the shortest; side by side, equal neighbours do not wait for each other's count. */
    size_t common = starts[STREAMS] - starts[STREAMS - 1];
    for (size_t i = 0; i < common; i++)
        for (size_t s = 0; s < STREAMS; s++)
            counts[s][in[starts[s] + i]]++;
    for (size_t s = 0; s < STREAMS; s++)
        for (size_t i = starts[s] + common; i < starts[s + 1]; i++)
            counts[s][in[i]]++;
    for (size_t i = 0; i < 256; i++) {
        sums[i] = 0;
        for (size_t s = 0; s < STREAMS; s++)
            sums[i] += counts[s][i];
    }

    uint8_t lengths[256];
    uint16_t codes[256];
    uint64_t table[256];
    if (!choose_lengths(sums, lengths))
        return 0;
    assign_codes(lengths, codes);
    for (size_t i = 0; i < 256; i++)
        table[i] = lengths[i] ? (uint64_t)codes[i] << (64 - lengths[i]) | lengths[i] : 0;

    size_t size = CHUNK_HEAD;
    uint32_t sizes[STREAMS];
    for (size_t s = 0; s < STREAMS; s++) {
        uint32_t bits = 0;
        for (size_t i = 0; i < 256; i++)
            bits += counts[s][i] * lengths[i];
        sizes[s] = (bits + 7) / 8;
        size += sizes[s];
    }
    if (size > room)
        return 0;
    for (size_t i = 0; i < LENGTHS_BYTES; i++)
        out[i] = (uint8_t)(lengths[2 * i] | lengths[2 * i + 1] << 4);
    memcpy(out + LENGTHS_BYTES, sizes, sizeof sizes);

    struct writer w[STREAMS];
    uint8_t *at = out + CHUNK_HEAD;
    for (size_t s = 0; s < STREAMS; s++) {
        w[s] = (struct writer){0, 0, at, in + starts[s], in + starts[s + 1]};
        at += sizes[s];
    }
    /* A flush writes 8 bytes; the 40 symbols that are left have at least 10 in every stream. */
    size_t steps = common > 40 ? (common - 40) / 4 : 0;
    /* Two at a time, as many as fit the registers. */
    for (size_t s = 0; s < STREAMS; s += 2) {
        struct writer a = w[s], b = w[s + 1];
        for (size_t i = 0; i < 4 * steps; i += 4) {
#pragma GCC unroll 4
            for (size_t k = 0; k < 4; k++) {
                put(&a, table[a.in[i + k]]);
                put(&b, table[b.in[i + k]]);
            }
            flush(&a);
            flush(&b);
        }
        w[s] = a, w[s + 1] = b;
    }
    for (size_t s = 0; s < STREAMS; s++) {
        w[s].in += 4 * steps;
        finish_writer(&w[s], table);
    }
    return size;
}

/* One stream's reader. `bits` holds a 1 above all unread bits, so its leading zeros tell how many were used. */
struct reader {
    uint64_t bits;
    const uint8_t *in;
    uint8_t *out;
    const uint8_t *in_start, *in_end;
    uint8_t *out_end;
};

static const uint64_t MARK = (uint64_t)1 << 63;

enum { LOOKUPS = 5, STEP_SYMBOLS = LOOKUPS * (MAX_BITS / MIN_BITS), STEP_BYTES = 7 };

/* How many steps cannot leave the stream's input and output, whatever the bits are. A step moves `in` by at
 * most STEP_BYTES, reads 8 bytes there, moves `out` by at most STEP_SYMBOLS and writes 3 bytes beyond. */
INLINE ptrdiff_t safe_steps(const struct reader *r)
{
    ptrdiff_t by_input = (r->in_end - r->in - 8) / STEP_BYTES;
    ptrdiff_t by_output = (r->out_end - r->out - 3) / STEP_SYMBOLS;
    ptrdiff_t steps = by_input < by_output ? by_input : by_output;
    return steps < 0 ? 0 : steps;
}

/* Decode streams side by side until one of them is near its end. The lookups take turns: one stream's
 * must wait for each other. */
INLINE void decode_streams(struct reader *readers, const int streams, const uint64_t *table, uintptr_t next)
{
    uint64_t bits[STREAMS];
    const uint8_t *in[STREAMS];
    uint8_t *out[STREAMS];
    for (;;) {
        ptrdiff_t steps = PTRDIFF_MAX;
        for (int s = 0; s < streams; s++) {
            ptrdiff_t own = safe_steps(&readers[s]);
            steps = own < steps ? own : steps;
            bits[s] = readers[s].bits, in[s] = readers[s].in, out[s] = readers[s].out;
        }
        if (!steps)
            return;
        for (; steps; steps--, next += 64) {
            __builtin_prefetch((const void *)next);
#pragma GCC unroll 8
            for (int s = 0; s < streams; s++) {
                unsigned used = (unsigned)__builtin_clzll(bits[s]);
                in[s] += used >> 3;
                prefetch(in[s]);
                bits[s] = (load64(in[s]) | MARK) >> (used & 7);
            }
#pragma GCC unroll 5
            for (int i = 0; i < LOOKUPS; i++) {
#pragma GCC unroll 8
                for (int s = 0; s < streams; s++) {
                    const uint64_t *entry = &table[bits[s] & (ENTRIES - 1)];
                    uint64_t whole = *entry;
                    /* Read on its own, the length is there a shift earlier; everything waits for it. */
                    bits[s] >>= ((const uint8_t *)entry)[6] & 63;
                    store64(out[s], whole);
                    out[s] += whole >> 56;
                }
            }
        }
        for (int s = 0; s < streams; s++)
            readers[s].bits = bits[s], readers[s].in = in[s], readers[s].out = out[s];
    }
}

/* The last symbols one by one; whether the stream then ends where it should, padded with zero bits. */
static int finish_reader(const struct reader *r, const uint16_t single[ENTRIES])
{
    const uint8_t *in = r->in_start;
    size_t size = (size_t)(r->in_end - in);
    size_t at = (size_t)(r->in - in) * 8 + (size_t)__builtin_clzll(r->bits);
    for (uint8_t *out = r->out; out < r->out_end; out++) {
        size_t byte = at >> 3;
        uint32_t window = 0;
        for (size_t i = 0; i < 3; i++)
            if (byte + i < size)
                window |= (uint32_t)in[byte + i] << (8 * i);
        uint16_t entry = single[window >> (at & 7) & (ENTRIES - 1)];
        *out = (uint8_t)entry;
        at += entry >> 8;
        if (at > 8 * size)
            return 0;
    }
    return (at + 7) / 8 == size && (!(at & 7) || !(in[size - 1] >> (at & 7)));
}

/* A table entry: the symbol of `single` before those of `rest`. */
INLINE uint64_t prepend(unsigned single, uint64_t rest)
{
    uint64_t symbols = (rest << 8 & 0xFFFFFFFFFF) | (single & 255);
    return symbols + (rest & ~(uint64_t)0xFFFFFFFFFFFF) + ((uint64_t)1 << 56) + ((uint64_t)(single >> 8) << 48);
}

/* Bytes that the chunk took, or 0 if it is not one that holds `count` symbols. `next` is what the caller reads
 * afterwards; it is fetched into the cache meanwhile. */
INLINE size_t decode_chunk_body(const uint8_t *in, size_t size, uint8_t *out, size_t count, const uint8_t *next)
{
    if (size < CHUNK_HEAD)
        return 0;
    uint8_t lengths[256];
    unsigned kraft = 0;
    for (size_t i = 0; i < 256; i++) {
        unsigned length = lengths[i] = in[i / 2] >> (i % 2 * 4) & 15;
        if (length == 0)
            continue;
        if (length < MIN_BITS || length > MAX_BITS)
            return 0;
        kraft += (unsigned)ENTRIES >> length;
    }
    if (kraft != ENTRIES)
        return 0; /* a complete code: every lookup below finds a symbol */
    uint32_t sizes[STREAMS];
    memcpy(sizes, in + LENGTHS_BYTES, sizeof sizes);
    uint64_t total = CHUNK_HEAD;
    for (size_t s = 0; s < STREAMS; s++)
        total += sizes[s];
    if (total > size)
        return 0;

    uint16_t codes[256], single[ENTRIES];
    assign_codes(lengths, codes);
    for (size_t i = 0; i < 256; i++)
        if (lengths[i])
            for (size_t at = codes[i]; at < ENTRIES; at += (size_t)1 << lengths[i])
                single[at] = (uint16_t)(i | (unsigned)lengths[i] << 8);
    /* table[2^v + i]: all whole symbols in the v bits i. Bytes 0 to 4 the symbols, byte 6 their bits, byte 7
     * how many. A symbol of l bits is followed by what the other v - l bits hold. */
    uint64_t table[2 * ENTRIES];
    table[1] = 0;
    for (unsigned v = 1; v <= MAX_BITS - MIN_BITS; v++) {
        for (unsigned i = 0; i < 1u << v; i++) {
            unsigned length = single[i] >> 8, fits = length <= v;
            uint64_t rest = table[(1u << (fits ? v - length : 0)) + (fits ? i >> length : 0)];
            table[(1u << v) + i] = fits ? prepend(single[i], rest) : 0;
        }
    }
    uint64_t *whole = table + ENTRIES;
    for (size_t i = 0; i < 256; i++) {
        if (!lengths[i])
            continue;
        unsigned length = lengths[i], left = MAX_BITS - length;
        for (size_t k = 0; k < (size_t)1 << left; k++)
            whole[codes[i] + (k << length)] = prepend((unsigned)i | length << 8, table[((size_t)1 << left) + k]);
    }

    struct reader readers[STREAMS];
    const uint8_t *at = in + CHUNK_HEAD;
    for (size_t s = 0; s < STREAMS; s++) {
        readers[s] = (struct reader){
            MARK, at, out + stream_start(count, s), at, at + sizes[s], out + stream_start(count, s + 1)};
        at += sizes[s];
    }
    decode_streams(readers, STREAMS, whole, (uintptr_t)next);
    decode_streams(readers, STREAMS / 2, whole, (uintptr_t)in);
    decode_streams(readers + STREAMS / 2, STREAMS / 2, whole, (uintptr_t)in);
    for (size_t s = 0; s < STREAMS; s++) {
        decode_streams(&readers[s], 1, whole, (uintptr_t)in);
        if (!finish_reader(&readers[s], single))
            return 0;
    }
    return (size_t)total;
}

/* ---- bfloat16 numbers to symbols and remainders, and back ----------------------------------------- */

enum {
    TILE = 256, /* channels; a tile of 64 rows fits the first-level cache */
    BELOW = 40 << 7, /* a channel's floor is this far below its level */
    LIMIT = 63 << 7, /* what is not this near above the floor is an escape */
    STEP = 64,       /* floors are multiples of it apart */
};

/* Floor of each channel, from the mean over the largest of four rows; and whether most of its numbers are
 * negative. */
INLINE void measure_tile(const uint8_t *in, ptrdiff_t stride, size_t rows, size_t width, number *floors,
                         uint8_t *signs)
{
    uint32_t level[TILE] = {0};
    uint16_t negative[TILE] = {0};
    size_t quarter = rows / 4;
    for (size_t r = 0; r < quarter; r++) {
        const number *row[4];
        for (size_t i = 0; i < 4; i++)
            row[i] = (const number *)(in + (ptrdiff_t)(i * quarter + r) * stride);
        for (size_t c = 0; c < width; c++) {
            uint16_t p = row[0][c], q = row[1][c], s = row[2][c], t = row[3][c];
            negative[c] += (uint16_t)((p >> 15) + (q >> 15) + (s >> 15) + (t >> 15));
            p = (uint16_t)(p << 1), q = (uint16_t)(q << 1), s = (uint16_t)(s << 1), t = (uint16_t)(t << 1);
            p = p > q ? p : q;
            s = s > t ? s : t;
            level[c] += p > s ? p : s;
        }
    }
    for (size_t r = 4 * quarter; r < rows; r++) {
        const number *row = (const number *)(in + (ptrdiff_t)r * stride);
        for (size_t c = 0; c < width; c++)
            negative[c] += row[c] >> 15;
    }
    for (size_t c = 0; c < width; c++) {
        floors[c] = (uint16_t)((level[c] / (uint32_t)(2 * quarter) & ~(uint32_t)(STEP - 1)) - BELOW);
        signs[c] = negative[c] > rows / 2;
    }
}

struct split {
    const uint8_t *in; /* [rows, width] numbers, `stride` bytes from row to row */
    ptrdiff_t stride;
    size_t rows, width, own_stride; /* own_stride: numbers from row to row of what is written */
    number *floors;
    uint8_t *signs, *symbols, *rest, *escapes; /* at the first channel of `in` */
};

/* Symbols and remainders of `width` <= TILE channels from channel `first` on. The exponent of an escape goes
 * to its number's place in `escapes`. */
INLINE void split_tile(struct split *s, size_t first, size_t width)
{
    uint16_t floors[TILE], flip[TILE];
    for (size_t c = 0; c < width; c++) {
        floors[c] = s->floors[first + c];
        flip[c] = (uint16_t)(s->signs[first + c] << 15);
    }
    for (size_t r = 0; r < s->rows; r++) {
        const number *restrict row = (const number *)(s->in + (ptrdiff_t)r * s->stride) + first;
        uint8_t *restrict symbols = s->symbols + r * s->own_stride + first;
        uint8_t *restrict rest = s->rest + r * s->own_stride + first;
        uint16_t highest = 0;
        for (size_t c = 0; c < width; c++) {
            /* What is below the floor wraps around and is too large as well. */
            uint16_t x = row[c], above = (uint16_t)((x & 0x7FFF) - floors[c]);
            uint16_t kept = above < LIMIT ? above : LIMIT;
            highest = kept > highest ? kept : highest;
            symbols[c] = (uint8_t)(((x ^ flip[c]) >> 8 & 0x80) | kept >> 7);
            rest[c] = (uint8_t)(above << 1);
        }
        if (highest < LIMIT)
            continue;
        for (size_t c = 0; c < width; c++) {
            if ((symbols[c] & 63) == 63) {
                s->escapes[r * s->own_stride + first + c] = (uint8_t)(row[c] >> 7);
                rest[c] = (uint8_t)(row[c] << 1);
            }
        }
    }
}

INLINE void split_body(struct split *s, int centred)
{
    for (size_t first = 0; first < s->width; first += TILE) {
        size_t width = s->width - first < TILE ? s->width - first : TILE;
        if (centred)
            measure_tile(s->in + 2 * first, s->stride, s->rows, width, s->floors + first, s->signs + first);
        split_tile(s, first, width);
    }
}

INLINE int any_escape(const uint8_t *symbols, size_t count, uint8_t mask)
{
    uint8_t found = 0;
    for (size_t i = 0; i < count; i++)
        found |= (uint8_t)((symbols[i] & mask) == mask);
    return found;
}

/* First symbol with all bits of `mask` at or after `at`, or `end`. They are few: whole stretches are skipped. */
INLINE size_t next_escape(const uint8_t *symbols, size_t at, size_t end, uint8_t mask)
{
    while (at < end) {
        if (at % 256 == 0 && end - at >= 256 && !any_escape(symbols + at, 256, mask))
            at += 256;
        else if (at % 32 == 0 && end - at >= 32 && !any_escape(symbols + at, 32, mask))
            at += 32;
        else if ((symbols[at] & mask) == mask)
            return at;
        else
            at++;
    }
    return end;
}

/* Eight eighths of remainders (in the high seven bits of a byte) to seven, and escapes one after the other,
 * in place; how many escapes there are. */
INLINE size_t pack_body(const uint8_t *symbols, size_t numbers, uint8_t *rest, uint8_t *escapes)
{
    size_t eighth = (numbers + 7) / 8;
    const uint8_t *restrict last = rest + 7 * eighth;
    for (unsigned p = 0; p < 7; p++) {
        uint8_t *restrict part = rest + p * eighth;
        for (size_t i = 0; i < eighth; i++)
            part[i] |= last[i] >> (7 - p) & 1;
    }
    size_t count = 0;
    for (size_t i = next_escape(symbols, 0, numbers, 63); i < numbers; i = next_escape(symbols, i + 1, numbers, 63))
        escapes[count++] = escapes[i];
    return count;
}

INLINE size_t levels_bytes(size_t width)
{
    return 2 + (width + 7) / 8 + (width + 1) / 2;
}

/* Floors and signs as they are stored: the lowest of the 15 floors that most channels have, signs, how many
 * steps each floor is above that, and those that are not 0 to 14 steps above; or a floor alone, if it is
 * everybody's and no signs are inverted. Writes at most levels_bytes(width) + 2 * width bytes and returns how
 * many. */
static size_t pack_levels(const number *floors, const uint8_t *signs, size_t width, uint8_t *out)
{
    size_t same = 0;
    while (same < width && floors[same] == floors[0] && !signs[same])
        same++;
    if (same == width) {
        memcpy(out, floors, 2);
        return 2;
    }
    uint32_t counts[(1 << 15) / STEP + 16] = {0};
    for (size_t c = 0; c < width; c++)
        counts[(uint16_t)(floors[c] + BELOW) / STEP % ((1 << 15) / STEP)]++;
    uint32_t inside = 0, most = 0;
    uint16_t base = 0;
    for (size_t i = 0; i < (1 << 15) / STEP; i++) {
        inside += counts[i] - (i >= 15 ? counts[i - 15] : 0);
        if (inside > most) {
            most = inside;
            base = (uint16_t)((i >= 14 ? i - 14 : 0) * STEP - BELOW);
        }
    }
    memset(out, 0, levels_bytes(width));
    memcpy(out, &base, 2);
    uint8_t *bits = out + 2, *nibbles = bits + (width + 7) / 8, *other = out + levels_bytes(width);
    size_t half = (width + 1) / 2;
    for (size_t c = 0; c < width; c++) {
        uint16_t above = (uint16_t)(floors[c] - base), steps = above / STEP;
        if (above % STEP || steps > 14) {
            uint16_t floor = floors[c];
            memcpy(other, &floor, 2);
            other += 2;
            steps = 15;
        }
        bits[c / 8] |= (uint8_t)((signs[c] & 1) << c % 8);
        nibbles[c < half ? c : c - half] |= (uint8_t)(c < half ? steps : steps << 4);
    }
    return (size_t)(other - out);
}

struct unpack {
    const uint8_t *levels, *coded, *escapes, *packed;
    size_t levels_size, coded_size, num_escapes, rows, width;
    number *shift;    /* [width] */
    const uint8_t *signs; /* their bits, or NULL if none is inverted */
    uint8_t *symbols;     /* one chunk */
    uint8_t *last;      /* the last eighth of the remainders is unpacked to here */
    uint8_t *out;
};

/* What is added to each channel's numbers: its floor, and 0x8000, which inverts the sign bit and nothing
 * else, where its signs are inverted. */
INLINE int unpack_levels(struct unpack *u)
{
    number *restrict shift = u->shift;
    size_t width = u->width, half = (width + 1) / 2;
    uint16_t base;
    if (u->levels_size < 2)
        return 0;
    memcpy(&base, u->levels, 2);
    u->signs = NULL;
    if (u->levels_size == 2) {
        for (size_t c = 0; c < width; c++)
            shift[c] = base;
        return 1;
    }
    if (u->levels_size < levels_bytes(width))
        return 0;
    const uint8_t *restrict bits = u->levels + 2, *restrict nibbles = bits + (width + 7) / 8;
    uint32_t fifteens = 0;
    for (size_t c = 0; c < half; c++) {
        shift[c] = (uint16_t)(base + (nibbles[c] & 15) * STEP);
        fifteens += (nibbles[c] & 15) == 15;
    }
    for (size_t c = 0; c < width - half; c++) {
        shift[half + c] = (uint16_t)(base + (nibbles[c] >> 4) * STEP);
        fifteens += nibbles[c] >> 4 == 15;
    }
    if (u->levels_size - levels_bytes(width) != 2 * (size_t)fifteens)
        return 0;
    const uint8_t *other = u->levels + levels_bytes(width);
    for (size_t c = 0; fifteens && c < width; c++) {
        if ((c < half ? nibbles[c] & 15 : nibbles[c - half] >> 4) == 15) {
            memcpy(&shift[c], other, 2);
            other += 2;
            fifteens--;
        }
    }
    u->signs = bits;
    size_t whole = width / 8 * 8;
    for (size_t c = 0; c < whole; c += 8)
        for (size_t i = 0; i < 8; i++)
            shift[c + i] ^= (uint16_t)((unsigned)bits[c / 8] << (15 - i) & 0x8000);
    for (size_t c = whole; c < width; c++)
        shift[c] ^= (uint16_t)((unsigned)bits[c / 8] << (15 - c % 8) & 0x8000);
    return 1;
}

/* The numbers of `count` symbols, the first of them in channel `channel`. */
INLINE void merge(const uint8_t *restrict symbols, const uint8_t *restrict rest, const number *restrict shift,
                  number *restrict out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        /* Sign, 0, six bits of exponent, seven of mantissa, another: halved, the sign fills the two bits
         * above the exponent; without these, the sign bit is in its place. */
        int16_t x = (int16_t)(uint16_t)(symbols[i] << 8 | rest[i]);
        out[i] = (uint16_t)(((uint16_t)(x >> 1) & 0x9FFF) + shift[i]);
    }
}

INLINE int unpack_body(struct unpack *u,
                       size_t (*decode_chunk)(const uint8_t *, size_t, uint8_t *, size_t, const uint8_t *))
{
    size_t numbers = u->rows * u->width, eighth = (numbers + 7) / 8;
    number *out = (number *)u->out;
    if (!unpack_levels(u))
        return 0;
    /* Chunk by chunk of the code, so that symbols are still in the cache when they are merged. */
    for (size_t start = 0, channel = 0; start < numbers; start += CHUNK) {
        size_t count = numbers - start < CHUNK ? numbers - start : CHUNK;
        const uint8_t *next = u->packed + (start < 7 * eighth ? start : 0);
        size_t took = decode_chunk(u->coded, u->coded_size, u->symbols, count, next);
        if (!took)
            return 0;
        u->coded += took, u->coded_size -= took;
        if (start == 0) {
            uint8_t *restrict last = u->last;
            const uint8_t *restrict p = u->packed;
            for (size_t i = 0; i < eighth; i++)
                last[i] = (uint8_t)(p[i] << 7 | (p[eighth + i] & 1) << 6 | (p[2 * eighth + i] & 1) << 5 |
                                    (p[3 * eighth + i] & 1) << 4 | (p[4 * eighth + i] & 1) << 3 |
                                    (p[5 * eighth + i] & 1) << 2 | (p[6 * eighth + i] & 1) << 1);
        }
        /* From one end of a row, of the remainders' first seven eighths, or of the chunk to the next. */
        for (size_t at = 0, some; at < count; at += some) {
            size_t number_at = start + at;
            some = u->width - channel < count - at ? u->width - channel : count - at;
            const uint8_t *rest = u->packed + number_at;
            if (number_at >= 7 * eighth)
                rest = u->last + (number_at - 7 * eighth);
            else if (7 * eighth - number_at < some)
                some = 7 * eighth - number_at;
            const uint8_t *symbols = u->symbols + at;
            merge(symbols, rest, u->shift + channel, out + number_at, some);
            for (size_t i = next_escape(symbols, 0, some, 63); i < some; i = next_escape(symbols, i + 1, some, 63)) {
                if (!u->num_escapes)
                    return 0;
                size_t c = channel + i;
                unsigned sign = symbols[i] >> 7 ^ (u->signs ? u->signs[c / 8] >> c % 8 & 1 : 0);
                out[number_at + i] = (uint16_t)(sign << 15 | (unsigned)*u->escapes++ << 7 | rest[i] >> 1);
                u->num_escapes--;
            }
            channel = (channel + some) % u->width;
        }
    }
    return u->num_escapes == 0 && u->coded_size == 0;
}

/* ---- one copy of each loop for each instruction set ------------------------------------------------ */

struct loops {
    size_t (*encode_chunk)(const uint8_t *, size_t, uint8_t *, size_t);
    size_t (*decode_chunk)(const uint8_t *, size_t, uint8_t *, size_t, const uint8_t *);
    void (*split)(struct split *, int);
    size_t (*pack)(const uint8_t *, size_t, uint8_t *, uint8_t *);
    int (*unpack)(struct unpack *);
};

#define COMPILE(suffix, target)                                                                              \
    target static size_t encode_chunk_##suffix(const uint8_t *in, size_t count, uint8_t *out, size_t room)   \
    {                                                                                                        \
        return encode_chunk_body(in, count, out, room);                                                      \
    }                                                                                                        \
    target static size_t decode_chunk_##suffix(const uint8_t *in, size_t size, uint8_t *out, size_t count,   \
                                               const uint8_t *next)                                          \
    {                                                                                                        \
        return decode_chunk_body(in, size, out, count, next);                                                \
    }                                                                                                        \
    target static void split_##suffix(struct split *s, int centred)                                          \
    {                                                                                                        \
        split_body(s, centred);                                                                              \
    }                                                                                                        \
    target static size_t pack_##suffix(const uint8_t *symbols, size_t numbers, uint8_t *rest,                \
                                       uint8_t *escapes)                                                     \
    {                                                                                                        \
        return pack_body(symbols, numbers, rest, escapes);                                                   \
    }                                                                                                        \
    target static int unpack_##suffix(struct unpack *u)                                                      \
    {                                                                                                        \
        return unpack_body(u, decode_chunk_##suffix);                                                        \
    }                                                                                                        \
    static const struct loops loops_##suffix = {encode_chunk_##suffix, decode_chunk_##suffix, split_##suffix, \
                                                pack_##suffix, unpack_##suffix};

COMPILE(plain, )
#ifdef MODERN
COMPILE(modern, MODERN)
#endif

static const struct loops *best = &loops_plain;

static void choose_loops(void)
{
#ifdef MODERN
    __builtin_cpu_init();
    /* Every processor with AVX2 and BMI2 has LZCNT. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
        best = &loops_modern;
#endif
}

/* ---- Python ---------------------------------------------------------------------------------------- */

static PyObject *huffman_encode(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer in, out;
    if (!PyArg_ParseTuple(args, "y*w*", &in, &out))
        return NULL;
    size_t size = 0;
    Py_BEGIN_ALLOW_THREADS
    for (size_t at = 0; at < (size_t)in.len; at += CHUNK) {
        size_t count = (size_t)in.len - at < CHUNK ? (size_t)in.len - at : CHUNK;
        size_t took = best->encode_chunk((const uint8_t *)in.buf + at, count, (uint8_t *)out.buf + size,
                                         (size_t)out.len - size);
        if (!took) {
            size = 0;
            break;
        }
        size += took;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    return PyLong_FromSize_t(size);
}

static PyObject *huffman_decode(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer in, out;
    if (!PyArg_ParseTuple(args, "y*w*", &in, &out))
        return NULL;
    size_t size = 0, at = 0;
    int good = 1;
    Py_BEGIN_ALLOW_THREADS
    for (; good && at < (size_t)out.len; at += CHUNK) {
        size_t count = (size_t)out.len - at < CHUNK ? (size_t)out.len - at : CHUNK;
        size_t took = best->decode_chunk((const uint8_t *)in.buf + size, (size_t)in.len - size,
                                         (uint8_t *)out.buf + at, count, in.buf);
        good = took > 0;
        size += took;
    }
    good = good && size == (size_t)in.len;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    if (!good)
        return PyErr_Format(PyExc_ValueError, "Huffman code is damaged before symbol %zu", at);
    Py_RETURN_NONE;
}

static PyObject *split_layer(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *layer;
    Py_ssize_t first, width;
    int centred;
    Py_buffer floors, signs, symbols, rest, escapes, in;
    if (!PyArg_ParseTuple(args, "Onnpw*w*w*w*w*", &layer, &first, &width, &centred, &floors, &signs, &symbols,
                          &rest, &escapes))
        return NULL;
    int fits = 0;
    if (PyObject_GetBuffer(layer, &in, PyBUF_STRIDES) == 0) {
        Py_ssize_t rows = in.ndim == 2 ? in.shape[0] : 0, own = in.ndim == 2 ? in.shape[1] : 0;
        fits = rows >= (centred ? 4 : 1) && rows <= UINT16_MAX && own >= 1 && in.itemsize == 2 &&
               (own == 1 || in.strides[1] == 2) && first >= 0 && width <= PY_SSIZE_T_MAX / 4 / rows &&
               first <= width - own && floors.len == 2 * width && signs.len == width &&
               symbols.len == rows * width && rest.len >= rows * width && escapes.len == rows * width;
        if (fits) {
            struct split s = {
                .in = in.buf,
                .stride = in.strides[0],
                .rows = (size_t)rows,
                .width = (size_t)own,
                .own_stride = (size_t)width,
                .floors = (number *)floors.buf + first,
                .signs = (uint8_t *)signs.buf + first,
                .symbols = (uint8_t *)symbols.buf + first,
                .rest = (uint8_t *)rest.buf + first,
                .escapes = (uint8_t *)escapes.buf + first,
            };
            Py_BEGIN_ALLOW_THREADS
            best->split(&s, centred);
            Py_END_ALLOW_THREADS
        } else {
            PyErr_SetString(PyExc_ValueError, "split_layer: sizes do not fit each other");
        }
        PyBuffer_Release(&in);
    }
    PyBuffer_Release(&floors);
    PyBuffer_Release(&signs);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&escapes);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *pack(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer floors, signs, symbols, rest, escapes, levels;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*w*", &floors, &signs, &symbols, &rest, &escapes, &levels))
        return NULL;
    size_t width = (size_t)signs.len, numbers = (size_t)symbols.len, num_escapes = 0, size = 0;
    int fits = width > 0 && (size_t)floors.len == 2 * width && (size_t)rest.len == (numbers + 7) / 8 * 8 &&
               (size_t)escapes.len == numbers && (size_t)levels.len >= levels_bytes(width) + 2 * width;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        num_escapes = best->pack(symbols.buf, numbers, rest.buf, escapes.buf);
        size = pack_levels(floors.buf, signs.buf, width, levels.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&floors);
    PyBuffer_Release(&signs);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&escapes);
    PyBuffer_Release(&levels);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "pack: sizes do not fit each other");
    return Py_BuildValue("nn", (Py_ssize_t)num_escapes, (Py_ssize_t)size);
}

/* The data of the section at `*at` if it has that mode; moves `*at` to its end. */
static const uint8_t *section(const uint8_t **at, const uint8_t *end, uint8_t mode, size_t *size)
{
    uint32_t stored;
    if (end - *at < 5 || **at != mode)
        return NULL;
    memcpy(&stored, *at + 1, 4);
    const uint8_t *data = *at + 5;
    if ((size_t)(end - data) < stored)
        return NULL;
    *at = data + stored;
    *size = stored;
    return data;
}

static PyObject *unpack(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer payload, scratch, out;
    Py_ssize_t start, rows, width;
    if (!PyArg_ParseTuple(args, "y*nnnw*w*", &payload, &start, &rows, &width, &scratch, &out))
        return NULL;
    int fits = rows > 0 && width > 0 && width <= PY_SSIZE_T_MAX / 4 / rows && start >= 0 && start <= payload.len;
    size_t numbers = fits ? (size_t)rows * (size_t)width : 0, eighth = (numbers + 7) / 8;
    size_t chunk = numbers < CHUNK ? numbers : CHUNK;
    fits = fits && (size_t)out.len == 2 * numbers && (size_t)scratch.len >= 2 * (size_t)width + eighth + chunk;
    const char *damaged = "";
    const uint8_t *at = (const uint8_t *)payload.buf + (fits ? start : 0);
    if (fits) {
        const uint8_t *end = (const uint8_t *)payload.buf + payload.len;
        struct unpack u = {
            .rows = (size_t)rows,
            .width = (size_t)width,
            .shift = scratch.buf,
            .last = (uint8_t *)scratch.buf + 2 * width,
            .symbols = (uint8_t *)scratch.buf + 2 * (size_t)width + eighth,
            .out = out.buf,
        };
        size_t packed_size = 0;
        if (!(u.levels = section(&at, end, COMPACT, &u.levels_size)))
            damaged = "levels";
        else if (!(u.coded = section(&at, end, HUFFMAN, &u.coded_size)))
            damaged = "symbols";
        else if (!(u.escapes = section(&at, end, RAW, &u.num_escapes)))
            damaged = "escapes";
        else if (!(u.packed = section(&at, end, RAW, &packed_size)) || packed_size != 7 * eighth)
            damaged = "remainders";
        else {
            int good;
            Py_BEGIN_ALLOW_THREADS
            good = best->unpack(&u);
            Py_END_ALLOW_THREADS
            damaged = good ? NULL : "levels, symbols or escapes";
        }
    }
    Py_ssize_t stop = at - (const uint8_t *)payload.buf;
    PyBuffer_Release(&payload);
    PyBuffer_Release(&scratch);
    PyBuffer_Release(&out);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "unpack: sizes do not fit each other");
    if (damaged)
        return PyErr_Format(PyExc_ValueError, "damaged %s", damaged);
    return PyLong_FromSsize_t(stop);
}

static PyMethodDef methods[] = {
    {"huffman_encode", huffman_encode, METH_VARARGS,
     "huffman_encode(symbols, out) -> bytes written, 0 if the code is no shorter than `out` or cannot be made"},
    {"huffman_decode", huffman_decode, METH_VARARGS,
     "huffman_decode(data, out): fill `out` from all of `data`; ValueError if they do not fit"},
    {"split_layer", split_layer, METH_VARARGS,
     "split_layer(layer, first, width, centred, floors, signs, symbols, rest, escapes): some channels' numbers"},
    {"pack", pack, METH_VARARGS,
     "pack(floors, signs, symbols, rest, escapes, levels) -> escapes, bytes of `levels`; the last three in place"},
    {"unpack", unpack, METH_VARARGS,
     "unpack(payload, start, rows, width, scratch, out) -> end of the compact matrix at `start`"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The compiled half of the lossless codec.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    choose_loops();
    return PyModule_Create(&module);
}
