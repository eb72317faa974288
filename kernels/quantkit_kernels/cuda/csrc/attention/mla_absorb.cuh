// Queries that read latents: multiplied with W_UK, their rotary part rotated.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kAbsorbThreads = 128, kAbsorbColumns = 64, kAbsorbBlocks = kLatent / kAbsorbColumns, kAbsorbRow = 2 * kAbsorbColumns, kMostTurning = 4;  // bytes; blocks a head that turn

// The rotary part of `tokens` queries of a head, interleaved as DeepSeek has it or in halves. A thread takes every `step`th pair.
template <class T> __device__ __forceinline__ void turn(const T* q, const float* cosines, const float* sines, T* out, int first, int step, int tokens, int heads, int head, int interleaved) {
#pragma unroll 2
  for (int i = first; i < tokens * (kRope / 2); i += step) {
    const int token = i / (kRope / 2), pair = i % (kRope / 2);
    const int x = interleaved ? 2 * pair : pair, y = interleaved ? 2 * pair + 1 : pair + kRope / 2;
    const T* from = q + ((size_t)token * heads + head) * kQuery + kNope;
    T* to = out + ((size_t)token * heads + head) * kEntry + kLatent;
    const float a = float(from[x]), b = float(from[y]), c = cosines[i], s = sines[i];
    to[x] = T(a * c - b * s);
    to[y] = T(a * s + b * c);
  }
}

// out[token, head] = [q_nope W_UK, rotated q_pe]. A block per head, 64 columns and AT_ONCE tokens, and others for the rotary part.
template <class T, int AT_ONCE>
__global__ void __launch_bounds__(kAbsorbThreads) absorb(const T* q, const T* kv_b, const float* cosines, const float* sines, T* out, int tokens, int heads, int interleaved) {
  constexpr int groups = AT_ONCE / 8;  // of eight tokens
  __shared__ __align__(128) char memory[kNope * kAbsorbRow];  // W_UK's columns, then the results, [token][64]
  const int head = blockIdx.x, column = blockIdx.y * kAbsorbColumns, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3;
  if (column >= kLatent) {
    wait_for_predecessor();
    let_successor_start();
    const int block = (blockIdx.y - kAbsorbBlocks) * gridDim.z + blockIdx.z, blocks = (gridDim.y - kAbsorbBlocks) * gridDim.z;
    return turn(q, cosines, sines, out, block * kAbsorbThreads + threadIdx.x, blocks * kAbsorbThreads, tokens, heads, head, interleaved);
  }
  const T* from = kv_b + (size_t)head * (kNope + kValue) * kLatent + column;
#pragma unroll
  for (int i = 0; i < kNope * kAbsorbColumns / 8 / kAbsorbThreads; ++i) {
    const int chunk = i * kAbsorbThreads + threadIdx.x, row = chunk / 8, at = chunk % 8;
    // The eight rows of a matrix, as they are read below, lie in different banks.
    copy16(shared_address(memory) + row * kAbsorbRow + (at ^ (row / 8 % 4 * 2 + row % 2)) * 16, from + row * kLatent + at * 8);
  }
  wait_for_predecessor();
  let_successor_start();
  // A lane reads eight values of a query at once, 8q .. 8q + 7 of each 32, which are two of B's pairs of two products: rows of W_UK, which
  // transposed is A, come in that order.
  const int token0 = blockIdx.z * AT_ONCE, here = min(AT_ONCE, tokens - token0);
  uint4 b[groups][kNope / 32];
#pragma unroll
  for (int t = 0; t < groups; ++t)
    if (t * 8 < here) {
      const uint4* row = reinterpret_cast<const uint4*>(q + ((size_t)(token0 + min(t * 8 + g, here - 1)) * heads + head) * kQuery) + part;
#pragma unroll
      for (int k = 0; k < kNope / 32; ++k) b[t][k] = row[k * 4];
    }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  uint32_t a[kNope / 16][4];  // 16 columns of W_UK by all of 128 along the head
  const int row = (lane & 7) / 2 * 8 + (lane & 1) + (lane >> 4) * 2;
  const uint32_t at = shared_address(memory) + row * kAbsorbRow + ((warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
#pragma unroll
  for (int k = 0; k < kNope / 16; ++k) load_matrices_transposed(a[k], at + (k / 2 * 32 + k % 2 * 4) * kAbsorbRow);
  __syncthreads();  // what was read may be written to
  const uint32_t to = shared_address(memory) + ((lane >> 4) * 8 + (lane & 7)) * kAbsorbRow + ((warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16;
#pragma unroll
  for (int t = 0; t < groups; t += 2)
    if (t * 8 < here) {
      float sums[2][2][4] = {};
#pragma unroll
      for (int k = 0; k < kNope / 32; ++k)
#pragma unroll
        for (int n = 0; n < min(2, groups); ++n) {
          mma<T>(sums[n][0], a[2 * k], b[t + n][k].x, b[t + n][k].y);
          mma<T>(sums[n][1], a[2 * k + 1], b[t + n][k].z, b[t + n][k].w);
        }
      uint32_t matrices[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float(&s)[2][4] = sums[n / 2];
        matrices[n] = pair_of<T>(s[0][n % 2 * 2] + s[1][n % 2 * 2], s[0][n % 2 * 2 + 1] + s[1][n % 2 * 2 + 1]);
      }
      store_matrices_transposed(to + t * 8 * kAbsorbRow, matrices);
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < (AT_ONCE + 15) / 16; ++i) {
    const int token = (i * kAbsorbThreads + threadIdx.x) / 8, chunk = threadIdx.x % 8;
    if (token < here) *reinterpret_cast<uint4*>(out + ((size_t)(token0 + token) * heads + head) * kEntry + column + chunk * 8) = read16(shared_address(memory) + token * kAbsorbRow + (chunk ^ token % 8) * 16);
  }
}

template <class T, int AT_ONCE> int launch_absorb_of(const void* q, const void* kv_b, const float* cosines, const float* sines, void* out, int rows, int heads, int interleaved, void* s) {
  const int blocks = (rows + AT_ONCE - 1) / AT_ONCE, turning = min(kMostTurning, (rows * (kRope / 2) + 2 * kAbsorbThreads - 1) / (2 * kAbsorbThreads));
  return start(absorb<T, AT_ONCE>, dim3(heads, kAbsorbBlocks + turning, blocks), kAbsorbThreads, 0, s, (const T*)q, (const T*)kv_b, cosines, sines, (T*)out, rows, heads, interleaved);
}

template <class T> int launch_absorb(const void* q, const void* kv_b, const float* cosines, const float* sines, void* out, int rows, int heads, int interleaved, void* s) {
  // With fewer registers more blocks find room next to those of the attention that follows.
  const auto launch = rows <= 8 ? launch_absorb_of<T, 8> : rows <= 16 ? launch_absorb_of<T, 16> : launch_absorb_of<T, 32>;
  return launch(q, kv_b, cosines, sines, out, rows, heads, interleaved, s);
}

}  // namespace
