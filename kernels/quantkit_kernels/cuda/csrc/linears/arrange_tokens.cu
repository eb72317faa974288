// Activations in the order in which the kernels for tiles read them: [tiles][bytes of a row / 128][tokens of a tile][128 bytes].
//
// Of 64 bytes of a row of 16-bit numbers, 16 words, word 4q + j comes to place q of chunk j, which is the order of K that the packed 4-bit
// weights have; the chunks of 128 bytes lie as wgmma.cuh says. Places of a tile without a token stay as they are: no other token's result
// depends on them.
//
// For experts, experts/sort_pairs.cu has given every expert tiles of its own and every token-expert pair a slot before.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/quantize.cuh"

namespace {

// Where the chunk `chunk` of a row's 16-byte chunks belongs, for the token in slot `slot`.
__device__ __forceinline__ size_t place(int slot, int chunk, int tokens, int chunks) {
  const int row = slot % tokens;
  return (((size_t)(slot / tokens) * (chunks / 8) + chunk / 8) * tokens + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// The row of x that a slot holds, or -1: the token of its pair, or, without an order, the row of the slot's number.
__device__ __forceinline__ int row_of(int slot, const int* order, const int* tile_count, int tokens, int top_k) {
  if (tile_count && slot % tokens >= tile_count[slot / tokens]) return -1;
  return order ? order[slot] / top_k : slot;
}

// Word j of lane q of four neighbours becomes word q of lane j.
__device__ __forceinline__ void transpose_words(uint4& v) {
  const auto swap = [](uint32_t& first, uint32_t& second, int apart) {
    const bool upper = threadIdx.x & apart;
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? first : second, apart);
    (upper ? first : second) = theirs;
  };
  swap(v.x, v.y, 1), swap(v.z, v.w, 1);
  swap(v.x, v.z, 2), swap(v.y, v.w, 2);
}

// A block for eight slots, whose pieces of 128 bytes lie side by side, and 2 KB of each row, which a warp brings: 512 bytes at a time, and they
// go as whole pieces.
__global__ void arrange(const uint4* x, uint8_t* out, const int* order, const int* tile_count, int slots, int tokens, int top_k, int chunks) {
  // The next kernel may ask for its weights while this one waits.
  let_successor_start();
  wait_for_predecessor();
  const int slot = blockIdx.x * 8 + threadIdx.x / 32, first = blockIdx.y * 128 + threadIdx.x % 32;
  if (slot >= slots) return;
  const int row = row_of(slot, order, tile_count, tokens, top_k);
  if (row < 0) return;
  uint4 held[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) held[i] = first + i * 32 < chunks ? x[(size_t)row * chunks + first + i * 32] : uint4{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    transpose_words(held[i]);
    if (first + i * 32 < chunks) *reinterpret_cast<uint4*>(out + place(slot, first + i * 32, tokens, chunks)) = held[i];
  }
}

// Rows quantized to int8, K in its own order. A block per slot; a thread has HELD chunks of codes in its registers, blockDim.x apart.
template <class T, int HELD>
__global__ void quantize_arranged(const T* x, uint8_t* out, float* scale, const int* order, const int* tile_count, int tokens, int top_k,
                                  int k) {
  // The next kernel may ask for its weights while this one waits.
  let_successor_start();
  wait_for_predecessor();
  const int slot = blockIdx.x, row = row_of(slot, order, tile_count, tokens, top_k), chunks = k / 16;
  if (row < 0) return;
  x += (size_t)row * k;
  uint4 held[HELD][2] = {};
  typename Pair<T>::type largest = {};
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    const int chunk = threadIdx.x + h * blockDim.x;
    if (chunk < chunks)
#pragma unroll
      for (int i = 0; i < 2; ++i) held[h][i] = reinterpret_cast<const uint4*>(x)[chunk * 2 + i];
  }
#pragma unroll
  for (int h = 0; h < HELD; ++h)
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = __hmax2(largest, __habs2(reinterpret_cast<const typename Pair<T>::type*>(held[h])[i]));
  const float step = step_of(fmaxf(float(largest.x), float(largest.y))), reciprocal = __frcp_rn(step);
  if (threadIdx.x == 0) scale[slot] = step;
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    const int chunk = threadIdx.x + h * blockDim.x;
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = codes_of(reinterpret_cast<const T*>(held[h]) + 4 * j, step, reciprocal);
    if (chunk < chunks) *reinterpret_cast<uint4*>(out + place(slot, chunk, tokens, chunks)) = *reinterpret_cast<uint4*>(codes);
  }
}

}  // namespace

using bf16 = __nv_bfloat16;

// Rows of 16-bit numbers, `row_bytes` a multiple of 256. Without order and tile_count slots are rows.
extern "C" int qk_arrange(const void* x, void* out, const int* order, const int* tile_count, int slots, int tokens, int top_k,
                          int row_bytes, void* stream) {
  const dim3 grid((slots + 7) / 8, (row_bytes / 64 + 31) / 32);
  return start(arrange, grid, 256, 0, stream, (const uint4*)x, (uint8_t*)out, order, tile_count, slots, tokens, top_k, row_bytes / 16);
}

// K up to 65536. Where there is much to do few threads for each row keep the device busy, and wait for one another less.
extern "C" int qk_quantize_arranged(const void* x, void* out, float* scale, const int* order, const int* tile_count, int dtype, int slots,
                                    int tokens, int top_k, int k, void* stream) {
  const auto run = [&](auto kernel, auto* rows, int held) {
    const int threads = (k / 16 + 32 * held - 1) / (32 * held) * 32;
    return start(kernel, slots, threads, 0, stream, rows, (uint8_t*)out, scale, order, tile_count, tokens, top_k, k);
  };
  const int held = (int64_t)slots * k > 3 << 20 || k > 32768 ? 4 : k >= 16384 ? 2 : 1;
  const auto of = [&](auto* rows) {
    using T = std::remove_cvref_t<decltype(*rows)>;
    if (held == 1) return run(quantize_arranged<T, 1>, rows, 1);
    return held == 2 ? run(quantize_arranged<T, 2>, rows, 2) : run(quantize_arranged<T, 4>, rows, 4);
  };
  return dtype == 0 ? of((const bf16*)x) : of((const __half*)x);
}
