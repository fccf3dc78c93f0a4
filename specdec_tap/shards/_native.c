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
    GROUP = 8,
    TILE = 256, /* channels; a tile of 64 rows fits the first-level cache */
    OFFSET = 40,
    ESCAPE = 63,
};

/* Level of each channel: the mean over the largest of four rows of its exponent; and whether most of its
 * numbers are negative. */
INLINE void measure_tile(const uint8_t *in, ptrdiff_t stride, size_t rows, size_t width, uint8_t *centres,
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
            level[c] += (uint16_t)(p > s ? p : s) >> 8;
        }
    }
    for (size_t r = 4 * quarter; r < rows; r++) {
        const number *row = (const number *)(in + (ptrdiff_t)r * stride);
        for (size_t c = 0; c < width; c++)
            negative[c] += row[c] >> 15;
    }
    for (size_t c = 0; c < width; c++) {
        centres[c] = (uint8_t)(level[c] / (uint32_t)quarter);
        signs[c] = negative[c] > rows / 2;
    }
}

INLINE int is_escape(uint8_t symbol)
{
    return (symbol & ESCAPE << 1) == ESCAPE << 1;
}

INLINE int any_escape(const uint8_t *symbols, size_t count)
{
    uint8_t found = 0;
    for (size_t i = 0; i < count; i++)
        found |= (uint8_t)is_escape(symbols[i]);
    return found;
}

/* First escape at or after `at`, or `end`. Few are among many: whole stretches are skipped. */
INLINE size_t next_escape(const uint8_t *symbols, size_t at, size_t end)
{
    while (at < end) {
        if (at % 256 == 0 && end - at >= 256 && !any_escape(symbols + at, 256))
            at += 256;
        else if (at % 32 == 0 && end - at >= 32 && !any_escape(symbols + at, 32))
            at += 32;
        else if (is_escape(symbols[at]))
            return at;
        else
            at++;
    }
    return end;
}

struct split {
    const uint8_t *in; /* [rows, width] numbers, `stride` bytes from row to row */
    ptrdiff_t stride;
    size_t rows, width, rest_stride;
    uint8_t *centres, *signs, *symbols, *rest; /* at the first channel of `in` */
    uint8_t *escapes;
    size_t num_escapes;
};

/* Symbols and remainders of `width` <= TILE channels from channel `first` on; escapes are appended. */
INLINE void split_tile(struct split *s, size_t first, size_t width)
{
    const uint8_t *in = s->in + 2 * first;
    const uint8_t *centres = s->centres + first, *signs = s->signs + first;
    uint8_t *symbols = s->symbols + s->rows * first, *rest = s->rest + first;
    size_t rows = s->rows, rest_stride = s->rest_stride;
    ptrdiff_t stride = s->stride;
    uint16_t base[TILE], flip[TILE];
    uint8_t line[TILE];
    for (size_t c = 0; c < width; c++) {
        base[c] = (uint16_t)((unsigned)(centres[c] - OFFSET) << 7);
        flip[c] = (uint16_t)(signs[c] << 15);
    }
    for (size_t r = 0; r < rows; r++) {
        const number *restrict row = (const number *)(in + (ptrdiff_t)r * stride);
        uint8_t *restrict remainders = rest + r * rest_stride;
        for (size_t c = 0; c < width; c++) {
            uint16_t x = row[c], centred = (uint16_t)((x & 0x7FFF) - base[c]);
            /* What is too large, or was negative, becomes an escape, of which the code below is told. */
            uint16_t high = centred < ESCAPE << 7 ? centred : ESCAPE << 7;
            line[c] = (uint8_t)(((x ^ flip[c]) >> 8 & 0x80) | high >> 6);
            remainders[c] = (uint8_t)(centred << 2);
        }
        for (size_t c = 0; c < width; c += GROUP)
            store64(symbols + c * rows + r * GROUP, load64(line + c));
    }
    size_t end = rows * width;
    for (size_t i = next_escape(symbols, 0, end); i < end; i = next_escape(symbols, i + 1, end)) {
        size_t row = i / GROUP % rows, channel = i / GROUP / rows * GROUP + i % GROUP;
        uint16_t x = ((const number *)(in + (ptrdiff_t)row * stride))[channel];
        symbols[i] |= x >> 6 & 1;
        s->escapes[s->num_escapes++] = (uint8_t)(x >> 7);
    }
}

