// What attention of 16 tokens is made of, whatever the cache holds: sums, softmax, copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "attention/gqa_schedule.cuh"
#include "common/copies.cuh"
#include "common/mma.cuh"

namespace {

// 16 bytes of this thread's, or zeros. The L2 prefetches 128 bytes at a time: long contexts are read 2 % faster so.
__device__ __forceinline__ void copy16_or_zeros(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
template <class T> __device__ __forceinline__ uint32_t packed(float low, float high) {
  struct __align__(4) { T v[2]; } both = {T(low), T(high)};
  return *reinterpret_cast<uint32_t*>(&both);
}

// What a warp gathers about the heads of a unit: sums of D / 8 times 8 columns, a head's largest score and the sum of its probabilities.
template <int D> struct Sums {
  float of[D / 8][4], largest[2], total[2];
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) of[n][0] = of[n][1] = of[n][2] = of[n][3] = 0;
    largest[0] = largest[1] = -INFINITY, total[0] = total[1] = 0;
  }
};

// Scores of 16 tokens, of which `left` count, become probabilities as an operand; what was summed so far shrinks. HALVES: whether there are more
// than 8 heads. Scales: what the tokens' scores and values are multiplied with; the latter goes into the probabilities.
template <class T, int D, int HALVES, class Scales>
__device__ __forceinline__ void exponentiate(uint32_t (&probabilities)[4], Sums<D>& sums, float (&score)[2][4], int left, const Scales& scales) {
  const int part = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float top = sums.largest[h];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[n][2 * h + e];
        s = n * 8 + 2 * part + e < left ? s * scales.of_key(n, e) : -INFINITY;
        top = fmaxf(top, s + scales.log_of_value(n, e));
      }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));  // finite: token 0 counts
    const float less = exp2f(sums.largest[h] - top);
    sums.largest[h] = top, sums.total[h] *= less;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float low = exp2f(score[n][2 * h] - top), high = exp2f(score[n][2 * h + 1] - top);
      sums.total[h] += low + high;
      if constexpr (Scales::scales_values)
        probabilities[2 * n + h] = packed<T>(exp2f(score[n][2 * h] + scales.log_of_value(n, 0) - top), exp2f(score[n][2 * h + 1] + scales.log_of_value(n, 1) - top));
      else
        probabilities[2 * n + h] = packed<T>(low, high);
    }
    if (__any_sync(0xffffffffu, less != 1.f)) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) sums.of[n][2 * h] *= less, sums.of[n][2 * h + 1] *= less;
    }
  }
}

}  // namespace
