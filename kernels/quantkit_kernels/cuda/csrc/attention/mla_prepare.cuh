// What latent attention is prepared from, how a row is normed, and what is cached of a token in 16 bits.
#pragma once

#include <stdint.h>

#include "common/lanes.cuh"

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

// A thread's first eight gains of a row: long in no cache, so they are asked for before the row is there.
template <class T> __device__ __forceinline__ Eight<T> first_gains(const T* weight, int width) {
  return threadIdx.x * 8 < width ? *reinterpret_cast<const Eight<T>*>(weight + threadIdx.x * 8) : Eight<T>{};
}

template <class T> __device__ void norm_row(const T* from, const T* weight, const Eight<T>& gains, T* to, int width, float eps) {
  // What a thread reads first it keeps; rows of up to 2048 need no more.
  const int at = threadIdx.x * 8;
  Eight<T> kept = {};
  float squares = 0;
  for (int i = at; i < width; i += blockDim.x * 8) {
    const Eight<T> v = *reinterpret_cast<const Eight<T>*>(from + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += v.get(j) * v.get(j);
    if (i == at) kept = v;
  }
  const float factor = rsqrtf(block_sum(squares) / width + eps);
  for (int i = at; i < width; i += blockDim.x * 8) {
    Eight<T> v = i == at ? kept : *reinterpret_cast<const Eight<T>*>(from + i);
    const Eight<T> w = i == at ? gains : *reinterpret_cast<const Eight<T>*>(weight + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * factor * w.get(j));
    *reinterpret_cast<Eight<T>*>(to + i) = v;
  }
}

// The latent of `row` [kv_lora + rope], normed, and the rotary key after it, rotated, go into `entry`. angles: where the token's begin in the
// tables. gains: as `first_gains` gives them. All threads of a block.
template <class T> __device__ void cache_token(const MlaPrepare& p, const T* row, const Eight<T>& gains, T* entry, int angles) {
  const int half = p.rope / 2;
  const T* key = row + p.kv_lora;
  // By the last threads first, as the row's norm is the first ones' work.
  for (int i = blockDim.x - 1 - threadIdx.x; i < half; i += blockDim.x) {
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
    const float c = p.cosines[angles + i], s = p.sines[angles + i], a = float(key[first]), b = float(key[second]);
    entry[p.kv_lora + first] = T(a * c - b * s);
    entry[p.kv_lora + second] = T(a * s + b * c);
  }
  norm_row(row, (const T*)p.kv_norm, gains, entry, p.kv_lora, p.eps);
}

}  // namespace
