// The highest index scores of a token, by a cluster of blocks that hold the scores of its tokens in their shared memory: bins of scores are
// counted until the least score that is selected is known, and the blocks write what is selected in the order of its columns.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"

namespace {

constexpr int kBlocks = 8;  // of a cluster
constexpr unsigned kAll = 0xffffffffu;

// float32 as uint32 in the same order; 0 for what is not larger than -inf, NaN too.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return v > -INFINITY ? bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u) : 0;
}
__device__ __forceinline__ float value_of(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }

__device__ __forceinline__ int read_there(const void* place, int block) {
  int v;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(address_in(shared_address(place), block)) : "memory");
  return v;
}

// BINS equal parts of the values between two: the bin of a value is not less than that of a smaller one.
template <int BINS> struct Parts {
  float least, scale;
  __device__ __forceinline__ int bin(uint32_t key) const { return min((int)(__fmaf_rn(0.5f, value_of(key), -least) * scale), BINS - 1); }
  // The least key of `low` to `high` whose bin is `wanted` or above, `high` + 1 for none. A warp tries 32 at once.
  __device__ __forceinline__ uint32_t first(int wanted, uint32_t low, uint32_t high) const {
    while (low <= high) {
      const uint32_t step = (high - low) / 32 + 1, key = low + (threadIdx.x & 31) * step;
      const unsigned past = __ballot_sync(kAll, key > high || bin(key) >= wanted);
      const int below = past ? __ffs(past) - 1 : 32;
      high = min(high, low + below * step - 1);
      if (below) low += (below - 1) * step + 1;
    }
    return low;
  }
};

