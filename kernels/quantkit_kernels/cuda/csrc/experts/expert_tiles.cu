// Routed experts of more than a few tokens each: the product of a packed weight of each expert with the tokens that chose it. Pairs of a token
// and an expert were sorted by expert before (sort_pairs.cu), and tokens arranged in tiles (arrange_tokens.cu).
//
// As in tile_per_block.cu W is the A operand of wgmma, decoded from shared memory into registers. Here a block stays on its multiprocessor and
// computes one unit, 128 rows by the tokens of a tile, after the other. Its two teams, a warpgroup each, take units in turns: one writes its
// results while the other multiplies. A warp keeps a ring filled for both, in the order of units, and runs ahead of them from unit to unit. A
// barrier distinguishes one round of the ring from the next only, so a team may look at the ring when the other has seen all of its own stages. The two
// blocks of a cluster have units of the same tokens, and each copies half of them into both: with 128 x 128 a block the L2 cache could not
// bring both operands as fast as they are multiplied.
//
// How many pairs an expert has is not known to the host, and a tile has room for `NT`. The product is as wide as the tokens that a tile holds,
// in steps of 32: with a random routing half of the tiles would else be half empty. Of a tile of up to 32 tokens each team takes a strip.

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "common/wgmma.cuh"
#include "linears/tile.cuh"
#include "linears/tile_fill.cuh"
#include "linears/tile_finish.cuh"
#include "linears/tile_params.cuh"
#include "linears/tile_strip.cuh"

