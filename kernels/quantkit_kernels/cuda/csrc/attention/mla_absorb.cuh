// Queries that read latents: multiplied with W_UK, their rotary part turned.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kAbsorbColumns = 64, kAbsorbStride = 2 * kAbsorbColumns + 16;  // bytes: eight rows of a matrix lie in different banks

// out[token, head] = [q_nope W_UK, turned q_pe]. A block per head and 64 columns, and one for the rotary part.
template <class T>
__global__ void __launch_bounds__(128) absorb(const T* q, const T* kv_b, const float* cosines, const float* sines, T* out, int tokens, int heads, int interleaved) {
  __shared__ __align__(16) char w[kNope * kAbsorbStride];
  const int head = blockIdx.x, column = blockIdx.y * kAbsorbColumns, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3;
  if (column < kLatent) {
    const T* from = kv_b + (size_t)head * (kNope + kValue) * kLatent + column;
#pragma unroll
    for (int i = 0; i < kNope * kAbsorbColumns / 8 / 128; ++i) {
      const int chunk = i * 128 + threadIdx.x, row = chunk / 8, at = chunk % 8;
      copy16(shared_address(w) + row * kAbsorbStride + at * 16, from + row * kLatent + at * 8);
    }
  }
  wait_for_predecessor();
  let_successor_start();
  if (column == kLatent) {
    for (int i = threadIdx.x; i < tokens * (kRope / 2); i += 128) {
      const int token = i / (kRope / 2), pair = i % (kRope / 2);
      const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + kRope / 2;
      const T* from = q + ((size_t)token * heads + head) * kQuery + kNope;
      T* to = out + ((size_t)token * heads + head) * kEntry + kLatent;
      const float a = float(from[first]), b = float(from[second]), c = cosines[i], s = sines[i];
      to[first] = T(a * c - b * s);
      to[second] = T(a * s + b * c);
    }
    return;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  // A is W_UK transposed: 16 columns of it by all of 128 along the head.
  uint32_t a[kNope / 16][4];
  const uint32_t at = shared_address(w) + ((lane >> 4) * 8 + (lane & 7)) * kAbsorbStride + (warp * 16 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
  for (int k = 0; k < kNope / 16; ++k) load_matrices_transposed(a[k], at + k * 16 * kAbsorbStride);
  for (int first = 0; first < tokens; first += 8) {
    const int from = min(first + g, tokens - 1);
    const uint32_t* row = reinterpret_cast<const uint32_t*>(q + ((size_t)from * heads + head) * kQuery);
    uint32_t b[kNope / 16][2];
#pragma unroll
    for (int k = 0; k < kNope / 16; ++k) b[k][0] = row[k * 8 + part], b[k][1] = row[k * 8 + 4 + part];
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kNope / 16; ++k) mma<T>(sums, a[k], b[k][0], b[k][1]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int token = first + 2 * part + c % 2;
      if (token < tokens) out[((size_t)token * heads + head) * kEntry + column + warp * 16 + g + 8 * (c / 2)] = T(sums[c]);
    }
  }
}

template <class T> int launch_absorb(const void* q, const void* kv_b, const float* cosines, const float* sines, void* out, int rows, int heads, int interleaved, void* s) {
  return start(absorb<T>, dim3(heads, kLatent / kAbsorbColumns + 1), 128, 0, s, (const T*)q, (const T*)kv_b, cosines, sines, (T*)out, rows, heads, interleaved);
}

}  // namespace
