// y[M, N] = x[M, K] @ W[N, K]^T for a W packed in 4 bits and up to 16 tokens. A block for each multiprocessor, and
// the tokens in shared memory, once for all warps of a block.
//
// The blocks of tokens_in_registers.cu bring all of x through the L2 cache for every 32 or 64 rows of W. With 16 tokens that is as much as W
// itself or more, and the number of such blocks is no multiple of the number of multiprocessors. Here a block has a multiprocessor's share of
// the rows: `wn` warps of 32 rows side by side; the other warps take turns along K, a chunk of 128 each. Where W has fewer rows, the blocks of
// a cluster share `split` times as many rows and have a part of K each, so that x comes once for all those rows.
//
// Two more warps copy x into a ring in shared memory, which all warps read. For INT4 they also add up x over each group, once for all warps,
// because zero points need that sum. A warp's weights come through a ring of its own; a lane reads what it copied itself, so no warp waits
// for another there. Both are copied 16 bytes at a time: a bulk copy of the 256 bytes that x has side by side takes 25 ns.
//
// Sums of the warps along K meet in shared memory and are added up in the order of blocks and warps: results do not depend on timing.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/launch.cuh"
#include "linears/tokens_in_shared.cuh"

namespace {

template <int FMT, class T, int G, int MT> __global__ void __launch_bounds__(Layout<FMT, G, MT>::threads, 1) tokens_in_shared(const GemmParams p) {
  using D = Layout<FMT, G, MT>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const Part part(p);
  const uint32_t ring = shared_address(shared) + D::weights, filled = shared_address(shared) + D::barriers_at, emptied = filled + D::places * 8;
  auto* red = reinterpret_cast<float*>(shared);  // once the rings are done with
  const auto* factors = reinterpret_cast<const float*>(shared + D::factors_at);

  if (threadIdx.x == 0) {
    for (int i = 0; i < D::places; ++i) init_barrier(filled + i * 8), init_barrier(emptied + i * 8, part.present);
  }
  if (warp >= kMathWarps) {
    __syncthreads();
    // Factors of rows come with the first tokens.
    for (int i = lane * 4; warp == kMathWarps && i < part.present * 32; i += 128) copy16(shared_address(factors + i), p.row_scale + part.first + i);
    wait_for_predecessor();
    bring_tokens<FMT, T, G, MT>(p, reinterpret_cast<const char*>(p.x) + part.begin * D::row, warp - kMathWarps, part.chunks, ring, filled, emptied, [] {});
    wait_for_copies<0>();
    __syncthreads();
  } else {
    Multiplier<FMT, T, G, MT> m;
    m.ask(p, part, 0, shared_address(shared));
    __syncthreads();
    m.multiply(part, ring, filled, emptied);
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    m.store(part, red);
  }
  if (p.split > 1) cluster_barrier();
  else __syncthreads();
  finish<D, T>(p, part, red, factors, 0, 0);
  if (p.split > 1) cluster_barrier();  // the others have read this block's sums
}

template <int FMT, class T, int G, int MT> int launch(const GemmParams& p, void* stream) {
  using D = Layout<FMT, G, MT>;
  auto kernel = tokens_in_shared<FMT, T, G, MT>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, D::bytes);
  if (allowed != cudaSuccess) return (int)allowed;
  const int blocks = (p.n + p.wn * 32 - 1) / (p.wn * 32) * p.split;
  return start_clusters(kernel, blocks, D::threads, D::bytes, p.split, stream, p);
}

template <int FMT, class T, int G> int launch(const GemmParams& p, int token_tiles, void* stream) {
  return token_tiles == 1 ? launch<FMT, T, G, 1>(p, stream) : launch<FMT, T, G, 2>(p, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16. token_tiles: of 8, 1 or 2. Returns a cudaError_t.
extern "C" int qk_tokens_in_shared(const GemmParams* p, int format, int dtype, int group, int token_tiles, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, token_tiles, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}
