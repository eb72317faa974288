// Parts of a row merged, and multiplied with W_UV.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kMostSplits = 256, kSharedSplits = 32, kFewHeads = 32, kLatentStride = 2 * kLatent + 16;  // bytes
// Of a block for so many of a head's values, that merges so many columns.
constexpr int project_bytes(int values, int columns, int splits) { return (values + 8) * kLatentStride + kWarps * (columns + splits) * 4; }

// What each part of a row weighs, for one warp. Rows and parts are those of `found`.
struct PartWeights {
  float2 mine[kMostSplits / 32];

  __device__ __forceinline__ void request(const float2* found, int parts, int lane) {
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      mine[i] = make_float2(-INFINITY, 0.f);
      if (i * 32 < parts && i * 32 + lane < parts) mine[i] = __ldcg(found + i * 32 + lane);
    }
  }
  __device__ __forceinline__ void store(float* to, int parts, int lane) {
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) top = fmaxf(top, mine[i].x);
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 < parts) mine[i].x = power_of_2(mine[i].x - top) * mine[i].y, total += mine[i].x;
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    const float each = __fdividef(1.f, total);
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 + lane < parts) to[i * 32 + lane] = mine[i].x * each;
    __syncwarp();
  }
};

// The weighed sum of a row's parts, of which this warp takes every `step`th: a lane has 4 of each 128 columns, of QUADS times as many.
// AHEAD of a warp's parts are on their way at once, the first before it is known what they weigh.
template <class T, int AHEAD, int QUADS> struct Merge {
  const uint2* from;
  int parts, step;
  uint2 asked[AHEAD][QUADS];

  __device__ __forceinline__ void request(int first) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
      for (int i = 0; i < QUADS; ++i) asked[a][i] = first + a * step < parts ? __ldcg(from + (first + a * step) * (kLatent / 4) + i * 32) : make_uint2(0, 0);
  }
  __device__ __forceinline__ void add_up(float4 (&sum)[QUADS], int first, const float* shares) {
    while (true) {
      float share[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) share[a] = first + a * step < parts ? shares[first + a * step] : 0.f;
#pragma unroll
      for (int a = 0; a < AHEAD; ++a)
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
          const T* v = reinterpret_cast<const T*>(&asked[a][i]);
          sum[i].x += share[a] * float(v[0]), sum[i].y += share[a] * float(v[1]), sum[i].z += share[a] * float(v[2]), sum[i].w += share[a] * float(v[3]);
        }
      first += AHEAD * step;
      if (first >= parts) return;
      request(first);
    }
  }
};

// out[row, head] = (merged parts) W_UV. A block per head, VALUES of its values, and `each` rows, at most eight. SHARED: the blocks of a head are a
// cluster, each merges its share of the columns for all.
template <class T, int AHEAD, int BLOCKS, int VALUES, bool SHARED> __global__ void __launch_bounds__(kThreads, BLOCKS) project(const T* kv_b, T* out, int rows, int each, const Attend p) {
  constexpr int of_head = kValue / VALUES, quads = SHARED ? 4 / of_head : 4, columns = quads * 128;  // that this block merges
  constexpr int tiles = VALUES / 16, sharers = kWarps / tiles, steps = kLatent / 16 / sharers;       // of a product: a warp has 16 values, and a share of K
  constexpr bool early = BLOCKS == 1;                                                               // W_UV is in registers before the parts are there
  extern __shared__ __align__(128) char shared[];
  char* latents = shared + VALUES * kLatentStride;
  float* sums = reinterpret_cast<float*>(latents + 8 * kLatentStride);  // [warp][columns], then [share of K][VALUES][8]
  float* shares = sums + kWarps * columns;                              // [warp][split]
  static_assert(sharers * VALUES * 8 <= kWarps * columns);
  const int head = blockIdx.y, value0 = blockIdx.x * VALUES, column0 = SHARED ? blockIdx.x * columns : 0, row0 = blockIdx.z * each, here = min(each, rows - row0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, quad = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;

  const T* from = kv_b + ((size_t)head * (kNope + kValue) + kNope + value0) * kLatent;
#pragma unroll 1
  for (int i = threadIdx.x; i < VALUES * kLatent / 8; i += kThreads) {
    const int r = i / (kLatent / 8), at = i % (kLatent / 8);
    copy16(shared_address(shared) + r * kLatentStride + at * 16, from + r * kLatent + at * 8);
  }
  if constexpr (SHARED) cluster_arrive();  // this block has begun, so the others may write to its memory
  // Warps are shared out over the rows, and a row's warps over its parts. Lengths are older than the queries.
  const int warps_per_row = here > 4 ? 1 : here > 2 ? 2 : here > 1 ? 4 : 8, r = warp / warps_per_row, first = warp % warps_per_row;
  const int parts = r < here ? parts_of(tiles_of(p.lengths[(row0 + r) * p.lengths_stride], p.tile), p) : 0;
  const size_t place = ((size_t)(row0 + r) * p.heads + head) * p.splits;
  Merge<T, AHEAD, quads> merge{reinterpret_cast<const uint2*>(reinterpret_cast<const T*>(p.weighted) + place * kLatent + column0) + lane, parts, warps_per_row};
  const int tile = warp % tiles, k0 = warp / tiles * steps * 16;
  const uint32_t rows_at = shared_address(shared) + (tile * 16 + (matrix & 1) * 8 + matrix_row) * kLatentStride + (k0 + (matrix >> 1) * 8) * 2;
  uint32_t weights[early ? steps : 1][4];
  if constexpr (early) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int k = 0; k < steps; ++k) load_matrices(weights[k], rows_at + k * 32);
  }
  wait_for_predecessor();
  let_successor_start();

  PartWeights weights_of;
  weights_of.request(p.found + place, parts, lane);  // before the parts, after which they would arrive later
  merge.request(first);
  weights_of.store(shares + warp * p.splits, parts, lane);
  float4 sum[quads] = {};
  merge.add_up(sum, first, shares + warp * p.splits);
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    // A warp that has all of a row's parts has its latents, too.
    if (!SHARED && warps_per_row == 1) *reinterpret_cast<uint2*>(latents + r * kLatentStride + (i * 128 + lane * 4) * 2) = make_uint2(pair_of<T>(sum[i].x, sum[i].y), pair_of<T>(sum[i].z, sum[i].w));
    else *reinterpret_cast<float4*>(sums + warp * columns + i * 128 + lane * 4) = sum[i];
  }
  if constexpr (!early) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  // Rows beyond the last are whatever lies there: a column of the product is of its own row only, and theirs is not stored.
  if constexpr (SHARED) cluster_wait();
