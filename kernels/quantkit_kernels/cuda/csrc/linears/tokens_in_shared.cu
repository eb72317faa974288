// y[M, N] = x[M, K] @ W[N, K]^T for a W packed in 4 bits and up to 16 tokens, or for the experts of one token. A block for each
// multiprocessor, and the tokens in shared memory, once for all warps of a block.
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

#include <type_traits>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "linears/gemm_params.cuh"
#include "linears/shared_tokens.cuh"

namespace {

// A warp that brings x: every `kCopyWarps`th chunk of the block's, which begin at `x`, when its slot is free, and signals when it has arrived.
template <int FMT, class T, int G, int MT>
__device__ __forceinline__ void bring_tokens(const GemmParams& p, const char* x, int helper, int chunks, uint32_t ring, uint32_t filled, uint32_t emptied) {
  using D = Layout<FMT, G, MT>;
  constexpr int pieces = D::row / 16, at_once = 32 / pieces;  // copies of a token's chunk, and so many tokens in one instruction
  const int lane = threadIdx.x & 31, token = lane / pieces, column = lane % pieces * 16;
  const size_t row_bytes = (size_t)p.k * 2;
  const char* from = x + token * row_bytes + helper * D::row + column;
  int place = helper, phase = 1, there = helper;
  for (int c = helper; c < chunks + D::ahead * kCopyWarps; c += kCopyWarps) {
    if (c < chunks) {
      if (c >= D::places) wait_for(emptied + place * 8, phase);
#pragma unroll
      for (int i = 0; i < D::tokens; i += at_once)
        if (token + i < p.m) copy16(ring + place * D::place + (token + i) * D::pitch + column, from + i * row_bytes);
      from += kCopyWarps * D::row;
      if ((place += kCopyWarps) >= D::places) place -= D::places, phase ^= 1;
    }
    end_copies();
    if (c < D::ahead * kCopyWarps) continue;
    wait_for_copies<D::ahead>();
    __syncwarp();
    if constexpr (FMT == kInt4) {
      add_up_tokens<T, G, MT>(ring + there * D::place);
      __syncwarp();
    }
    if (lane == 0) arrive(filled + there * 8);
    if ((there += kCopyWarps) >= D::places) there -= D::places;
  }
}

template <int FMT, class T, int G, int MT> __global__ void __launch_bounds__(Layout<FMT, G, MT>::threads, 1) tokens_in_shared(const GemmParams p) {
  using D = Layout<FMT, G, MT>;
  using Lane = Sums<FMT, T, G, 2, MT, true>;
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int rows = p.wn * 32, pitch = rows + 4, wk = kMathWarps / p.wn, warp_n = warp % p.wn, warp_k = warp / p.wn;
  const int part = blockIdx.x % p.split, first = blockIdx.x / p.split * rows, present = min(p.wn, (p.n - first) / 32);
  const int begin = p.k / 128 * part / p.split, chunks = p.k / 128 * (part + 1) / p.split - begin;
  const uint32_t ring = shared_address(shared) + D::weights, filled = shared_address(shared) + D::barriers_at, emptied = filled + D::places * 8;
  auto* red = reinterpret_cast<float*>(shared);  // [warp along K][token][pitch], once the rings are done with
  const auto* factors = reinterpret_cast<const float*>(shared + D::factors_at);

  // Of a token's experts each pair has its own. The routing of a layer's second product was there before its first began.
  const int pair = blockIdx.y;
  if (p.ids && p.epilogue != kWeigh) wait_for_predecessor();
  const int expert = p.ids ? p.ids[(size_t)pair * p.ids_stride] : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < D::places; ++i) init_barrier(filled + i * 8), init_barrier(emptied + i * 8, present);
  }
  if (warp >= kMathWarps) {
    __syncthreads();
    // Factors of rows come with the first tokens.
    for (int i = lane * 4; warp == kMathWarps && i < present * 32; i += 128) copy16(shared_address(factors + i), p.row_scale + (size_t)expert * p.n + first + i);
    wait_for_predecessor();
    const char* x = reinterpret_cast<const char*>(p.x) + (size_t)(p.epilogue == kWeigh ? pair : 0) * p.k * 2 + begin * D::row;
    bring_tokens<FMT, T, G, MT>(p, x, warp - kMathWarps, chunks, ring, filled, emptied);
    wait_for_copies<0>();
    __syncthreads();
  } else {
    const int row = first + warp_n * 32, tile = row % 64 / 16, own = warp_n < present && warp_k < wk ? (chunks - warp_k + wk - 1) / wk : 0;
    Copied<FMT, G, MT> weights;
    const size_t strip = (size_t)expert * (p.n / 64) + row / 64;
    weights.start(p, shared_address(shared) + warp * D::steps * D::S::step_bytes, strip * (p.k / 128) + begin + warp_k, tile, wk, 2 * own);
    Operands<FMT, G, 2, MT> stream;
    stream.clear();
    stream.point(p, expert, row, begin + warp_k, wk);
    stream.request_factors(0, own > 0), stream.request_factors(1, own > 0);
    __syncthreads();
    Lane sums;
    sums.clear();
    int place = warp_k, phase = 0;
    for (int left = 2 * own; left > 0; left -= 2) {
      wait_for(filled + place * 8, phase);
      const uint32_t chunk = ring + place * D::place;
      sums.given = chunk + D::tokens * D::pitch + (lane & 3) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read_tokens<FMT, G, MT>(stream.x[half], chunk, half);
        sums.step(stream, weights, half, half, left - half, tile);
        weights.finish(half, left - half);
      }
      __syncwarp();
      if (lane == 0) arrive(emptied + place * 8);
      place += wk;
      if (place >= D::places) place -= D::places, phase ^= 1;
      stream.advance();
      stream.request_factors(0, left > 2), stream.request_factors(1, left > 2);
    }
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    if (warp_k < wk) {
#pragma unroll
      for (int nt = 0; nt < 2; ++nt)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            red[(warp_k * D::tokens + mt * 8 + (lane & 3) * 2 + c % 2) * pitch + warp_n * 32 + nt * 16 + c / 2 * 8 + (lane >> 2)] = sums.acc[nt][mt][c];
    }
  }
  if (p.split > 1) cluster_barrier();
  else __syncthreads();
  // Four results of a token from `row` of the block on.
  const auto add_up = [&](float (&y)[4], int row, int t) {
    constexpr int at_once = 6;
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = 0;
    int block = 0, w = 0;
    for (int left = p.split * wk; left > 0; left -= at_once) {
      float share[at_once][4];
#pragma unroll
      for (int s = 0; s < at_once; ++s) {
        if (s < left) read_from(share[s], shared_address(red + (w * D::tokens + t) * pitch + row), block);
        if (++w == wk) w = 0, ++block;
      }
#pragma unroll
      for (int s = 0; s < at_once; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (s < left) y[e] += share[s][e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] *= factors[row + e];
  };
  // Each block of a cluster has its share of them.
  const bool silu = p.epilogue == kSiluMul;
  const int produced = silu ? rows / 2 : rows, fours = produced / 4 * p.m, to = fours * (part + 1) / p.split;
  for (int i = fours * part / p.split + threadIdx.x; i < to; i += D::threads) {
    const int r = i % (produced / 4) * 4, t = i / (produced / 4), feature = (silu ? first / 2 : first) + r;
    if (feature >= p.out_n) continue;
    float y[4];
    add_up(y, silu ? r / 8 * 16 + r % 8 : r, t);
    if (silu) {  // rows come as 8 of gate, 8 of up
      float up[4];
      add_up(up, r / 8 * 16 + r % 8 + 8, t);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = gated(y[e], up[e], p.limit);
    }
    if (p.epilogue == kWeigh) {
      const float weight = p.pair_weights[pair];
      float* out = reinterpret_cast<float*>(p.out) + (size_t)pair * p.out_n + feature;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (feature + e < p.out_n) out[e] = y[e] * weight;
      continue;
    }
    T rounded[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded[e] = T(y[e]);
    store_run<T, 4>(p, pair + t, feature, rounded);
  }
  if (p.split > 1) cluster_barrier();  // the others have read this block's sums
}

template <int FMT, class T, int G, int MT> int launch(const GemmParams& p, void* stream) {
  using D = Layout<FMT, G, MT>;
  auto kernel = tokens_in_shared<FMT, T, G, MT>;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, D::bytes)) return fault;
  const int blocks = (p.n + p.wn * 32 - 1) / (p.wn * 32) * p.split;
  return start_clusters(kernel, dim3(blocks, p.ids ? p.pairs : 1), D::threads, D::bytes, p.split, stream, p);
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