namespace {

constexpr int kTeams = 2, kTeam = 128, kStrips = 2, kRows = 64 * kStrips, kThreads = (kTeams + 1) * kTeam;
constexpr int kTogether = 32;  // with so many tokens at most decoding takes longer than multiplying, and each team decodes a strip of the same unit

template <int FMT, int G, int NT> struct Shape : Tile<FMT, G, NT, kStrips> {
  using Stage = Tile<FMT, G, NT, kStrips>;
  static constexpr int pitch = 64 + 8;  // 16-bit numbers of a token's results of a strip
  // Of each team: results of a strip and 32 tokens, twice; of each token where its results go, what they are multiplied with and (int8) its scale.
  static constexpr int staged = 32 * pitch * 2, of_team = 2 * staged + NT * 12;
  static constexpr int room = (227 << 10) - 1024 - 512 - kTeams * of_team;
  static constexpr int stages = room / Stage::stage < 8 ? room / Stage::stage : 8;
  static constexpr int bytes = 1024 + stages * Stage::stage + kTeams * of_team;
  static_assert(stages >= 3);
};

// A cluster's way through the units, and what its block `rank` has of one. Clusters take tiles of the same tokens one after the other.
struct Walk {
  const TileParams& p;
  const int pairs_n, units, rank = blockIdx.x % 2;
  int unit = blockIdx.x / 2, tile = 0, expert = -1, count = 0, block_n = 0;
  __device__ __forceinline__ explicit Walk(const TileParams& p) : p(p), pairs_n((p.n + 2 * kRows - 1) / (2 * kRows)), units(p.tiles * pairs_n) {}
  __device__ __forceinline__ bool found() {
    if (unit >= units) return false;
    tile = unit / pairs_n, block_n = unit % pairs_n * 2 + rank, expert = p.tile_expert[tile], count = p.tile_count[tile];
    return expert >= 0;  // tiles without an expert are the last ones
  }
  __device__ __forceinline__ void next() { unit += gridDim.x / 2; }
};

template <int FMT, int G, int NT> __device__ __forceinline__ void fill_ring(const TileParams& p, uint32_t ring, uint32_t filled, uint32_t emptied) {
  using S = Shape<FMT, G, NT>;
  Copies<FMT, G, NT, kStrips, true> copies(p, ring, filled);
  Place<S::stages> at;
  for (Walk walk(p); walk.found(); walk.next()) {
    copies.hold(walk.count);
    copies.aim(walk.expert, walk.block_n, walk.tile, 0);
    for (int s = 0; s < p.k / 128; ++s, at.next()) {
      wait_for(emptied + at.slot * 8, at.phase ^ 1);
      copies.request(at.slot, s, 0);
      copies.request_tokens(at.slot, s);
    }
  }
  __syncwarp();
}

// What a team knows of the tokens of its tile.
template <int NT> struct Tokens {
  float* weight;
  float* x_scale;
  int* row;  // of `out`
  __device__ __forceinline__ explicit Tokens(char* at) : weight((float*)at), x_scale((float*)at + NT), row((int*)at + 2 * NT) {}
  __device__ __forceinline__ void read(const TileParams& p, int tile, int count) const {
    for (int t = threadIdx.x % kTeam; t < count; t += kTeam) {
      const int slot = tile * NT + t, pair = p.epilogue == kWeigh ? p.order[slot] : 0;
      row[t] = p.epilogue == kWeigh ? pair : slot;
      weight[t] = p.epilogue == kWeigh ? p.pair_weights[pair] : 1.f;
      if (p.x_scale) x_scale[t] = p.x_scale[slot];
    }
  }
};

__device__ __forceinline__ void meet(int team) { asm volatile("bar.sync %0, %1;" :: "r"(1 + team), "n"(kTeam) : "memory"); }

template <int FMT, class T, int G, int NT> struct Team {
  using S = Shape<FMT, G, NT>;
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  using OneStrip = Strip<FMT, T, G, NT, kStrips>;
  const TileParams& p;
  const uint32_t ring, filled, released, turn_of_other;  // released: `emptied` of the one or the other block
  const int team, lane = threadIdx.x & 31;
  char* staged;
  Tokens<NT> tokens;
  Place<S::stages> at;

  __device__ __forceinline__ Team(const TileParams& p, char* shared, uint32_t filled, uint32_t emptied, uint32_t turns, int team)
      : p(p), ring(shared_address(shared)), filled(filled), released(address_in(emptied, threadIdx.x & 1)), turn_of_other(turns + (team ^ 1) * 8), team(team),
        staged(shared + S::stages * S::stage + team * S::of_team), tokens(shared + S::stages * S::stage + team * S::of_team + 2 * S::staged) {}

  // `MANY` strips of a unit from `first` on, by W tokens: both, or each team its own.
  template <int W, int MANY> __device__ __forceinline__ void unit(int expert, int block_n, int tile, int count, int first) {
    tokens.read(p, tile, count);
    const int row = (block_n * kStrips + first) * 64 + threadIdx.x / 32 % 4 * 16 + (lane >> 2);
    OneStrip strips[MANY];
    float scale[MANY][2];
    Acc acc[MANY][W / 2];
#pragma unroll
    for (int s = 0; s < MANY; ++s) {
      strips[s].init(ring, first + s, FMT == kInt4 && p.zeros != nullptr);
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[s][h] = p.row_scale[(size_t)expert * p.n + min(row + s * 64 + h * 8, p.n - 1)];
#pragma unroll
      for (int i = 0; i < W / 2; ++i) acc[s][i] = 0;
    }
    multiply<W>(strips, acc);
    meet(team);  // all of the team have read what the tokens' results need
#pragma unroll
    for (int s = 0; s < MANY; ++s)
#pragma unroll
      for (int i = 0; i < W / 8; i += 4) {
        char* const to = staged + (i / 4 + s * W / 32) % 2 * S::staged;  // the other one is read until the team meets again
        turn(acc[s], i, scale[s], to);
        meet(team);
        write(to, block_n * kStrips + first + s, i * 8, count);
      }
    meet(team);
  }

  template <int W, int MANY> __device__ __forceinline__ void multiply(OneStrip (&strips)[MANY], Acc (&acc)[MANY][W / 2]) {
    uint32_t a[2][S::slabs][4];
    const int stages = p.k / 128;
    uint32_t last = at.slot, stage = at.slot * S::stage;
    const auto load_first = [&] {
      wait_for(filled + at.slot * 8, at.phase);
#pragma unroll
      for (int s = 0; s < MANY; ++s) strips[s].load(stage, 0);
    };
    // A barrier of `emptied` counts two arrivals of every warp of both blocks. Where one team has the unit, its warps arrive for the other's.
    const auto release = [&] {
      if (lane < 2 * MANY) arrive_there(released + last * 8);
    };
    load_first();
    for (int left = stages; left > 0; --left) {
      // All stages of this unit are there: what the other team waits for next are its own.
      if (MANY == kStrips && left == 1 && lane == 0) arrive(turn_of_other);
#pragma unroll
      for (int turn = 0; turn < S::turns; ++turn)
#pragma unroll
        for (int s = 0; s < MANY; ++s) {
          uint32_t(&operands)[S::slabs][4] = a[(turn * MANY + s) % 2];
          if constexpr (FMT != kInt8) strips[s].decode(operands, stage, turn);
          const uint64_t x = tokens_at(ring + stage + (FMT == kInt8 ? turn * S::slabs * 32 : turn * 2 / S::turns * NT * 128 + turn * S::slabs % 4 * 32));
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < S::slabs; ++j) {
            if constexpr (FMT == kInt8) wgmma_int8(acc[s], strips[s].weights(stage, turn * S::slabs + j), x + j * 2);
            else wgmma<T>(acc[s], operands[j], x + j * 2);
          }
          wgmma_commit();
          if (turn == S::turns / 2 - 1) strips[s].load(stage, 1);
          // The operands before these are free again, and with a stage's first turn all of the stage before.
          wgmma_wait<1>();
          if (turn == 0 && s == 0 && left < stages) release();
        }
      last = at.slot;
      at.next();
      stage = at.slot * S::stage;
      if (left > 1) load_first();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int s = 0; s < MANY; ++s) wgmma_done(acc[s]);
    release();
  }