INLINE void split_body(struct split *s, int centred)
{
    for (size_t first = 0; first < s->width; first += TILE) {
        size_t width = s->width - first < TILE ? s->width - first : TILE;
        if (centred)
            measure_tile(s->in + 2 * first, s->stride, s->rows, width, s->centres + first, s->signs + first);
        split_tile(s, first, width);
    }
}

/* Four quarters of remainders (in the high six bits of a byte) to three, in place. */
INLINE void pack_body(uint8_t *rest, size_t quarter)
{
    uint8_t *restrict a = rest, *restrict b = rest + quarter, *restrict c = rest + 2 * quarter;
    const uint8_t *restrict last = rest + 3 * quarter;
    for (size_t i = 0; i < quarter; i++) {
        a[i] |= last[i] >> 6;
        b[i] |= last[i] >> 4 & 3;
        c[i] |= last[i] >> 2 & 3;
    }
}

struct merge {
    const uint8_t *coded; /* Huffman code of the symbols, or NULL if `symbols` holds them already */
    size_t coded_size;
    uint8_t *symbols;
    const uint8_t *packed, *centres, *signs, *escapes;
    size_t num_escapes, rows, width;
    uint8_t *last; /* the fourth quarter of the remainders is unpacked to here */
    uint8_t *out;
};

/* Numbers of `width` <= TILE channels from channel `first` on; takes its escapes. 0 if there are too few. */
INLINE int merge_tile(struct merge *m, size_t first, size_t width)
{
    size_t rows = m->rows, three = (m->rows * m->width + 3) / 4 * 3;
    const uint8_t *symbols = m->symbols + first * rows;
    uint16_t shift[TILE];
    uint8_t lines[GROUP][TILE], straddling[TILE];
    for (size_t c = 0; c < width; c += 8) {
        uint16_t signs = m->signs[(first + c) / 8];
        for (size_t i = 0; i < 8; i++)
            /* Adding 0x8000 inverts the sign bit and nothing else. */
            shift[c + i] = (uint16_t)(((unsigned)(m->centres[first + c + i] - OFFSET) << 7) +
                                      ((unsigned)signs << (15 - i) & 0x8000));
    }
    for (size_t start = 0; start < rows; start += GROUP) {
        size_t some = rows - start < GROUP ? rows - start : GROUP;
        for (size_t c = 0; c < width; c += GROUP)
            for (size_t r = 0; r < some; r++)
                store64(lines[r] + c, load64(symbols + c * rows + (start + r) * GROUP));
        for (size_t r = 0; r < some; r++) {
            size_t at = (start + r) * m->width + first;
            const uint8_t *rest = m->packed + at;
            if (at >= three) {
                rest = m->last + (at - three);
            } else if (at + width > three) {
                memcpy(straddling, rest, three - at);
                memcpy(straddling + (three - at), m->last, width - (three - at));
                rest = straddling;
            }
            number *restrict out = (number *)m->out + at;
            for (size_t c = 0; c < width; c++) {
                /* Sign, six exponent bits, seven of mantissa, two of others: spread the sign over the two
                 * missing exponent bits, clear those, and the sign bit is in its place. */
                int16_t x = (int16_t)(uint16_t)(lines[r][c] << 8 | rest[c]);
                out[c] = (uint16_t)(((uint16_t)(x >> 2) & 0x9FFF) + shift[c]);
            }
        }
    }
    size_t end = rows * width;
    for (size_t i = next_escape(symbols, 0, end); i < end; i = next_escape(symbols, i + 1, end)) {
        if (!m->num_escapes)
            return 0;
        size_t row = i / GROUP % rows, channel = first + i / GROUP / rows * GROUP + i % GROUP;
        number *out = (number *)m->out + row * m->width + channel;
        unsigned sign = (symbols[i] >> 7) ^ (m->signs[channel / 8] >> channel % 8 & 1);
        *out = (uint16_t)(sign << 15 | (unsigned)*m->escapes++ << 7 | (*out & 0x7F));
        m->num_escapes--;
    }
    return 1;
}

