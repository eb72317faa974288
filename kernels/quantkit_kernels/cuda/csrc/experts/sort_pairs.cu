// Token-expert pairs sorted by expert: every expert gets tiles of its own, and a pair gets a slot of a tile.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/launch.cuh"

namespace {

constexpr int kSortWarps = 16;

// Counting sort of the pairs by expert, in their own order within one, by a single block: warps take consecutive parts of the pairs.
__global__ void sort_pairs(const int* ids, int ids_stride, int pairs, int experts, int tokens, int tiles, int* tile_expert,
                           int* tile_count, int* order) {
  extern __shared__ int counts[];  // [warps][experts], and of each expert how many pairs and its first tile
  int *total = counts + kSortWarps * experts, *first = total + experts;
  __shared__ int used;
  wait_for_predecessor();
  let_successor_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (pairs + blockDim.x - 1) / blockDim.x * 32, begin = warp * each, end = min(pairs, begin + each);
  for (int i = threadIdx.x; i < kSortWarps * experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  // Adds 32 pairs to the warp's counts; returns what the lane's expert had before and its rank among them.
  const auto count = [&](int base, int& expert) {
    expert = base + lane < end ? ids[(size_t)(base + lane) * ids_stride] : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int before = expert < 0 ? 0 : counts[warp * experts + expert];
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) counts[warp * experts + expert] = before + __popc(same);
    __syncwarp();
    return before + __popc(same & ((1u << lane) - 1));
  };
  int expert;
  for (int base = begin; base < end; base += 32) count(base, expert);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int c = counts[w * experts + e];
      counts[w * experts + e] = sum;
      sum += c;
    }
    total[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0;
    for (int base = 0; base < experts; base += 32) {
      const int mine = base + lane < experts ? (total[base + lane] + tokens - 1) / tokens : 0;
      int upto = mine;
      for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, o);
        if (lane >= o) upto += other;
      }
      if (base + lane < experts) first[base + lane] = sum + upto - mine;
      sum += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) used = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x)
    for (int i = 0; i * tokens < total[e]; ++i) {
      tile_expert[first[e] + i] = e;
      tile_count[first[e] + i] = min(tokens, total[e] - i * tokens);
    }
  for (int i = used + threadIdx.x; i < tiles; i += blockDim.x) tile_expert[i] = -1, tile_count[i] = 0;
  for (int base = begin; base < end; base += 32) {
    const int rank = count(base, expert);
    if (expert >= 0) order[first[expert] * tokens + rank] = base + lane;
  }
}

}  // namespace

// ids in ints, `ids_stride` apart (2 for int64). tile_expert and tile_count [tiles], order [tiles * tokens]. Returns a cudaError_t.
extern "C" int qk_sort_pairs(const int* ids, int ids_stride, int pairs, int experts, int tokens, int tiles, int* tile_expert,
                             int* tile_count, int* order, void* stream) {
  const int bytes = (kSortWarps + 2) * experts * 4;
  static SharedMemory shared;
  if (const int fault = shared.allow(sort_pairs, 224 << 10)) return fault;
  return start(sort_pairs, 1, 32 * kSortWarps, bytes, stream, ids, ids_stride, pairs, experts, tokens, tiles, tile_expert, tile_count,
               order);
}
