// What grouped-query attention is prepared from, and how one head of a token is normed and rotated. Arithmetic is float32.
#pragma once

#include <stdint.h>

#include "common/lanes.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct GqaPrepare {
  const void *qkv, *q_norm, *k_norm;  // [tokens, heads + 2 * kv_heads, d]; gains [d], or null
  const float *cosines, *sines;       // [tokens, rope / 2]
  const int64_t* slots;               // [tokens]
  void *q, *keys, *values;            // [tokens, heads, d]; caches [.., kv_heads, d]
  float *key_scales, *value_scales;   // [.., kv_heads] of codes, else null
  int tokens, heads, kv_heads, d, rope, interleaved;
  float eps;
};

namespace {

// x, rotated by an angle of this cosine and sine. Which products are rounded before they are added is every kernel's, so their results are equal to the bit.
__device__ __forceinline__ float2 rotated(float2 x, float c, float s) {
  return make_float2(__fmaf_rn(x.x, c, -__fmul_rn(x.y, s)), __fmaf_rn(x.x, s, __fmul_rn(x.y, c)));
}

// The two channels that pair i of `rope` turns.
__device__ __forceinline__ int2 channels_of(int i, int rope, bool interleaved) { return interleaved ? make_int2(2 * i, 2 * i + 1) : make_int2(i, i + rope / 2); }

// What a warp multiplies the head at `from` with before its gains. So is the sum's order.
template <class T> __device__ __forceinline__ float norm_factor(const T* from, int d, float eps) {
  float squares = 0;
  for (int i = threadIdx.x & 31; i < d; i += 32) squares += float(from[i]) * float(from[i]);
  return rsqrtf(warp_sum(squares) / d + eps);
}

}  // namespace
