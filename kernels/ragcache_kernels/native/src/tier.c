/* Which of the tiers this processor runs. Compiled for the baseline, so that it runs everywhere. */

#include "abi.h"

/* 0: the baseline (SSE2 or NEON), 1: AVX2 with FMA, 2: AVX-512, 3: AVX-512
 * with dot products of bfloat16 and int8. */
EXPORT int best_tier(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    int dots = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    return dots ? 3 : 2;
#else
    return 0;
#endif
}
