// What becomes of a token's low-rank projection [query, latent, rotary key] before attention: the query part is normed, latent (normed) and
// rotary key (turned) go into the cache. Arithmetic is float32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/lanes.cuh"
#include "common/launch.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaPrepare {
  const void *qkv_a, *q_norm, *kv_norm;  // [tokens, q_lora + kv_lora + rope]; gains [q_lora], [kv_lora]
  const float *cosines, *sines;          // [tokens, rope / 2]
  const int64_t* slots;                  // [tokens]
  void *q_a, *cache;                     // [tokens, q_lora]; [.., kv_lora + rope]
  int tokens, q_lora, kv_lora, rope, interleaved;
  float eps;
};

namespace {

template <class T> __device__ void norm_row(const T* from, const T* weight, T* to, int width, float eps) {
  float squares = 0;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
    const Eight<T> v = *reinterpret_cast<const Eight<T>*>(from + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += v.get(j) * v.get(j);
  }
  const float factor = rsqrtf(block_sum(squares) / width + eps);
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
    Eight<T> v = *reinterpret_cast<const Eight<T>*>(from + i);
    const Eight<T> w = *reinterpret_cast<const Eight<T>*>(weight + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * factor * w.get(j));
    *reinterpret_cast<Eight<T>*>(to + i) = v;
  }
}

// Two blocks a token: one norms the query part, the other does the rest.
template <class T>
__global__ void mla_prepare(const T* qkv_a, const T* q_norm, const T* kv_norm, const float* cosines, const float* sines, const int64_t* slots, T* q_a, T* cache, int q_lora,
                            int kv_lora, int rope, int interleaved, float eps) {
  wait_for_predecessor();
  let_successor_start();
  const int token = blockIdx.x, width = kv_lora + rope;
  const T* row = qkv_a + (size_t)token * (q_lora + width);
  if (blockIdx.y == 0) {
    norm_row(row, q_norm, q_a + (size_t)token * q_lora, q_lora, eps);
    return;
  }
  T* entry = cache + slots[token] * width;
  norm_row(row + q_lora, kv_norm, entry, kv_lora, eps);
  const int half = rope / 2;
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    const float c = cosines[token * half + i], s = sines[token * half + i];
    const float a = float(row[q_lora + kv_lora + first]), b = float(row[q_lora + kv_lora + second]);
    entry[kv_lora + first] = T(a * c - b * s);
    entry[kv_lora + second] = T(a * s + b * c);
  }
}

}  // namespace

// dtype: 0 bf16, 1 fp16, of all but the angles. q_lora and kv_lora are multiples of 8, rope of 2, and rows begin on 16 bytes.
extern "C" int qk_mla_prepare(const MlaPrepare* m, int dtype, void* s) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return start(mla_prepare<T>, dim3(m->tokens, 2), 256, 0, s, (const T*)m->qkv_a, (const T*)m->q_norm, (const T*)m->kv_norm, m->cosines, m->sines, m->slots, (T*)m->q_a, (T*)m->cache,
                 m->q_lora, m->kv_lora, m->rope, m->interleaved, m->eps);
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}
