// What becomes of a token's queries, keys and values before grouped-query attention: queries and keys are normed, where the model norms them,
// and rotated; keys and values go into the cache, or what 8 bits hold of them (codes.py). Arithmetic is float32. Of few tokens a warp takes a head,
// which is what is here; of many a block takes a token (gqa_prepare_prompts.cuh).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "attention/gqa_head.cuh"
#include "attention/gqa_prepare_prompts.cuh"
#include "common/codes.cuh"
#include "common/lanes.cuh"
#include "common/launch.cuh"

namespace {

constexpr int kWarps = 8;

// A warp takes one head of one token.
template <class T> struct Head {
  int lane, token, head;
  bool query, key;
  const T* from;

  __device__ __forceinline__ explicit Head(const GqaPrepare& p) : lane(threadIdx.x & 31) {
    const int all = p.heads + 2 * p.kv_heads, at = blockIdx.x * kWarps + threadIdx.x / 32;
    token = at / all, head = at % all, from = (const T*)p.qkv + (size_t)at * p.d;
    query = head < p.heads, key = !query && head < p.heads + p.kv_heads;
  }
  __device__ __forceinline__ T* query_row(const GqaPrepare& p) const { return (T*)p.q + ((size_t)token * p.heads + head) * p.d; }
  __device__ __forceinline__ size_t cache_row(const GqaPrepare& p) const { return (size_t)p.slots[token] * p.kv_heads + head - p.heads - (key ? 0 : p.kv_heads); }

  // take(i, value) for every channel of a query or key, normed and rotated, of which this lane has some. factor: of its norm.
  template <class Take> __device__ __forceinline__ void each(const GqaPrepare& p, float factor, const Take& take) const {
    const T* gains = (const T*)(query ? p.q_norm : p.k_norm);
    const auto normed = [&](int i) { return gains ? float(from[i]) * factor * float(gains[i]) : float(from[i]); };
    const int half = p.rope / 2;
    for (int i = lane; i < half; i += 32) {
      const int2 at = channels_of(i, p.rope, p.interleaved);
      const float2 y = rotated(make_float2(normed(at.x), normed(at.y)), p.cosines[(size_t)token * half + i], p.sines[(size_t)token * half + i]);
      take(at.x, y.x), take(at.y, y.y);
    }
    for (int i = p.rope + lane; i < p.d; i += 32) take(i, normed(i));
  }
  __device__ __forceinline__ float factor(const GqaPrepare& p) const { return (query ? p.q_norm : p.k_norm) ? norm_factor(from, p.d, p.eps) : 1.f; }
};

template <class T> __global__ void __launch_bounds__(32 * kWarps) gqa_prepare(const GqaPrepare p) {
  const Head<T> one(p);
  wait_for_predecessor();
  let_successor_start();
  if (one.token >= p.tokens) return;
  T* to = one.query ? one.query_row(p) : (T*)(one.key ? p.keys : p.values) + one.cache_row(p) * p.d;
  if (!one.query && !one.key) {
    for (int i = one.lane * 8; i < p.d; i += 256) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(one.from + i);
    return;
  }
  one.each(p, one.factor(p), [&](int i, float value) { to[i] = T(value); });
}

// The same with keys and values into codes: they are rounded to T first, and computed anew for each of the two passes over them.
template <class T, class Code> __global__ void __launch_bounds__(32 * kWarps) gqa_prepare_codes(const GqaPrepare p) {
  const Head<T> one(p);
  wait_for_predecessor();
  let_successor_start();
  if (one.token >= p.tokens) return;
  const float factor = one.query || one.key ? one.factor(p) : 1;
  const auto each = [&](const auto& take) {
    if (one.query || one.key) return one.each(p, factor, [&](int i, float value) { take(i, float(T(value))); });
    for (int i = one.lane; i < p.d; i += 32) take(i, float(one.from[i]));
  };
  if (one.query) {
    T* to = one.query_row(p);
    each([&](int i, float value) { to[i] = T(value); });
    return;
  }
  float scale = kLeastScale;
  each([&](int, float value) { scale = fmaxf(scale, fabsf(value) / Code::largest); });
  scale = warp_max(scale);
  const size_t row = one.cache_row(p);
  uint8_t* to = (uint8_t*)(one.key ? p.keys : p.values) + row * p.d;
  each([&](int i, float value) { to[i] = Code::of(__fdiv_rn(value, scale)); });
  if (one.lane == 0) (one.key ? p.key_scales : p.value_scales)[row] = scale;
}

}  // namespace

template <class Kernel> int launch_heads(Kernel* kernel, const GqaPrepare& p, void* stream) {
  return start(kernel, dim3((p.tokens * (p.heads + 2 * p.kv_heads) + kWarps - 1) / kWarps), 32 * kWarps, 0, stream, p);
}

// dtype: 0 bf16, 1 fp16, of all but the angles. d is a multiple of 8, rope of 2, and rows begin on 16 bytes.
extern "C" int qk_gqa_prepare(const GqaPrepare* p, int dtype, void* stream) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return by_tokens<T>(*p) ? launch_prompts<T, void>(*p, stream) : launch_heads(gqa_prepare<T>, *p, stream);
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}

// fp8: 0 int8, 1 E4M3. The rest likewise.
extern "C" int qk_gqa_prepare_codes(const GqaPrepare* p, int dtype, int fp8, void* stream) {
  const auto run = [&](auto* like, auto code) {
    using T = std::remove_pointer_t<decltype(like)>;
    using Code = decltype(code);
    return by_tokens<T>(*p) ? launch_prompts<T, Code>(*p, stream) : launch_heads(gqa_prepare_codes<T, Code>, *p, stream);
  };
  const auto typed = [&](auto* like) { return fp8 ? run(like, Fp8{}) : run(like, Int8{}); };
  return dtype == 0 ? typed((__nv_bfloat16*)nullptr) : typed((__half*)nullptr);
}
