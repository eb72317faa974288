// Parts of a row merged, and multiplied with W_UV.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kMostSplits = 256, kProjectRows = 64, kLatentStride = 2 * kLatent + 16;  // bytes
constexpr int project_bytes(int splits) { return (kProjectRows + 8) * kLatentStride + kWarps * kLatent * 4 + 8 * splits * 4; }

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

// The weighed sum of row `row0 + r`'s parts, of which this warp takes every `step`th: a lane has 4 of each 128 columns. AHEAD of a warp's parts
// are on their way, the first before it is known what they weigh.
template <int AHEAD> struct Merge {
  const float4* from;
  int first, parts, step;
  float4 asked[AHEAD][4];

  __device__ __forceinline__ void request(int a, int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (part < parts) asked[a][i] = __ldcg(from + part * (kLatent / 4) + i * 32);
  }
  __device__ __forceinline__ void request() {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) request(a, first + a * step);
  }
  __device__ __forceinline__ static void add(float4& sum, float share, const float4& v) {
    sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
  }
  __device__ __forceinline__ void add_up(float4 (&sum)[4], const float* shares) {
    for (int s = first; s < parts; s += AHEAD * step)
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int part = s + a * step;
        if (part >= parts) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) add(sum[i], shares[part], asked[a][i]);
        request(a, part + AHEAD * step);
      }
  }
};

// out[row, head] = (merged parts) W_UV. A block per head, 64 of its values, and `each` rows, at most eight.
template <class T, int AHEAD, int BLOCKS> __global__ void __launch_bounds__(kThreads, BLOCKS) project(const T* kv_b, T* out, int rows, int each, const Attend p) {
  extern __shared__ __align__(128) char shared[];
  char* latents = shared + kProjectRows * kLatentStride;
  float* sums = reinterpret_cast<float*>(latents + 8 * kLatentStride);  // [warp][512], then [half of K][64][8]
  float* shares = sums + kWarps * kLatent;                              // [row][split]
  const int head = blockIdx.x, value0 = blockIdx.y * kProjectRows, row0 = blockIdx.z * each, here = min(each, rows - row0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;

  const T* from = kv_b + ((size_t)head * (kNope + kValue) + kNope + value0) * kLatent;
  for (int i = threadIdx.x; i < kProjectRows * kLatent / 8; i += kThreads) {
    const int r = i / (kLatent / 8), at = i % (kLatent / 8);
    copy16(shared_address(shared) + r * kLatentStride + at * 16, from + r * kLatent + at * 8);
  }
  // Warps are shared out over the rows, and a row's warps over its parts. Lengths are older than the queries.
  const int warps_per_row = here > 4 ? 1 : here > 2 ? 2 : here > 1 ? 4 : 8, r = warp / warps_per_row;
  const auto parts_of_row = [&](int row) { return row < here ? parts_of(tiles_of(p.lengths[(row0 + row) * p.lengths_stride], p.tile), p.splits) : 0; };
  const int parts = parts_of_row(warp);
  Merge<AHEAD> merge{reinterpret_cast<const float4*>(p.weighted + ((size_t)(row0 + r) * p.heads + head) * p.splits * kLatent) + lane, warp % warps_per_row, parts_of_row(r), warps_per_row};
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
  float4 sum[4] = {};
  merge.add_up(sum, shares + r * p.splits);
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<float4*>(sums + warp * kLatent + i * 128 + lane * 4) = sum[i];
  __syncthreads();
  // Rows beyond the last are whatever lies there: a column of the product is of its own row only, and theirs is not stored.
  for (int i = threadIdx.x; i < here * kLatent; i += kThreads) {
    const int at = i / kLatent, column = i % kLatent;
    const float* first = sums + at * warps_per_row * kLatent + column;
    float v = 0;
    for (int w = 0; w < warps_per_row; ++w) v += first[w * kLatent];
    reinterpret_cast<T*>(latents + at * kLatentStride)[column] = T(v);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  const int tile = warp & 3, half = warp >> 2;  // 16 of the values, half of the products
  float acc[2][4] = {};
  multiply_values<T>(acc, shared, latents, tile, half, g, part, matrix, matrix_row);
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[(half * kProjectRows + tile * 16 + g + 8 * (c / 2)) * 8 + 2 * part + c % 2] = acc[0][c] + acc[1][c];
  __syncthreads();
  for (int i = threadIdx.x; i < here * kProjectRows; i += kThreads) {
    const int at = i / kProjectRows, value = i % kProjectRows;
    out[((size_t)(row0 + at) * p.heads + head) * kValue + value0 + value] = T(sums[value * 8 + at] + sums[(kProjectRows + value) * 8 + at]);
  }
}

template <class T, int AHEAD, int BLOCKS> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, int each, void* s) {
  auto kernel = project<T, AHEAD, BLOCKS>;
  static const cudaError_t allowed = allow(kernel, project_bytes(kMostSplits));
  if (allowed != cudaSuccess) return (int)allowed;
  return start(kernel, dim3(p.heads, kValue / kProjectRows, (rows + each - 1) / each), kThreads, project_bytes(p.splits), s, (const T*)kv_b, (T*)out, rows, each, p);
}

template <class T> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, void* s) {
  // Few rows have many parts, and reading those is what takes long: two blocks share the rows out, with a multiprocessor for each.
  if (rows <= 8) return launch_project<T, 9, 1>(kv_b, out, p, rows, (rows + 1) / 2, s);
  return launch_project<T, 3, 2>(kv_b, out, p, rows, 8, s);
}

}  // namespace
