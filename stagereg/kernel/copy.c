/* The compiled part of stagereg.kernel: copies many memory ranges in one call, and bypasses the caches for large ones.
 *
 * A staged copy is not read again soon. Streaming stores write it without first reading the old content. memcpy uses
 * such stores only for sizes close to the size of the whole cache. This file is optional: setup.py builds it, and
 * compiled.py loads it with ctypes. It does not use the Python API, and runs without the GIL.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64      /* bytes of a cache line; a line that is written completely is not read first */
#define AHEAD 4096   /* bytes to prefetch ahead: a page, because hardware prefetching stops at the end of a page */
#define STREAMED 512 /* bytes; for smaller ranges, aligning to whole lines costs more than streaming saves */

typedef void copy_lines(char *to, const char *from, size_t count);

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static void copy_lines_avx512(char *to, const char *from, size_t count)
{
    for (; count; count--, to += LINE, from += LINE) {
        if (count > AHEAD / LINE)
            _mm_prefetch(from + AHEAD, _MM_HINT_T1);
        _mm512_stream_si512((void *)to, _mm512_loadu_si512((const void *)from));
    }
}

__attribute__((target("avx2"))) static void copy_lines_avx2(char *to, const char *from, size_t count)
{
    for (; count; count--, to += LINE, from += LINE) {
        __m256i first = _mm256_loadu_si256((const void *)from);
        __m256i second = _mm256_loadu_si256((const void *)(from + LINE / 2));
        if (count > AHEAD / LINE)
            _mm_prefetch(from + AHEAD, _MM_HINT_T1);
        _mm256_stream_si256((void *)to, first);
        _mm256_stream_si256((void *)(to + LINE / 2), second);
    }
}

static copy_lines *choose(const char **name)
{
    int avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
    *name = avx512 ? "AVX-512 streaming stores" : avx2 ? "AVX2 streaming stores" : "memcpy";
    return avx512 ? copy_lines_avx512 : avx2 ? copy_lines_avx2 : NULL;
}

static void fence(void) { _mm_sfence(); }
#else
static copy_lines *choose(const char **name)
{
    *name = "memcpy";
    return NULL;
}

static void fence(void) {}
#endif

/* Return the name of the method that copies large ranges on this processor. */
const char *stagereg_copy_way(void)
{
    const char *name;
    choose(&name);
    return name;
}

/* Copy `count` ranges that do not overlap. `moves` has three numbers per range: the offset of the destination from
 * `base`, the address of the source, and the size in bytes. After the call, the copy is visible to other threads.
 */
void stagereg_copy(const uint64_t *moves, size_t count, uintptr_t base)
{
    const char *name;
    copy_lines *stream = choose(&name);
    for (; count; count--, moves += 3) {
        char *to = (char *)(base + (uintptr_t)moves[0]);
        const char *from = (const char *)(uintptr_t)moves[1];
        size_t size = (size_t)moves[2];
        if (stream && size >= STREAMED) {
            size_t head = -(uintptr_t)to % LINE, body = (size - head) / LINE * LINE;
            memcpy(to, from, head);
            stream(to + head, from + head, body / LINE);
            to += head + body, from += head + body, size -= head + body;
        }
        memcpy(to, from, size);
    }
    fence(); /* so that the caller needs no fence before it notifies other threads */
}
