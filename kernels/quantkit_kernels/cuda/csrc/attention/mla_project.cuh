// Parts of a row merged, and multiplied with W_UV.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kMostSplits = 256, kSharedSplits = 32, kFewHeads = 32, kLatentStride = 2 * kLatent + 16;  // bytes
// Of a block for so many of a head's values.
constexpr int project_bytes(int values, int splits) { return (values + 8) * kLatentStride + kWarps * kLatent * 4 + 8 * splits * 4; }

// W_UV . latents: 16 of the values, half of the products.
template <class T>
__device__ __forceinline__ void multiply_values(float (&acc)[2][4], const char* shared, const char* latents, int tile, int half, int g, int part, int matrix, int matrix_row) {
#pragma unroll
  for (int k = 0; k < kLatent / 32; ++k) {
    uint32_t a[4];
    const int column = half * (kLatent / 2) + k * 16;
    load_matrices(a, shared_address(shared) + (tile * 16 + (matrix & 1) * 8 + matrix_row) * kLatentStride + (column + (matrix >> 1) * 8) * 2);
    const uint32_t* b = reinterpret_cast<const uint32_t*>(latents + g * kLatentStride) + column / 2 + part;
    mma<T>(acc[k % 2], a, b[0], b[4]);
  }
}

// The weighed sum of row `row0 + r`'s parts, of which this warp takes every `step`th: a lane has 4 of each 128 columns, of QUADS times as many.
// AHEAD of a warp's parts are on their way, the first before it is known what they weigh.
template <int AHEAD, int QUADS> struct Merge {
  const float4* from;
  int first, parts, step;
  float4 asked[AHEAD][QUADS];

  __device__ __forceinline__ void request(int a, int part) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      if (part < parts) asked[a][i] = __ldcg(from + part * (kLatent / 4) + i * 32);
  }
  __device__ __forceinline__ void request() {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) request(a, first + a * step);
  }
  __device__ __forceinline__ static void add(float4& sum, float share, const float4& v) {
    sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
  }
  __device__ __forceinline__ void add_up(float4 (&sum)[QUADS], const float* shares) {
    for (int s = first; s < parts; s += AHEAD * step)
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int part = s + a * step;
        if (part >= parts) continue;
#pragma unroll
        for (int i = 0; i < QUADS; ++i) add(sum[i], shares[part], asked[a][i]);
        request(a, part + AHEAD * step);
      }
  }
};

// out[row, head] = (merged parts) W_UV. A block per head, VALUES of its values, and `each` rows, at most eight. SHARED: the blocks of a head are a
// cluster, each merges its share of the columns for all.
template <class T, int AHEAD, int BLOCKS, int VALUES, bool SHARED> __global__ void __launch_bounds__(kThreads, BLOCKS) project(const T* kv_b, T* out, int rows, int each, const Attend p) {
  constexpr int of_head = kValue / VALUES, quads = SHARED ? 4 / of_head : 4, columns = quads * 128;  // that this block merges
  extern __shared__ __align__(128) char shared[];
  char* latents = shared + VALUES * kLatentStride;
  float* sums = reinterpret_cast<float*>(latents + 8 * kLatentStride);  // [warp][512], then [half of K][64][8]
  float* shares = sums + kWarps * kLatent;                              // [row][split]
  const int head = blockIdx.y, value0 = blockIdx.x * VALUES, column0 = SHARED ? blockIdx.x * columns : 0, row0 = blockIdx.z * each, here = min(each, rows - row0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;

  const T* from = kv_b + ((size_t)head * (kNope + kValue) + kNope + value0) * kLatent;
  for (int i = threadIdx.x; i < VALUES * kLatent / 8; i += kThreads) {
    const int r = i / (kLatent / 8), at = i % (kLatent / 8);
    copy16(shared_address(shared) + r * kLatentStride + at * 16, from + r * kLatent + at * 8);
  }
  if constexpr (SHARED) cluster_arrive();  // this block has begun, so the others may write to its memory
  // Warps are shared out over the rows, and a row's warps over its parts. Lengths are older than the queries.
  const int warps_per_row = here > 4 ? 1 : here > 2 ? 2 : here > 1 ? 4 : 8, r = warp / warps_per_row;
  const auto parts_of_row = [&](int row) { return row < here ? parts_of(tiles_of(p.lengths[(row0 + row) * p.lengths_stride], p.tile), p.splits) : 0; };
  const int parts = parts_of_row(warp);
  Merge<AHEAD, quads> merge{reinterpret_cast<const float4*>(p.weighted + ((size_t)(row0 + r) * p.heads + head) * p.splits * kLatent + column0) + lane, warp % warps_per_row, parts_of_row(r), warps_per_row};
  wait_for_predecessor();
  let_successor_start();

  merge.request();
  // What each part weighs.
  if (warp < here) {
    const float2* found = p.found + ((size_t)(row0 + warp) * p.heads + head) * p.splits;
    float2 mine[kMostSplits / 32];
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      mine[i] = i * 32 + lane < parts ? __ldcg(found + i * 32 + lane) : make_float2(-INFINITY, 0.f);
      top = fmaxf(top, mine[i].x);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 + lane < parts) mine[i].x = exp2f(mine[i].x - top), total += mine[i].x * mine[i].y;
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 + lane < parts) shares[warp * p.splits + i * 32 + lane] = mine[i].x / total;
  }
  __syncthreads();
  float4 sum[quads] = {};
  merge.add_up(sum, shares + r * p.splits);
