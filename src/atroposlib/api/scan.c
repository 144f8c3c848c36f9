/* One pass over the JSON text of a scored group: finds the fields, checks and counts the numbers, leaves out white space.
 * At the end, two helpers for whole arrays: are these floats finite, and zlib's checksum by the processor's own instructions.
 *
 * Compiled by atroposlib/api/native_scan.py where there is a C compiler; without one the same work is done in Python.
 * Everything is bounded by `end`; nothing is allocated; nothing is written but `out` (at most as long as the input),
 * `spans` and `lengths`. A negative result means "not surely well-formed": the Python reader then decides and explains.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

typedef const uint8_t *text;

enum { NOT_PLAIN = -1, MAX_FIELDS = 32, MAX_DIGITS = 280, MAX_INTEGER = 9 };

/* A field of the object: where its value is. For number fields in `out`, with its rows in `lengths`; else in the body. */
typedef struct {
    int64_t start, end, first_row, rows;
} span;

static text skip_blank(text p, text end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

/* The loops below stop at any byte that is not theirs; `atropos_scan` has seen to it that the last byte is '}'. */

static int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

/* Copy a run of digits, eight at a time where there are so many. */
static text copy_digits(text p, text end, uint8_t **out) {
    uint8_t *o = *out;
    uint64_t eight;
    while (end - p >= 8) {
        memcpy(&eight, p, 8);
        if ((eight & 0xF0F0F0F0F0F0F0F0u) != 0x3030303030303030u) break;
        if (((eight + 0x0606060606060606u) & 0xF0F0F0F0F0F0F0F0u) != 0x3030303030303030u) break;
        memcpy(o, &eight, 8);
        p += 8, o += 8;
    }
    while (is_digit(*p)) *o++ = *p++;
    *out = o;
    return p;
}

static text copy_integer(text p, uint8_t **out) {
    uint8_t *o = *out;
    if (*p == '-') *o++ = *p++;
    if (!is_digit(*p)) return NULL;
    text first = p;
    while (is_digit(*p)) *o++ = *p++;
    *out = o;
    return *first == '0' && p - first > 1 ? NULL : p;
}

/* Copy a number with fraction and exponent, as long as it cannot overflow. */
static text copy_float(text p, text end, uint8_t **out) {
    text first = p;
    p = copy_integer(p, out);
    if (p == NULL) return NULL;
    int64_t digits = p - first, exponent = 0;
    if (*p == '.') {
        *(*out)++ = *p++;
        if (!is_digit(*p)) return NULL;
        p = copy_digits(p, end, out);
    }
    if (*p == 'e' || *p == 'E') {
        *(*out)++ = *p++;
        int negative = *p == '-';
        if (*p == '-' || *p == '+') *(*out)++ = *p++;
        if (!is_digit(*p)) return NULL;
        while (is_digit(*p)) {
            if (exponent < 100000) exponent = exponent * 10 + (*p - '0');
            *(*out)++ = *p++;
        }
        if (negative) exponent = 0;
    }
    return digits + exponent > MAX_DIGITS ? NULL : p;
}

/* The numbers of a row after its `[`, copied up to its `]`. Returns the place after that, or NULL. */
static text scan_row(text p, text end, int floats, uint8_t **out, int64_t *length) {
    int64_t numbers = 0;
    p = skip_blank(p, end);
    while (*p != ']') {
        if (numbers) {
            if (*p != ',') return NULL;
            *(*out)++ = ',';
            p++;
            if (*p == ' ') p++;
            if (*p <= ' ') p = skip_blank(p, end);
        }
        text number = p;
        p = floats ? copy_float(p, end, out) : copy_integer(p, out);
        if (p == NULL || (!floats && p - number > MAX_INTEGER)) return NULL; /* may not fit into 32 bits */
        numbers++;
        if (*p <= ' ') p = skip_blank(p, end);
    }
    *(*out)++ = ']';
    *length = numbers;
    return p + 1;
}

/* `[[1, 2], [3]]` -> `[[1,2],[3]]` in `out` and the length of each row. Returns the end of the text, or NULL. */
static text scan_rows(text p, text end, int floats, uint8_t **out, int64_t *lengths, int64_t *rows, int64_t max_rows) {
    *(*out)++ = '[';
    p = skip_blank(p + 1, end);
    int64_t count = 0;
    while (*p != ']') {
        if (count) {
            if (*p != ',') return NULL;
            *(*out)++ = ',';
            p = skip_blank(p + 1, end);
        }
        if (*p != '[' || count >= max_rows) return NULL;
        *(*out)++ = '[';
        p = scan_row(p + 1, end, floats, out, &lengths[count++]);
        if (p == NULL) return NULL;
        p = skip_blank(p, end);
    }
    *(*out)++ = ']';
    *rows = count;
    return p + 1;
}

/* The end of a string that begins at `p` (which is at its quote), or NULL. Control characters are left to the reader. */
static text string_end(text p, text end) {
    for (p++; p < end; p++) {
        if (*p == '"') return p + 1;
        if (*p == '\\' && ++p >= end) return NULL;
    }
    return NULL;
}

/* The end of any JSON value, by its brackets and strings only: whoever uses it has to check it. */
static text value_end(text p, text end) {
    int64_t depth = 0;
    while (p < end) {
        if (*p == '"') {
            p = string_end(p, end);
            if (p == NULL) return NULL;
        } else if (*p == '[' || *p == '{') {
            depth++, p++;
        } else if (*p == ']' || *p == '}') {
            if (depth == 0) return p;
            depth--, p++;
        } else if (*p == ',' && depth == 0) {
            return p;
        } else {
            p++;
            continue;
        }
        if (depth == 0) return p;
    }
    return NULL;
}

/* names: the known keys one after the other, each ended by a 0 byte; kinds: 0 other, 1 rows of integers, 2 rows of floats.
 * spans[i].start is -1 for a key that is not there. Returns the number of bytes in `out`, or a negative number. */
int64_t atropos_scan(text body, int64_t size, const char *names, const int32_t *kinds, int32_t num_names, uint8_t *out, span *spans,
                     int64_t *lengths, int64_t max_rows) {
    text p = body, end = body + size;
    uint8_t *o = out;
    int64_t row = 0;
    if (num_names > MAX_FIELDS) return NOT_PLAIN;
    for (int32_t i = 0; i < num_names; i++) spans[i].start = -1;
    while (end > body && (end[-1] == ' ' || end[-1] == '\n' || end[-1] == '\r' || end[-1] == '\t')) end--;
    if (end == body || end[-1] != '}') return NOT_PLAIN;
    p = skip_blank(p, end);
    if (p >= end || *p != '{') return NOT_PLAIN;
    p = skip_blank(p + 1, end);
    for (int first = 1; p < end && *p != '}'; first = 0) {
        if (!first) {
            if (*p != ',') return NOT_PLAIN;
            p = skip_blank(p + 1, end);
        }
        if (p >= end || *p != '"') return NOT_PLAIN;
        text key = p + 1;
        p = string_end(p, end);
        if (p == NULL) return NOT_PLAIN;
        size_t key_size = (size_t)(p - 1 - key);
        if (memchr(key, '\\', key_size) != NULL) return NOT_PLAIN;
        p = skip_blank(p, end);
        if (p >= end || *p != ':') return NOT_PLAIN;
        p = skip_blank(p + 1, end);
        int32_t field = 0;
        const char *name = names;
        while (field < num_names && (strlen(name) != key_size || memcmp(name, key, key_size) != 0)) {
            name += strlen(name) + 1;
            field++;
        }
        if (field == num_names) return NOT_PLAIN; /* an unknown key: the Python reader drops it */
        if (spans[field].start >= 0) return NOT_PLAIN; /* said twice */
        if (kinds[field] != 0 && p < end && *p == '[') {
            spans[field].start = o - out;
            spans[field].first_row = row;
            p = scan_rows(p, end, kinds[field] == 2, &o, lengths + row, &spans[field].rows, max_rows - row);
            if (p == NULL) return NOT_PLAIN;
            row += spans[field].rows;
            spans[field].end = o - out;
        } else {
            text start = p;
            p = value_end(p, end);
            if (p == NULL || p == start) return NOT_PLAIN;
            text stop = p;
            while (stop > start && (stop[-1] == ' ' || stop[-1] == '\n' || stop[-1] == '\r' || stop[-1] == '\t')) stop--;
            spans[field].start = start - body;
            spans[field].end = stop - body;
            spans[field].rows = -1;
        }
        p = skip_blank(p, end);
    }
    if (p >= end || skip_blank(p + 1, end) != end) return NOT_PLAIN;
    return o - out;
}

/* 1 when every one of these float32 (at any address) is finite, else 0: an exponent of all ones is infinity or NaN. */
int32_t atropos_all_finite(text data, int64_t count) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, data + 4 * i, 4);
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return !bad;
}

/* CRC-32 as zlib's crc32(), continued from `crc`; -1 where the processor has no instructions for this polynomial. */
#if defined(__aarch64__) && defined(__linux__)
__attribute__((target("+crc"))) static uint32_t crc32_by_instruction(uint32_t crc, text p, text end) {
    uint64_t eight;
    for (; end - p >= 8; p += 8) {
        memcpy(&eight, p, 8);
        crc = __crc32d(crc, eight);
    }
    while (p < end) crc = __crc32b(crc, *p++);
    return crc;
}

int64_t atropos_crc32(text data, int64_t size, uint32_t crc) {
    if (!(getauxval(AT_HWCAP) & (1 << 7))) return -1; /* HWCAP_CRC32 */
    return (uint32_t)~crc32_by_instruction(~crc, data, data + size);
}
#else
int64_t atropos_crc32(text data, int64_t size, uint32_t crc) {
    (void)data, (void)size, (void)crc;
    return -1;
}
#endif
