// y[M, N] = x[M, K] @ W[N, K]^T for a packed W and more than a few tokens, of one linear or of routed experts. A block computes one tile.
//
// W is the A operand of wgmma. Each warpgroup has a strip of 64 rows: it decodes the strip from shared memory into registers, which is the
// order that it is packed in, and multiplies it with `NT` tokens that lie as wgmma reads them (arrange_tokens.cu). No decoded weight is ever
// written to memory; int8 needs no decoding, and wgmma reads it from shared memory. A block is `WGS` such warpgroups, one above the other, and
// a warp that keeps a ring filled by the bulk copy engine, in stages of 128 along K. While the tensor cores work on one half of a stage, the
// warps decode the next.
//
// Where there are few tiles, the blocks of a cluster share K. Their sums meet in shared memory, and each block adds up a share of the tokens
// in the blocks' order: results do not depend on timing. Where there are more tiles than multiprocessors, but not twice as many, a block may
// have one tile and a share of those left over (tile_and_share.cuh).
//
// A 4-bit weight is rounded to T once, after its zero point was subtracted and its scale multiplied. What is left of the scale is a factor for
// each row, which comes in at the end in float32.

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "linears/tile.cuh"
#include "linears/tile_fill.cuh"
#include "linears/tile_finish.cuh"
#include "linears/tile_params.cuh"
#include "linears/tile_and_share.cuh"
#include "linears/tile_strip.cuh"
#include "common/wgmma.cuh"

namespace {

template <int FMT, class T, int G, int NT, int WGS, bool SHARES>
__global__ void __launch_bounds__(Tile<FMT, G, NT, WGS>::threads, Tile<FMT, G, NT, WGS>::blocks) tile_per_block(const TileParams p, const Shares shares) {
  using S = Tile<FMT, G, NT, WGS>;
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  constexpr int wide = NT;  // tokens of one instruction
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * S::stages];
  const uint32_t filled = shared_address(barriers), emptied = filled + 8 * S::stages;
  char* ring = shared + (1024 - shared_address(shared) % 1024);
  float* factors = reinterpret_cast<float*>(shared + S::bytes - S::factors);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int block_n = blockIdx.x / p.split, part = blockIdx.x % p.split, tile = blockIdx.y;
  const int all = p.k / 128, begin = all * part / p.split, stages = all * (part + 1) / p.split - begin;
  const Share share = SHARES ? share_of<S::rows>(p, shares) : Share{};
  __shared__ Slice slice;

  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) init_barrier(filled + i * 8, S::scales ? 33 : 1), init_barrier(emptied + i * 8, 4 * WGS);
    show_barriers_to_copies();
  }
  __syncthreads();

  int expert = 0, count = min(NT, p.m - tile * NT);
  if (p.tile_expert) {
    // The routing of a layer's second product was there before its first began.
    if (p.epilogue != kWeigh) wait_for_predecessor();
    expert = p.tile_expert[tile], count = p.tile_count[tile];
    if (expert < 0) return;
  }

  if (warp >= 4 * WGS) {
    if constexpr (S::more_registers) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 4 * WGS) fill<FMT, G, NT, WGS, SHARES>(p, shared_address(ring), shared_address(factors), filled, emptied, expert, block_n, tile, count, begin, stages, shares, share, &slice);
    if (p.split > 1) cluster_barrier(), cluster_barrier();
  } else {
    if constexpr (S::more_registers) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(S::more_registers));
    Strip<FMT, T, G, NT, WGS> strip;
    strip.init(shared_address(ring), warp / 4, FMT == kInt4 && p.zeros != nullptr);
    Acc acc[NT / wide][wide / 2];
#pragma unroll
    for (int n = 0; n < NT / wide; ++n)
