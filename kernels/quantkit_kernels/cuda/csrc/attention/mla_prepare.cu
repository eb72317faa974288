// What becomes of a token's low-rank projection [query, latent, rotary key] before attention: the query part is normed, latent (normed) and
// rotary key (rotated) go into the cache, or what 8 bits hold of them (codes.py). Arithmetic is float32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "attention/mla_prepare.cuh"
#include "common/codes.cuh"
#include "common/lanes.cuh"
#include "common/launch.cuh"

// Where codes go, rotary keys divided by the scale, and scales.
struct MlaCodesOut {
  void *codes, *keys;  // [.., kv_lora] bytes, [.., rope]
  float* scales;       // [..]
};

namespace {

// Two blocks a token: one norms the query part, the other does the rest.
template <class T> __global__ void mla_prepare(const MlaPrepare p) {
  const Eight<T> gains = blockIdx.y == 0 ? first_gains((const T*)p.q_norm, p.q_lora) : first_gains((const T*)p.kv_norm, p.kv_lora);
  let_successor_start();
  wait_for_predecessor();
  const int token = blockIdx.x, width = p.kv_lora + p.rope;
  const T* row = (const T*)p.qkv_a + (size_t)token * (p.q_lora + width);
  if (blockIdx.y == 0) norm_row(row, (const T*)p.q_norm, gains, (T*)p.q_a + (size_t)token * p.q_lora, p.q_lora, p.eps);
  else cache_token(p, row + p.q_lora, gains, (T*)p.cache + p.slots[token] * width, token * (p.rope / 2));
}

// The same into codes. Values are rounded to T before they are encoded, and computed anew for each of the two passes over them.
template <class T, class Code> __global__ void mla_prepare_codes(const MlaPrepare p, const MlaCodesOut to) {
  const Eight<T> gains_q = blockIdx.y == 0 ? first_gains((const T*)p.q_norm, p.q_lora) : Eight<T>{};
  let_successor_start();
  wait_for_predecessor();
  const int token = blockIdx.x, width = p.kv_lora + p.rope, half = p.rope / 2;
  const T* row = (const T*)p.qkv_a + (size_t)token * (p.q_lora + width);
  if (blockIdx.y == 0) {
    norm_row(row, (const T*)p.q_norm, gains_q, (T*)p.q_a + (size_t)token * p.q_lora, p.q_lora, p.eps);
    return;
  }
  const T *latent = row + p.q_lora, *key = latent + p.kv_lora, *gains = (const T*)p.kv_norm;
  float squares = 0;
  for (int i = threadIdx.x; i < p.kv_lora; i += blockDim.x) squares += float(latent[i]) * float(latent[i]);
  const float factor = rsqrtf(block_sum(squares) / p.kv_lora + p.eps);
  const auto turn = [&](int i, float& low, float& high) {
    const float a = float(key[p.interleaved ? 2 * i : i]), b = float(key[p.interleaved ? 2 * i + 1 : i + half]);
    const float c = p.cosines[token * half + i], s = p.sines[token * half + i];
    low = float(T(a * c - b * s)), high = float(T(a * s + b * c));
  };
  const auto normed = [&](int first, float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = float(T(float(latent[first + j]) * factor * float(gains[first + j])));
  };
  constexpr float most = std::is_same_v<T, __half> ? 65504.f : 3.38953139e38f;
  float scale = kLeastScale;
  for (int i = threadIdx.x * 8; i < p.kv_lora; i += blockDim.x * 8) {
    float x[8];
    normed(i, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) scale = fmaxf(scale, fabsf(x[j]) / Code::largest);
  }
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    float low, high;
    turn(i, low, high);
    scale = fmaxf(scale, fmaxf(fabsf(low), fabsf(high)) / most);
  }
  scale = block_max(scale);
  const size_t slot = p.slots[token];
  for (int i = threadIdx.x * 8; i < p.kv_lora; i += blockDim.x * 8) {
    float x[8];
    normed(i, x);
    *reinterpret_cast<uint2*>((uint8_t*)to.codes + slot * p.kv_lora + i) = codes_of_eight<Code>(x, scale);
  }
  T* stored = (T*)to.keys + slot * p.rope;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    float low, high;
    turn(i, low, high);
    stored[p.interleaved ? 2 * i : i] = T(__fdiv_rn(low, scale)), stored[p.interleaved ? 2 * i + 1 : i + half] = T(__fdiv_rn(high, scale));
  }
  if (threadIdx.x == 0) to.scales[slot] = scale;
}

}  // namespace

// dtype: 0 bf16, 1 fp16, of all but the angles. q_lora and kv_lora are multiples of 8, rope of 2, and rows begin on 16 bytes.
extern "C" int qk_mla_prepare(const MlaPrepare* m, int dtype, void* s) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return start(mla_prepare<T>, dim3(m->tokens, 2), 256, 0, s, *m);
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}

// fp8: 0 int8, 1 E4M3. The rest likewise.
extern "C" int qk_mla_prepare_codes(const MlaPrepare* m, const MlaCodesOut* to, int dtype, int fp8, void* s) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return start(fp8 ? mla_prepare_codes<T, Fp8> : mla_prepare_codes<T, Int8>, dim3(m->tokens, 2), 256, 0, s, *m, *to);
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}
