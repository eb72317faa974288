// Both products of one token's experts, for a packed W in 4 bits: gate_up with SiLU, then down with the routing weights. sum_pairs.cu adds up.
//
// Each of the token's experts, a pair, has a row of blocks of its own, which are made as those of linears/tokens_in_shared.cu. A block computes
// its rows of gate_up, asks for its first weights of down, and when all blocks of the pair have counted themselves there, goes on to its rows of
// down. It waits for blocks that were started with it only, so there may be more of them than the device has room for.
//
// The tokens of gate_up are there with the routing, and are asked for before the weights, behind which they would come later.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/launch.cuh"
#include "linears/tokens_in_shared.cuh"

namespace {

constexpr int kDoneStride = 16;  // ints from one pair's counter to the next
struct BothProducts {
  GemmParams p[2];
  int* done;  // [pairs * kDoneStride] zero; the sum over the pairs makes it so again
};

__device__ __forceinline__ void wait_for_blocks(const int* done) {
  if ((threadIdx.x & 31) == 0) {
    int there;
    do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(there) : "l"(done) : "memory");
    while (there < (int)gridDim.x);
  }
  __syncwarp();
}

template <int FMT, class T, int G> __global__ void __launch_bounds__(Layout<FMT, G, 1>::threads, 1) one_token(const __grid_constant__ BothProducts both) {
  using D = Layout<FMT, G, 1>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), pair = blockIdx.y;
  const uint32_t ring = shared_address(shared) + D::weights;
  auto* red = reinterpret_cast<float*>(shared + D::weights);  // in the place of tokens: weights of down are on their way already
  const auto* factors = reinterpret_cast<const float*>(shared + D::factors_at);
  const auto filled_of = [&](int turn) { return shared_address(shared) + (turn ? D::bytes : D::barriers_at); };

  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      const Part part(both.p[turn]);
      for (int i = 0; i < D::places; ++i) init_barrier(filled_of(turn) + i * 8), init_barrier(filled_of(turn) + D::places * 8 + i * 8, max(1, part.present));
    }
  }
  wait_for_predecessor();
  const int expert = both.p[0].ids[(size_t)pair * both.p[0].ids_stride];
  Multiplier<FMT, T, G, 1> m;
  bool asked = false;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const GemmParams& p = both.p[turn];
    const Part part(p);
    const uint32_t filled = filled_of(turn), emptied = filled + D::places * 8;
    if (part.present > 0) {
      if (warp >= kMathWarps) {
        const auto copy_factors = [&] {
          for (int i = lane * 4; warp == kMathWarps && i < part.present * 32; i += 128) copy16(shared_address(factors + i), p.row_scale + (size_t)expert * p.n + part.first + i);
        };
        if (turn) copy_factors(), wait_for_blocks(both.done + pair * kDoneStride);
        const char* x = reinterpret_cast<const char*>(p.x) + (turn ? (size_t)pair * p.k * 2 : 0) + part.begin * D::row;
        bring_tokens<FMT, T, G, 1>(p, x, warp - kMathWarps, part.chunks, ring, filled, emptied, [&] {
          if (!turn) {
            __syncthreads();
            copy_factors();
          }
        });
        wait_for_copies<0>();
        __syncthreads();
      } else {
        if (!turn) __syncthreads();
        if (!asked) m.ask(p, part, expert, shared_address(shared));
        m.multiply(part, ring, filled, emptied);
        __syncthreads();
        m.store(part, red);
        if (turn) let_successor_start();
        else m.ask(both.p[1], Part(both.p[1]), expert, shared_address(shared)), asked = true;
      }
      if (p.split > 1) cluster_barrier();
      else __syncthreads();
      finish<D, T>(p, part, red, factors, turn ? blockIdx.x % both.p[0].split : 0, pair);
    }
    if (both.p[0].split > 1) cluster_barrier();
    else __syncthreads();
    if (turn == 0 && threadIdx.x == 0) {
      __threadfence();
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(both.done + pair * kDoneStride) : "memory");
    }
  }
}

template <int FMT, class T, int G> int launch(const BothProducts& both, void* stream) {
  using D = Layout<FMT, G, 1>;
  auto kernel = one_token<FMT, T, G>;
  constexpr int bytes = D::bytes + D::places * 16;  // barriers of down
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return (int)allowed;
  const auto blocks_of = [](const GemmParams& p) { return (p.n + p.wn * 32 - 1) / (p.wn * 32) * p.split; };
  const int cluster = both.p[0].split, blocks = max(blocks_of(both.p[0]), blocks_of(both.p[1]));
  return start_clusters(kernel, dim3((blocks + cluster - 1) / cluster * cluster, both.p[0].pairs), D::threads, bytes, cluster, stream, both);
}

}  // namespace

using bf16 = __nv_bfloat16;

// gate_up and down of one token, down with a split of 1. done: a counter for each pair, 16 ints apart, zero. dtype: 0 bf16, 1 fp16. Returns a
// cudaError_t.
extern "C" int qk_one_token(const GemmParams* gate_up, const GemmParams* down, int* done, int format, int dtype, int group, void* s) {
  const auto run = [&](auto launcher) { return launcher(BothProducts{{*gate_up, *down}, done}, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}
