// y[M, N] = x[M, K] @ W[N, K]^T for a W of 16 bits and up to 16 tokens: the head of a decode step, which reads hundreds of megabytes for a few
// tokens. cuBLAS reads them as fast, but begins when its predecessor has ended, and the launch behind it when it has ended.
//
// A warp has 16 rows, and of K every `split`th group of 128. Weights go straight from memory into registers, two groups ahead: 16 warps of a
// multiprocessor have 64 to 128 KB on their way. A lane reads 16 bytes of a row, eight numbers side by side, and takes them for operands of two
// products: which numbers along K a product adds up does not matter as long as those of x are the same. Tokens come through L1.
//
// Sums of the warps along K meet in shared memory and are added up in their order: a token's results depend on nothing but its own row.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kWarps = 16, kRows = 16, kGroup = 128, kLoads = kGroup / 32;

// Four consecutive words of what no kernel of the step writes; see load_constant.
__device__ __forceinline__ void load_weights(uint4& v, const char* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
}

// A lane's share of 16 rows over a group: of rows g and g + 8.
struct Slice { uint4 w[2][kLoads]; };
__device__ __forceinline__ void load_slice(Slice& slice, const char* const (&rows)[2], int group) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) load_weights(slice.w[h][i], rows[h] + (size_t)group * (kGroup * 2) + i * 64);
}

// MT: tiles of 8 tokens.
template <class T, int MT> __global__ void __launch_bounds__(32 * kWarps, 1) dense_tokens(const T* w, const T* x, T* y, int m, int n, int k, int split) {
  __shared__ float sums[kWarps][kRows * 8 * MT];  // [row][token] of a warp
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, q = lane & 3;
  const int part = warp % split, first = (blockIdx.x * (kWarps / split) + warp / split) * kRows, groups = k / kGroup;
  const bool present = first < n;
  const char* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = reinterpret_cast<const char*>(w + (size_t)min(first + g + 8 * h, n - 1) * k) + q * 16;
  const char* tokens[MT];
#pragma unroll
  for (int t = 0; t < MT; ++t) tokens[t] = reinterpret_cast<const char*>(x + (size_t)min(t * 8 + g, m - 1) * k) + q * 16;

  Slice slices[2];
#pragma unroll
  for (int s = 0; s < 2; ++s)
    if (present && part + s * split < groups) load_slice(slices[s], rows, part + s * split);
  wait_for_predecessor();
  float acc[MT][4] = {};
  const auto multiply = [&](Slice& slice, int group) {
    uint4 b[MT][kLoads];
#pragma unroll
    for (int t = 0; t < MT; ++t)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) b[t][i] = *reinterpret_cast<const uint4*>(tokens[t] + (size_t)group * (kGroup * 2) + i * 64);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 &low = slice.w[0][i], &high = slice.w[1][i];
#pragma unroll
      for (int t = 0; t < MT; ++t) {
        mma<T>(acc[t], {low.x, high.x, low.y, high.y}, b[t][i].x, b[t][i].y);
        mma<T>(acc[t], {low.z, high.z, low.w, high.w}, b[t][i].z, b[t][i].w);
      }
    }
    if (group + 2 * split < groups) load_slice(slice, rows, group + 2 * split);
  };
  if (present)
    for (int group = part; group < groups; group += 2 * split) {
      multiply(slices[0], group);
      if (group + split < groups) multiply(slices[1], group + split);
    }
  let_successor_start();
  if (split == 1) {
#pragma unroll
    for (int t = 0; t < MT; ++t)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = first + g + 8 * (c / 2), token = t * 8 + 2 * q + c % 2;
        if (row < n && token < m) y[(size_t)token * n + row] = T(acc[t][c]);
      }
    return;
  }
#pragma unroll
  for (int t = 0; t < MT; ++t)
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[warp][(t * 8 + 2 * q + c % 2) * kRows + g + 8 * (c / 2)] = acc[t][c];
  __syncthreads();
  const int produced = kWarps / split * kRows;  // rows of the block
  for (int i = threadIdx.x; i < produced * m; i += 32 * kWarps) {
    const int r = i % produced, token = i / produced, row = blockIdx.x * produced + r;
    float sum = 0;
    for (int s = 0; s < split; ++s) sum += sums[r / kRows * split + s][token * kRows + r % kRows];
    if (row < n) y[(size_t)token * n + row] = T(sum);
  }
}

template <class T> int launch(const void* w, const void* x, void* y, int m, int n, int k, int split, void* stream) {
  const int produced = kWarps / split * kRows, blocks = (n + produced - 1) / produced;
  const auto run = [&](auto kernel) { return start(kernel, blocks, 32 * kWarps, 0, stream, (const T*)w, (const T*)x, (T*)y, m, n, k, split); };
  return m <= 8 ? run(dense_tokens<T, 1>) : run(dense_tokens<T, 2>);
}

}  // namespace

// w [n, k], x [m, k], y [m, n]; dtype: 0 bf16, 1 fp16. k a multiple of 128, m at most 16; split: warps along K, 1, 2, 4, 8 or 16. Returns a
// cudaError_t.
extern "C" int qk_dense_tokens(const void* w, const void* x, void* y, int dtype, int m, int n, int k, int split, void* s) {
  return dtype == 0 ? launch<__nv_bfloat16>(w, x, y, m, n, k, split, s) : launch<__half>(w, x, y, m, n, k, split, s);
}