#pragma unroll
      for (int i = 0; i < wide / 2; ++i) acc[n][i] = 0;

    uint32_t a[2][S::slabs][4];
    uint32_t stage = 0, slot = 0, phase = 0;
    const int all_stages = share.stages + stages;
    int left = all_stages;
    wait_for(filled, 0);
    strip.load(0, 0);
    const auto multiply = [&](int many) {
      for (; many > 0; --many, --left) {
#pragma unroll
        for (int turn = 0; turn < S::turns; ++turn) {
          if constexpr (FMT != kInt8) strip.decode(a[turn % 2], stage, turn);
          const uint64_t tokens = tokens_at(shared_address(ring) + stage + (FMT == kInt8 ? turn * S::slabs * 32 : turn * 2 / S::turns * NT * 128 + turn * S::slabs % 4 * 32));
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < S::slabs; ++j)
#pragma unroll
            for (int n = 0; n < NT / wide; ++n) {
              if constexpr (FMT == kInt8) wgmma_int8(acc[n], strip.weights(stage, turn * S::slabs + j), tokens + j * 2 + n * (wide * 8));
              else wgmma<T>(acc[n], a[turn % 2][j], tokens + j * 2 + n * (wide * 8));
            }
          wgmma_commit();
          if (turn == S::turns / 2 - 1) strip.load(stage, 1);
          // The operands of the turn before are free again, and with a stage's first turn all of the stage before.
          wgmma_wait<1>();
          if (turn == 0 && left < all_stages && lane == 0) arrive(emptied + (slot == 0 ? S::stages : slot) * 8 - 8);
        }
        stage += S::stage;
        if (++slot == S::stages) slot = 0, stage = 0, phase ^= 1;
        if (left > 1) {
          wait_for(filled + slot * 8, phase);
          strip.load(stage, 0);
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < NT / wide; ++n) wgmma_done(acc[n]);
    };
    if constexpr (SHARES) {
      if (share.stages) {
        multiply(share.stages);
        hand_over<S::consumers>(shares, share, acc[0]);
      }
    }
    multiply(stages);
    let_successor_start();
    wait_for_predecessor();
    asm volatile("bar.sync 1, %0;" :: "n"(S::consumers) : "memory");  // everyone is done with the ring
    const Finish<FMT, T, G, NT, WGS> finish{p, ring, factors, factors + S::rows, block_n, tile, count};
    if (p.split > 1) finish.shared(acc, part);
    else finish.whole(acc);
    if constexpr (SHARES) {
      if (share.stages) add_up_share<T, S::consumers, S::rows, NT / 2>(p, shares, share, &slice, count);
    }
  }
}

template <int FMT, class T, int G, int NT, int WGS, bool SHARES = false> int launch(const TileParams& p, void* stream, const Shares& shares = {}, int blocks = 0) {
  using S = Tile<FMT, G, NT, WGS>;
  auto kernel = tile_per_block<FMT, T, G, NT, WGS, SHARES>;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, S::bytes)) return fault;
  return start_clusters(kernel, dim3(blocks ? blocks : (p.n + S::rows - 1) / S::rows * p.split, p.tiles), S::threads, S::bytes, p.split, stream, p, shares);
}

template <int FMT, class T, int G> int launch(const TileParams& p, int tokens, int warpgroups, void* stream) {
  if constexpr (FMT != kInt8) {
    if (tokens == 24) return launch<FMT, T, G, 24, 2>(p, stream);
    if (tokens == 48) return launch<FMT, T, G, 48, 2>(p, stream);
  }
  if (tokens == 32) return warpgroups == 2 ? launch<FMT, T, G, 32, 2>(p, stream) : launch<FMT, T, G, 32, 4>(p, stream);
  if (tokens == 64) return warpgroups == 2 ? launch<FMT, T, G, 64, 2>(p, stream) : launch<FMT, T, G, 64, 4>(p, stream);
  if (tokens == 128) return warpgroups == 2 ? launch<FMT, T, G, 128, 2>(p, stream) : launch<FMT, T, G, 128, 3>(p, stream);
  return launch<FMT, T, G, 256, 2>(p, stream);
}

template <int FMT, class T, int G> int launch_shares(const TileParams& p, int tokens, void* stream, const Shares& shares, int blocks) {
  return tokens == 32 ? launch<FMT, T, G, 32, 4, true>(p, stream, shares, blocks) : launch<FMT, T, G, 64, 4, true>(p, stream, shares, blocks);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16. tokens: of a tile, 32, 64, 128 or 256, in 4 bits also 24 or 48; warpgroups: 2 or, with 32 or 64 tokens, 4 or, with 128, 3. Returns a cudaError_t.
extern "C" int qk_tile_per_block(const TileParams* p, int format, int dtype, int group, int tokens, int warpgroups, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, tokens, warpgroups, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (format == kInt8) return dtype == 0 ? run(launch<kInt8, bf16, 0>) : run(launch<kInt8, __half, 0>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}

// The same in 4 bits with a grid of `blocks`, each of which has a tile of 256 rows and a share of those left over. tokens: 32 or 64.
extern "C" int qk_tile_and_share(const TileParams* p, const Shares* shares, int format, int dtype, int group, int tokens, int blocks, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, tokens, s, *shares, blocks); };
  if (format == kFp4) return run(launch_shares<kFp4, bf16, 16>);
  if (group == 32) return dtype == 0 ? run(launch_shares<kInt4, bf16, 32>) : run(launch_shares<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch_shares<kInt4, bf16, 64>) : run(launch_shares<kInt4, __half, 64>);
  return dtype == 0 ? run(launch_shares<kInt4, bf16, 128>) : run(launch_shares<kInt4, __half, 128>);
}