INLINE int merge_body(struct merge *m, size_t (*decode_chunk)(const uint8_t *, size_t, uint8_t *, size_t, const uint8_t *))
{
    size_t quarter = (m->rows * m->width + 3) / 4;
    const uint8_t *restrict packed = m->packed;
    uint8_t *restrict last = m->last;
    /* Chunk by chunk of the code, so that symbols are still in the cache when they are merged. */
    size_t numbers = m->rows * m->width, first = 0;
    for (size_t known = m->coded ? 0 : numbers; first < m->width;) {
        size_t width = m->width - first < TILE ? m->width - first : TILE;
        while (known < (first + width) * m->rows) {
            size_t count = numbers - known < CHUNK ? numbers - known : CHUNK;
            size_t took = decode_chunk(m->coded, m->coded_size, m->symbols + known, count, m->packed + known / 4 * 3);
            if (!took)
                return 0;
            m->coded += took, m->coded_size -= took, known += count;
        }
        for (size_t i = 0; first == 0 && i < quarter; i++)
            last[i] = (uint8_t)((packed[i] & 3) << 6 | (packed[quarter + i] & 3) << 4 |
                                (packed[2 * quarter + i] & 3) << 2);
        if (!merge_tile(m, first, width))
            return 0;
        first += width;
    }
    return m->num_escapes == 0 && m->coded_size == 0;
}

/* ---- one copy of each loop for each instruction set ------------------------------------------------ */

struct loops {
    size_t (*encode_chunk)(const uint8_t *, size_t, uint8_t *, size_t);
    size_t (*decode_chunk)(const uint8_t *, size_t, uint8_t *, size_t, const uint8_t *);
    void (*split)(struct split *, int);
    void (*pack)(uint8_t *, size_t);
    int (*merge)(struct merge *);
};

#define COMPILE(suffix, target)                                                                            \
    target static size_t encode_chunk_##suffix(const uint8_t *in, size_t count, uint8_t *out, size_t room)  \
    {                                                                                                      \
        return encode_chunk_body(in, count, out, room);                                                    \
    }                                                                                                      \
    target static size_t decode_chunk_##suffix(const uint8_t *in, size_t size, uint8_t *out, size_t count,  \
                                               const uint8_t *next)                                        \
    {                                                                                                      \
        return decode_chunk_body(in, size, out, count, next);                                                    \
    }                                                                                                      \
    target static void split_##suffix(struct split *s, int centred)                                        \
    {                                                                                                      \
        split_body(s, centred);                                                                            \
    }                                                                                                      \
    target static void pack_##suffix(uint8_t *rest, size_t quarter)                                        \
    {                                                                                                      \
        pack_body(rest, quarter);                                                                          \
    }                                                                                                      \
    target static int merge_##suffix(struct merge *m)                                                \
    {                                                                                                      \
        return merge_body(m, decode_chunk_##suffix);                                                                              \
    }                                                                                                      \
    static const struct loops loops_##suffix = {encode_chunk_##suffix, decode_chunk_##suffix,              \
                                                split_##suffix, pack_##suffix, merge_##suffix};

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
    Py_ssize_t first, width, num_escapes;
    int centred;
    Py_buffer centres, signs, symbols, rest, escapes, in;
    if (!PyArg_ParseTuple(args, "Onnpw*w*w*w*w*n", &layer, &first, &width, &centred, &centres, &signs, &symbols,
                          &rest, &escapes, &num_escapes))
        return NULL;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(layer, &in, PyBUF_STRIDES) == 0) {
        Py_ssize_t rows = in.ndim == 2 ? in.shape[0] : 0, own = in.ndim == 2 ? in.shape[1] : 0;
        if (rows < 1 || (centred && rows < 4) || rows > UINT16_MAX || own < 1 || own % GROUP || in.itemsize != 2 ||
            in.strides[1] != 2 || first < 0 || first % GROUP || width > PY_SSIZE_T_MAX / 4 / rows ||
            first > width - own || centres.len < width || signs.len < width || symbols.len < rows * width ||
            rest.len < rows * width || escapes.len < rows * width || num_escapes < 0 ||
            num_escapes > rows * first) {
            PyErr_SetString(PyExc_ValueError, "split_layer: sizes do not fit each other");
        } else {
            struct split s = {
                .in = in.buf,
                .stride = in.strides[0],
                .rows = (size_t)rows,
                .width = (size_t)own,
                .rest_stride = (size_t)width,
                .centres = (uint8_t *)centres.buf + first,
                .signs = (uint8_t *)signs.buf + first,
                .symbols = (uint8_t *)symbols.buf + rows * first,
                .rest = (uint8_t *)rest.buf + first,
                .escapes = escapes.buf,
                .num_escapes = (size_t)num_escapes,
            };
            Py_BEGIN_ALLOW_THREADS
            best->split(&s, centred);
            Py_END_ALLOW_THREADS
            result = PyLong_FromSize_t(s.num_escapes);
        }
        PyBuffer_Release(&in);
    }
    PyBuffer_Release(&centres);
    PyBuffer_Release(&signs);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&escapes);
    return result;
}