#pragma unroll
  for (int i = 0; i < quads; ++i) *reinterpret_cast<float4*>(sums + warp * kLatent + i * 128 + lane * 4) = sum[i];
  __syncthreads();
  // Rows beyond the last are whatever lies there: a column of the product is of its own row only, and theirs is not stored.
  if constexpr (SHARED) cluster_wait();
  for (int i = threadIdx.x; i < here * columns; i += kThreads) {
    const int at = i / columns, column = i % columns;
    const float* first = sums + at * warps_per_row * kLatent + column;
    float v = 0;
    for (int w = 0; w < warps_per_row; ++w) v += first[w * kLatent];
    T* to = reinterpret_cast<T*>(latents + at * kLatentStride) + column0 + column;
    *to = T(v);
    if constexpr (SHARED)
      for (int other = 1; other < of_head; ++other) write_to(shared_address(to), (blockIdx.x + other) % of_head, T(v));
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  if constexpr (SHARED) cluster_barrier();
  else __syncthreads();

  const int tile = warp % (VALUES / 16), half = warp / (VALUES / 16);  // 16 of the values, half of the products
  float acc[2][4] = {};
  if (half < 2) multiply_values<T>(acc, shared, latents, tile, half, g, part, matrix, matrix_row);  // of 32 values four warps have no products
#pragma unroll
  for (int c = 0; c < 4; ++c)
    if (half < 2) sums[(half * VALUES + tile * 16 + g + 8 * (c / 2)) * 8 + 2 * part + c % 2] = acc[0][c] + acc[1][c];
  __syncthreads();
  for (int i = threadIdx.x; i < here * VALUES; i += kThreads) {
    const int at = i / VALUES, value = i % VALUES;
    out[((size_t)(row0 + at) * p.heads + head) * kValue + value0 + value] = T(sums[value * 8 + at] + sums[(VALUES + value) * 8 + at]);
  }
}

template <class T, int AHEAD, int BLOCKS, int VALUES, bool SHARED> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, int each, void* s) {
  auto kernel = project<T, AHEAD, BLOCKS, VALUES, SHARED>;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, project_bytes(VALUES, kMostSplits))) return fault;
  const dim3 grid(kValue / VALUES, p.heads, (rows + each - 1) / each);
  return start_clusters(kernel, grid, kThreads, project_bytes(VALUES, p.splits), SHARED ? kValue / VALUES : 1, s, (const T*)kv_b, (T*)out, rows, each, p);
}

template <class T> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, void* s) {
  // Few rows have many parts, and reading those is what takes long: blocks share the rows out, with a multiprocessor for each. With a long
  // context both blocks of a head read half of the parts' columns, of one row of few heads four blocks a quarter.
  if (rows == 1 && p.heads <= kFewHeads && p.splits > kSharedSplits) return launch_project<T, 17, 1, 32, true>(kv_b, out, p, rows, 1, s);
  if (rows <= 8 && p.splits > kSharedSplits) return launch_project<T, 17, 1, 64, true>(kv_b, out, p, rows, (rows + 1) / 2, s);
  if (rows <= 16) return launch_project<T, 9, 1, 64, false>(kv_b, out, p, rows, rows <= 8 ? (rows + 1) / 2 : 8, s);
  return launch_project<T, 3, 2, 64, false>(kv_b, out, p, rows, 8, s);
}

}  // namespace
