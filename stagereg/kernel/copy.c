/* The compiled part of stagereg.kernel: copies many pieces of memory with one call, large ones past the caches.
 *
 * A staged copy is not read again soon. Streaming stores write it without reading what was there before. memcpy uses
 * such stores only for sizes near that of the whole cache. This file is optional: setup.py builds it, compiled.py loads
 * it with ctypes, and it runs without the GIL and uses nothing of Python.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64      /* bytes of a cache line: one that is written as a whole is not read first */
#define AHEAD 4096   /* bytes: a page. The processor's own prefetching ends with each, so the next one is asked for */
#define STREAMED 512 /* bytes: below this, filling up to whole lines costs more than the stores save */

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

/* How large pieces are copied on this processor. */
const char *stagereg_copy_way(void)
{
    const char *name;
    choose(&name);
    return name;
}

/* Copy `count` pieces that do not overlap. Of each, `moves` has three numbers: where to, as bytes from `base`; the
 * address of the source; bytes. Other threads see all of it when this has returned and they are told so.
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
    fence(); /* The caller needs no fence of its own before it tells other threads that the copy is there. */
}
