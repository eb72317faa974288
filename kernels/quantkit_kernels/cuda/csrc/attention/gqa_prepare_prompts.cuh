// gqa_prepare for prompts. A block takes a token, whose heads lie in shared memory: they come and go by 16 bytes a thread, and a warp norms and
// turns a head there, with gains and angles in registers for all the heads that it takes. Results are those of a warp a head, to the bit.
#pragma once

#include "attention/gqa_head.cuh"
#include "common/codes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"

namespace {

constexpr int kTokenWarps = 8, kTokenThreads = 32 * kTokenWarps, kFewestTokens = 256, kWidestHead = 256, kMostTokenBytes = 96 * 1024;

template <class T> int token_bytes(const GqaPrepare& p) { return (p.heads + 2 * p.kv_heads) * p.d * (int)sizeof(T); }

// Whether a block takes a token: with few tokens a warp a head is sooner done.
template <class T> bool by_tokens(const GqaPrepare& p) { return p.tokens >= kFewestTokens && p.d <= kWidestHead && token_bytes<T>(p) <= kMostTokenBytes; }

// `count` heads of a token, side by side at `heads`, normed with `gains` [d] where they are given, and rotated. Each warp takes every eighth.
// PAIRS: of channels that a lane turns, at most; if WHOLE, just so many, of halves of all of a head.
template <class T, int PAIRS, bool WHOLE> __device__ __forceinline__ void turn_heads(T* heads, int count, const T* gains, int token, const GqaPrepare& p) {
  const int lane = threadIdx.x & 31, d = WHOLE ? 64 * PAIRS : p.d, rope = WHOLE ? d : p.rope, half = rope / 2;
  const bool interleaved = !WHOLE && p.interleaved;
  float2 angle[PAIRS], gain[PAIRS];
  float rest[2 * PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = j * 32 + lane;
    if (i >= half) continue;
    const int2 at = channels_of(i, rope, interleaved);
    angle[j] = make_float2(p.cosines[(size_t)token * half + i], p.sines[(size_t)token * half + i]);
    if (gains) gain[j] = make_float2(float(gains[at.x]), float(gains[at.y]));
  }
#pragma unroll
  for (int j = 0; j < 2 * PAIRS; ++j) {
    const int i = rope + j * 32 + lane;
    if (gains && i < d) rest[j] = float(gains[i]);
  }
  for (int head = threadIdx.x / 32; head < count; head += kTokenWarps) {
    T* one = heads + head * d;
    const float factor = gains ? norm_factor(one, d, p.eps) : 1.f;
    // A channel is read by the lane that writes it, after all lanes' squares.
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int i = j * 32 + lane;
      if (i >= half) continue;
      const int2 at = channels_of(i, rope, interleaved);
      float2 x = make_float2(float(one[at.x]), float(one[at.y]));
      if (gains) x.x = x.x * factor * gain[j].x, x.y = x.y * factor * gain[j].y;
      const float2 y = rotated(x, angle[j].x, angle[j].y);
      one[at.x] = T(y.x), one[at.y] = T(y.y);
    }
    if (!gains) continue;
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; ++j) {
      const int i = rope + j * 32 + lane;
      if (i < d) one[i] = T(float(one[i]) * factor * rest[j]);
    }
  }
}

// `count` heads from shared memory into the cache's codes, a warp a head.
template <class T, class Code> __device__ __forceinline__ void store_codes(const T* heads, int count, uint8_t* codes, float* scales, int d) {
  const int lane = threadIdx.x & 31;
  for (int head = threadIdx.x / 32; head < count; head += kTokenWarps) {
    const bool there = lane * 8 < d;
    const Eight<T> own = there ? *reinterpret_cast<const Eight<T>*>(heads + (size_t)head * d + lane * 8) : Eight<T>{};
    float x[8], scale = kLeastScale;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = own.get(j), scale = fmaxf(scale, fabsf(x[j]) / Code::largest);
    scale = warp_max(scale);
    if (there) *reinterpret_cast<uint2*>(codes + (size_t)head * d + lane * 8) = codes_of_eight<Code>(x, scale);
    if (lane == 0) scales[head] = scale;
  }
}

// `count` numbers from shared memory, by 16 bytes.
template <class T> __device__ __forceinline__ void store_row(T* to, const T* from, int count) {
  for (int i = threadIdx.x * 8; i < count; i += kTokenThreads * 8) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

// Code: void where the cache is of T.
template <class T, class Code, int PAIRS, bool WHOLE> __global__ void __launch_bounds__(kTokenThreads, WHOLE ? 6 : 4) gqa_prepare_prompts(const GqaPrepare p) {
  extern __shared__ __align__(16) char shared[];
  const int token = blockIdx.x, of_queries = p.heads * p.d, of_keys = p.kv_heads * p.d, all = of_queries + 2 * of_keys;
  T *queries = reinterpret_cast<T*>(shared), *keys = queries + of_queries, *values = keys + of_keys;
  wait_for_predecessor();
  let_successor_start();
  const T* from = (const T*)p.qkv + (size_t)token * all;
  for (int i = threadIdx.x * 8; i < all; i += kTokenThreads * 8) copy16(shared_address(queries + i), from + i);
  end_copies();
  const size_t slot = p.slots[token];
  wait_for_copies<0>();
  __syncthreads();
  turn_heads<T, PAIRS, WHOLE>(queries, p.heads, (const T*)p.q_norm, token, p);
  turn_heads<T, PAIRS, WHOLE>(keys, p.kv_heads, (const T*)p.k_norm, token, p);
  __syncthreads();
  store_row((T*)p.q + (size_t)token * of_queries, queries, of_queries);
  if constexpr (std::is_same_v<Code, void>) {
    store_row((T*)p.keys + slot * of_keys, keys, of_keys);
    store_row((T*)p.values + slot * of_keys, values, of_keys);
  } else {
    store_codes<T, Code>(keys, p.kv_heads, (uint8_t*)p.keys + slot * of_keys, p.key_scales + slot * p.kv_heads, p.d);
    store_codes<T, Code>(values, p.kv_heads, (uint8_t*)p.values + slot * of_keys, p.value_scales + slot * p.kv_heads, p.d);
  }
}

template <class T, class Code, int PAIRS, bool WHOLE> int launch_prompts(const GqaPrepare& p, void* s) {
  static SharedMemory shared;
  if (const int fault = shared.allow(gqa_prepare_prompts<T, Code, PAIRS, WHOLE>, kMostTokenBytes)) return fault;
  return start(gqa_prepare_prompts<T, Code, PAIRS, WHOLE>, dim3(p.tokens), kTokenThreads, token_bytes<T>(p), s, p);
}

template <class T, class Code> int launch_prompts(const GqaPrepare& p, void* s) {
  if (p.d == 128 && p.rope == 128 && !p.interleaved) return launch_prompts<T, Code, 2, true>(p, s);
  if (p.d <= 64) return launch_prompts<T, Code, 1, false>(p, s);
  return p.d <= 128 ? launch_prompts<T, Code, 2, false>(p, s) : launch_prompts<T, Code, 4, false>(p, s);
}

}  // namespace
