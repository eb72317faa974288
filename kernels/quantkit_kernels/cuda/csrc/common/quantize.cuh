// Symmetric int8 per row: scale = max|x| / 127, or 1 for a row of zeros; codes rounded half to even.

#pragma once

#include <stdint.h>

namespace {

// The scale of the row of which each thread of the block has seen a part with this largest magnitude.
__device__ __forceinline__ float step_of(float largest) {
  __shared__ float warp_max[32];
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
  if ((threadIdx.x & 31) == 0) warp_max[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) largest = fmaxf(largest, warp_max[w]);
  return largest == 0 ? 1.f : largest / 127.f;
}

// The codes of four numbers, as bytes. x / step is the quotient q corrected once by its remainder, which rounds as a division does where the
// reciprocal is rounded to nearest (Markstein); adding 1.5 * 2^23 rounds it half to even and leaves the code in the low byte. |x| is at
// most 127 steps, so nothing needs to be clamped.
template <class T> __device__ __forceinline__ uint32_t codes_of(const T* x, float step, float reciprocal) {
  uint32_t c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = float(x[i]), q = __fmul_rn(value, reciprocal);
    c[i] = __float_as_uint(__fadd_rn(__fmaf_rn(__fmaf_rn(-q, step, value), reciprocal, q), 12582912.f));
  }
  return __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
}

}  // namespace
