// Queries that read latents: multiplied with W_UK, their rotary part turned.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kAbsorbThreads = 128, kAbsorbColumns = 64, kAbsorbBlocks = kLatent / kAbsorbColumns, kAbsorbStride = 2 * kAbsorbColumns + 16;  // bytes: eight rows of a matrix lie in different banks

// out[token, head] = [q_nope W_UK, turned q_pe]. A block per head, 64 columns and eight tokens or so many more, and others for the rotary part.
template <class T>
__global__ void __launch_bounds__(kAbsorbThreads) absorb(const T* q, const T* kv_b, const float* cosines, const float* sines, T* out, int tokens, int heads, int interleaved) {
  __shared__ __align__(16) char w[kNope * kAbsorbStride];
  const int head = blockIdx.x, column = blockIdx.y * kAbsorbColumns, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3;
  if (column < kLatent) {
    const T* from = kv_b + (size_t)head * (kNope + kValue) * kLatent + column;
#pragma unroll
    for (int i = 0; i < kNope * kAbsorbColumns / 8 / kAbsorbThreads; ++i) {
      const int chunk = i * kAbsorbThreads + threadIdx.x, row = chunk / 8, at = chunk % 8;
      copy16(shared_address(w) + row * kAbsorbStride + at * 16, from + row * kLatent + at * 8);
    }
  }
  wait_for_predecessor();
  let_successor_start();
  if (column >= kLatent) {
    const int block = (blockIdx.y - kAbsorbBlocks) * gridDim.z + blockIdx.z, blocks = (gridDim.y - kAbsorbBlocks) * gridDim.z;
    for (int i = block * kAbsorbThreads + threadIdx.x; i < tokens * (kRope / 2); i += blocks * kAbsorbThreads) {
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
  for (int first = 8 * blockIdx.z; first < tokens; first += 8 * gridDim.z) {
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
  // Up to 32 tokens no block takes turns: each would wait for its queries anew.
  const int turning = rows * (kRope / 2) > kAbsorbThreads ? 2 : 1;
  return start(absorb<T>, dim3(heads, kAbsorbBlocks + turning, min(4, (rows + 7) / 8)), kAbsorbThreads, 0, s, (const T*)q, (const T*)kv_b, cosines, sines, (T*)out, rows, heads, interleaved);
}

}  // namespace