#pragma unroll 1
  for (int i = threadIdx.x; warps_per_row > 1 && i < here * columns / 4; i += kThreads) {
    const int at = i / (columns / 4), column = i % (columns / 4) * 4;
    const float* from = sums + at * warps_per_row * columns + column;
    float4 v = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 more = w < warps_per_row ? *reinterpret_cast<const float4*>(from + w * columns) : make_float4(0.f, 0.f, 0.f, 0.f);
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    const uint2 four = make_uint2(pair_of<T>(v.x, v.y), pair_of<T>(v.z, v.w));
    char* to = latents + at * kLatentStride + (column0 + column) * 2;
    *reinterpret_cast<uint2*>(to) = four;
    if constexpr (SHARED) {
#pragma unroll
      for (int other = 1; other < of_head; ++other) write_to(shared_address(to), (blockIdx.x + other) % of_head, four);
    }
  }
  if constexpr (SHARED) cluster_barrier();
  else if (warps_per_row > 1) __syncthreads();

  const uint32_t columns_at = shared_address(latents) + matrix_row * kLatentStride + (k0 + matrix * 8) * 2;
  float acc[2][4] = {};
#pragma unroll
  for (int k = 0; k < steps; k += 2) {
    uint32_t b[4];
    load_matrices(b, columns_at + k * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (early) {
        mma<T>(acc[i], weights[k + i], b[2 * i], b[2 * i + 1]);
      } else {
        load_matrices(weights[0], rows_at + (k + i) * 32);
        mma<T>(acc[i], weights[0], b[2 * i], b[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[(warp / tiles * VALUES + tile * 16 + g + 8 * (c / 2)) * 8 + 2 * quad + c % 2] = acc[0][c] + acc[1][c];
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < here * VALUES; i += kThreads) {
    const int at = i / VALUES, value = i % VALUES;
    float v = 0;
#pragma unroll
    for (int s = 0; s < sharers; ++s) v += sums[(s * VALUES + value) * 8 + at];
    out[((size_t)(row0 + at) * p.heads + head) * kValue + value0 + value] = T(v);
  }
}

template <class T, int AHEAD, int BLOCKS, int VALUES, bool SHARED> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, int each, void* s) {
  auto kernel = project<T, AHEAD, BLOCKS, VALUES, SHARED>;
  constexpr int columns = SHARED ? VALUES * (kLatent / kValue) : kLatent;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, project_bytes(VALUES, columns, kMostSplits))) return fault;
  const dim3 grid(kValue / VALUES, p.heads, (rows + each - 1) / each);
  return start_clusters(kernel, grid, kThreads, project_bytes(VALUES, columns, p.splits), SHARED ? kValue / VALUES : 1, s, (const T*)kv_b, (T*)out, rows, each, p);
}

template <class T> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, void* s) {
  // Few rows have many parts, and reading those is what takes long: blocks share the rows out, with a multiprocessor for each. With a long
  // context both blocks of a head read half of the parts' columns, of one row of few heads four blocks a quarter.
  if (rows == 1 && p.heads <= kFewHeads && p.splits > kSharedSplits) return launch_project<T, 17, 1, 32, true>(kv_b, out, p, rows, 1, s);
  if (rows <= 8 && p.splits > kSharedSplits) return launch_project<T, 9, 1, 64, true>(kv_b, out, p, rows, (rows + 1) / 2, s);
  if (rows <= 16) return launch_project<T, 9, 1, 64, false>(kv_b, out, p, rows, rows <= 8 ? (rows + 1) / 2 : 8, s);
  return launch_project<T, 5, 1, 128, false>(kv_b, out, p, rows, 8, s);
}

}  // namespace