  // A strip's results of 32 tokens from 8 * i on to shared memory, a token's side by side.
  template <int MANY> __device__ __forceinline__ void turn(const Acc (&acc)[MANY], int i, const float (&scale)[2], char* staged) const {
    const int q = lane & 3;
    const bool silu = p.epilogue == kSiluMul;
    const uint32_t to = shared_address(staged) + (threadIdx.x / 32 % 4 * (silu ? 8 : 16)) * 2;
    float y[4][2][2];  // of four times eight tokens
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = FMT == kInt8 ? tokens.x_scale[(i + b) * 8 + 2 * q + e] : 1.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) y[b][h][e] = float(acc[(i + b) * 4 + 2 * h + e]) * scale[h] * factor;
      }
    uint32_t m[4];
    if (silu) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float z[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) z[e] = gated(y[b][0][e], y[b][1][e], p.limit);
        m[b] = pair_of<T>(z[0], z[1]);
      }
      store_matrices_transposed(to + lane * (S::pitch * 2), m);
      return;
    }
#pragma unroll
    for (int two = 0; two < 2; ++two) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float2 weight = *reinterpret_cast<const float2*>(tokens.weight + (i + 2 * two + b / 2) * 8 + 2 * q);
        m[b] = pair_of<T>(y[2 * two + b / 2][b % 2][0] * weight.x, y[2 * two + b / 2][b % 2][1] * weight.y);
      }
      store_matrices_transposed(to + (two * 16 + lane / 16 * 8 + lane % 8) * (S::pitch * 2) + (lane / 8 % 2) * 16, m);
    }
  }
  __device__ __forceinline__ void write(const char* staged, int strip, int first, int count) const {
    const int produced = p.epilogue == kSiluMul ? 32 : 64;
    for (int i = threadIdx.x % kTeam; i < min(32, count - first) * (produced / 8); i += kTeam) {
      const int t = i / (produced / 8), r = i % (produced / 8) * 8, feature = strip * produced + r;
      if (feature < p.out_n) store_run<T, 8>(p, tokens.row[first + t], feature, *reinterpret_cast<const T(*)[8]>(staged + (t * S::pitch + r) * 2));
    }
  }
};

template <int FMT, class T, int G, int NT> __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2, 1, 1) expert_tiles(const TileParams p) {
  using S = Shape<FMT, G, NT>;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * S::stages + kTeams];
  const uint32_t filled = shared_address(barriers), emptied = filled + 8 * S::stages, turns = emptied + 8 * S::stages;
  char* const ring = shared + (1024 - shared_address(shared) % 1024);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) init_barrier(filled + i * 8, S::scales ? 33 : 1), init_barrier(emptied + i * 8, 2 * 4 * kTeams);
    for (int i = 0; i < kTeams; ++i) init_barrier(turns + i * 8, 4);
    show_barriers_to_copies();
  }
  __syncthreads();
  cluster_barrier();
  wait_for_predecessor();

  if (warp >= 4 * kTeams) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 4 * kTeams) fill_ring<FMT, G, NT>(p, shared_address(ring), filled, emptied);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int team = warp / 4;
    Team<FMT, T, G, NT> mine(p, ring, filled, emptied, turns, team);
    uint32_t phase = 0;
    bool waits = false;  // for the other team's unit, which was the one before
    int number = 0;
    for (Walk walk(p); walk.found(); walk.next(), ++number) {
      const bool together = walk.count <= kTogether;
      if (!together && number % kTeams != team) {
        mine.at.skip(p.k / 128), waits = true;
        continue;
      }
      if (waits) wait_for(turns + team * 8, phase), phase ^= 1, waits = false;
      const auto run = [&]<int W>() { mine.template unit<W, kStrips>(walk.expert, walk.block_n, walk.tile, walk.count, 0); };
      if (together) mine.template unit<kTogether, 1>(walk.expert, walk.block_n, walk.tile, walk.count, team);
      else if (walk.count <= 64) run.template operator()<64>();
      else if (NT == 96 || walk.count <= 96) run.template operator()<96>();
      else if constexpr (NT > 96) {
        if (walk.count <= 128) run.template operator()<128>();
        else run.template operator()<160>();
      }
    }
  }
  __syncwarp();
  cluster_barrier();  // the other block has arrived here for the last time
}

template <int FMT, class T, int G, int NT> int launch(const TileParams& p, void* stream) {
  using S = Shape<FMT, G, NT>;
  auto kernel = expert_tiles<FMT, T, G, NT>;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, S::bytes)) return fault;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int pairs = (p.n + 2 * kRows - 1) / (2 * kRows) * p.tiles, clusters = multiprocessors / 2;
  return start(kernel, 2 * (pairs < clusters ? pairs : clusters), kThreads, S::bytes, stream, p);
}

template <int FMT, class T, int G> int launch(const TileParams& p, int tokens, void* stream) {
  return tokens == 96 ? launch<FMT, T, G, 96>(p, stream) : launch<FMT, T, G, 160>(p, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16. tokens: that a tile has room for, 96 or 160. epilogue: kSiluMul or kWeigh. Returns a cudaError_t.
extern "C" int qk_expert_tiles(const TileParams* p, int format, int dtype, int group, int tokens, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, tokens, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (format == kInt8) return dtype == 0 ? run(launch<kInt8, bf16, 0>) : run(launch<kInt8, __half, 0>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}