// scores [rows, width] of the columns up to each row's position. A thread for each of 2^BITS bins.
template <int BITS>
__global__ void __launch_bounds__(1 << BITS) select_highest(const float* scores, const int* table, int table_stride, const int64_t* positions,
                                                            int* columns, int* slots, int* counts, int width, int table_row, int page, int k) {
  constexpr int kThreads = 1 << BITS, kWarps = kThreads / 32, kBins = kThreads;
  extern __shared__ uint32_t keys[];
  __shared__ int bins[2][kBins], sums[kWarps], found[3], above_of[kWarps], equal_of[kWarps], above_here, equal_here, valid_here;
  __shared__ uint32_t most_here, least_here;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, block = blockIdx.x;
  bins[0][t] = 0;
  if (t == 0) above_here = equal_here = valid_here = 0, most_here = 0, least_here = kAll;
  __syncthreads();
  wait_for_predecessor();
  let_successor_start();
  const int64_t row = blockIdx.y, seen = positions[row] + 1;
  const int end = (int)min(seen, (int64_t)width);
  const int each = (end + kBlocks * kThreads - 1) / (kBlocks * kThreads) * 32;  // columns of a warp, which lie next to each other
  const int first = (block * kWarps + warp) * each, mine = max(0, min(each, end - first));
  uint32_t* const own = keys + warp * each;
  scores += row * width + first;

  uint32_t most = 0, least = kAll;
  int valid = 0;
#pragma unroll 8
  for (int i = lane; i < each; i += 32) {
    const uint32_t key = i < mine ? ordered(scores[i]) : 0;
    own[i] = key;
    most = max(most, key), least = min(least, key - 1), valid += key != 0;  // 0 becomes the largest
  }
  most = __reduce_max_sync(kAll, most), least = __reduce_min_sync(kAll, least), valid = __reduce_add_sync(kAll, valid);
  if (lane == 0) atomicMax(&most_here, most), atomicMin(&least_here, least), atomicAdd(&valid_here, valid);
  cluster_barrier();
  most = lane < kBlocks ? (uint32_t)read_there(&most_here, lane) : 0;
  least = lane < kBlocks ? (uint32_t)read_there(&least_here, lane) : kAll;
  valid = lane < kBlocks ? read_there(&valid_here, lane) : 0;
  uint32_t high = __reduce_max_sync(kAll, most), low = __reduce_min_sync(kAll, least) + 1;
  valid = __reduce_add_sync(kAll, valid);

  // The `wanted` highest of the keys from low to high are selected, and all above; at the end those above `limit`, and the first `wanted`
  // of those equal to it.
  int wanted = valid > k ? k : 0, round = 0;
  uint32_t limit = 0;
  while (wanted > 0) {
    int* const counted = bins[round & 1];
    const float bottom = 0.5f * value_of(low);  // halves, whose difference is finite
    const Parts<kBins> parts{bottom, (kBins - 1) / (0.5f * fminf(value_of(high), 3.4028234e38f) - bottom)};
    const int shift = max(0, 32 - __clz(high - low) - BITS);
    const bool by_value = round == 0 && parts.scale < INFINITY;
    for (int i = lane; i < each; i += 32)
      if (const uint32_t key = own[i]; low <= key && key <= high) atomicAdd(counted + (by_value ? parts.bin(key) : (int)((key - low) >> shift)), 1);
    cluster_barrier();
    const int bin = kBins - 1 - t;  // the first thread has the highest
    int here = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) here += read_there(counted + bin, b);
    bins[~round & 1][t] = 0;
    int upto = here;
#pragma unroll
    for (int o = 1; o < 32; o *= 2)
      if (const int other = __shfl_up_sync(kAll, upto, o); lane >= o) upto += other;
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    upto += __reduce_add_sync(kAll, lane < warp ? sums[lane] : 0);
    if (upto - here < wanted && wanted <= upto) found[0] = bin, found[1] = upto - here, found[2] = here;
    __syncthreads();
    wanted -= found[1];
    if (by_value) {
      const uint32_t above = found[0] == kBins - 1 ? high + 1 : parts.first(found[0] + 1, low, high);
      low = parts.first(found[0], low, above - 1), high = above - 1;
    } else {
      low += (uint32_t)found[0] << shift, high = min(high, low + (1u << shift) - 1);
    }
    limit = low;
    if (wanted == found[2]) limit = low - 1, wanted = 0;
    if (low == high) break;
    ++round;
  }

  int above = 0, equal = 0;
  for (int i = lane; i < each; i += 32) above += own[i] > limit, equal += own[i] == limit;
  above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);
  if (lane == 0) {
    above_of[warp] = above, equal_of[warp] = equal;
    atomicAdd(&above_here, above), atomicAdd(&equal_here, equal);
  }
  cluster_barrier();
  above = lane < warp ? above_of[lane] : 0, equal = lane < warp ? equal_of[lane] : 0;
  if (lane < block) above += read_there(&above_here, lane), equal += read_there(&equal_here, lane);
  above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);  // before this warp's columns
  cluster_arrive();
  const int place = above + min(equal, wanted);  // of what this warp writes
  int chosen = 0;
  for (int i = lane; i < each; i += 32) {
    const uint32_t key = own[i];
    const unsigned before = (1u << lane) - 1, equals = __ballot_sync(kAll, key == limit);
    const bool highest = key > limit || (key == limit && equal + __popc(equals & before) < wanted);
    const unsigned highs = __ballot_sync(kAll, highest);
    if (highest) own[chosen + __popc(highs & before)] = first + i;
    equal += __popc(equals), chosen += __popc(highs);
  }
  __syncwarp();
  table += row * table_row * table_stride;
  for (int i = lane; i < chosen; i += 32) {
    const int column = own[i];
    columns[row * k + place + i] = column;
    slots[row * k + place + i] = table[(int64_t)(column / page) * table_stride] * page + column % page;
  }
  for (int i = min(valid, k) + block * kThreads + t; i < k; i += kBlocks * kThreads) slots[row * k + i] = 0;
  if (block == 0 && t == 0) counts[row] = (int)min(seen, (int64_t)k);
  cluster_wait();  // for those that read this block's counts
}

}  // namespace

// scores float32 [rows, width]; table in ints, `table_stride` apart (2 for int64), its rows `table_row` entries; columns and slots [rows, k].
// Returns a cudaError_t.
extern "C" int qk_select_highest(const float* scores, const int* table, const int64_t* positions, int* columns, int* slots, int* counts,
                                 int rows, int width, int table_stride, int table_row, int page, int k, void* stream) {
  const auto run = [&]<int BITS>() {
    const int threads = 1 << BITS, bytes = (width + kBlocks * threads - 1) / (kBlocks * threads) * threads * 4;
    static SharedMemory shared;
    if (const int fault = shared.allow(select_highest<BITS>, 200 << 10)) return fault;
    return start_clusters(select_highest<BITS>, dim3(kBlocks, rows), threads, bytes, kBlocks, stream, scores, table, table_stride, positions,
                          columns, slots, counts, width, table_row, page, k);
  };
  // Of long rows threads would have many columns, of many rows a multiprocessor has several small blocks.
  return width > 16384 && rows <= 16 ? run.operator()<9>() : run.operator()<8>();
}