static PyObject *pack_six(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer rest;
    if (!PyArg_ParseTuple(args, "w*", &rest))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    best->pack(rest.buf, (size_t)rest.len / 4);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rest);
    Py_RETURN_NONE;
}

static PyObject *merge(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer coded, symbols, packed, centres, signs, escapes, last, out;
    Py_ssize_t rows, width;
    if (!PyArg_ParseTuple(args, "z*y*y*y*y*y*w*w*nn", &coded, &symbols, &packed, &centres, &signs, &escapes, &last,
                          &out, &rows, &width))
        return NULL;
    int fits = rows > 0 && width > 0 && width % GROUP == 0 && width <= PY_SSIZE_T_MAX / 4 / rows;
    Py_ssize_t numbers = fits ? rows * width : 0, quarter = (numbers + 3) / 4;
    fits = fits && symbols.len == numbers && packed.len == 3 * quarter && centres.len == width &&
           signs.len == width / 8 && last.len >= quarter && out.len == 2 * numbers &&
           !(coded.buf && symbols.readonly);
    int good = 0;
    if (fits) {
        struct merge m = {
            .coded = coded.buf,
            .coded_size = coded.buf ? (size_t)coded.len : 0,
            .symbols = symbols.buf,
            .packed = packed.buf,
            .centres = centres.buf,
            .signs = signs.buf,
            .escapes = escapes.buf,
            .num_escapes = (size_t)escapes.len,
            .rows = (size_t)rows,
            .width = (size_t)width,
            .last = last.buf,
            .out = out.buf,
        };
        Py_BEGIN_ALLOW_THREADS
        good = best->merge(&m);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&coded);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&centres);
    PyBuffer_Release(&signs);
    PyBuffer_Release(&escapes);
    PyBuffer_Release(&last);
    PyBuffer_Release(&out);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "merge: sizes do not fit each other");
    if (!good)
        return PyErr_Format(PyExc_ValueError, "Huffman code or escapes are damaged");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"huffman_encode", huffman_encode, METH_VARARGS,
     "huffman_encode(symbols, out) -> bytes written, 0 if the code is no shorter than `out` or cannot be made"},
    {"huffman_decode", huffman_decode, METH_VARARGS,
     "huffman_decode(data, out): fill `out` from all of `data`; ValueError if they do not fit"},
    {"split_layer", split_layer, METH_VARARGS,
     "split_layer(layer, first, width, centred, centres, signs, symbols, rest, escapes, num_escapes) -> escapes"},
    {"pack_six", pack_six, METH_VARARGS, "pack_six(rest): four quarters of remainders to three, in place"},
    {"merge", merge, METH_VARARGS,
     "merge(coded or None, symbols, packed, centres, signs, escapes, scratch, out, rows, width): inverse of the split"},
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
