// How weights reach a warp of the kernels for few tokens: through a ring in shared memory, or straight into registers.

#pragma once

#include <stdint.h>

#include "common/copies.cuh"
#include "common/packed.cuh"
#include "linears/gemm_params.cuh"

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSharedBytes = 112 << 10;  // of a block, two to a multiprocessor, less the barriers

// Loads under a predicate, which leave the registers as they are where nothing is wanted. Not by ld.global.nc, see `load_constant`.
__device__ __forceinline__ void load_weights(uint4& v, const uint4* p, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)wanted));
}

// The place of a lane's 16 bytes among those of its warp, see packed.cuh.
template <int FMT> __device__ __forceinline__ uint32_t lane_place() {
  const uint32_t lane = threadIdx.x & 31;
  return FMT == kInt8 ? lane ^ (lane >> 3) : lane;
}

template <int FMT, int G, int RT, int MT, bool BULK> struct Shape {
  static constexpr int pieces = FMT == kInt8 ? 2 : 1;         // 16-byte loads of a lane's share of a tile
  static constexpr int tokens = MT * (FMT == kInt8 ? 1 : 2);  // of its share of x
  static constexpr int factors = FMT == kInt8 ? 1 : G == 32 ? 2 * RT + 2 : G == 64 ? RT + 1 : RT;  // words: scales, then zero points
  static constexpr int blocks = MT <= 2 ? 2 : 1;  // per multiprocessor
  static constexpr int step_bytes = RT * pieces * 512;
  static constexpr int sums_bytes = kWarps * RT * 16 * MT * 8 * 4;
  static constexpr int room = (3 - blocks) * kSharedBytes - sums_bytes;
  static constexpr int slots = !BULK ? 0 : room / (kWarps * step_bytes) < 8 ? room / (kWarps * step_bytes) : 8;  // steps on their way
  static constexpr int bytes = slots * kWarps * step_bytes + sums_bytes + kWarps * slots * 8;
};

// `Ring` and `Direct` have the same functions, so that the loop over K is the same for both. Both ask for a step as early as they have room
// for it.
//
// Through shared memory: the bulk copy engine fills a ring that the warp has for itself. The most bytes are on their way.
template <int FMT, int G, int RT, int MT> struct Ring {
  using S = Shape<FMT, G, RT, MT, true>;
  static constexpr int unroll = 2;
  uint32_t data, barriers, slot = 0, phase = 0;
  const char* next;  // the step to be requested next: of this warp and in the right half of its chunk
  int64_t stride;    // from the second half of a chunk to the first of the warp's next

  __device__ __forceinline__ void init(char* shared, int warp) {
    data = shared_address(shared) + warp * S::slots * S::step_bytes;
    barriers = shared_address(shared) + S::slots * kWarps * S::step_bytes + S::sums_bytes + warp * S::slots * 8;
    if (elected()) {
      for (int i = 0; i < S::slots; ++i) init_barrier(barriers + i * 8);
      show_barriers_to_copies();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void start(const GemmParams& p, size_t chunk, int tile, int wk, int steps) {
    next = reinterpret_cast<const char*>(p.words) + chunk * (4096 * S::pieces) + tile * (512 * S::pieces);
    stride = (int64_t)wk * (4096 * S::pieces) - 2048 * S::pieces;
    for (int i = 0; i < min(S::slots, steps); ++i) request(slot + i < S::slots ? slot + i : slot + i - S::slots, i % 2);
  }
  __device__ __forceinline__ void request(uint32_t place, int half) {
    if (elected()) {
      expect_bytes(barriers + place * 8, S::step_bytes);
      copy_bulk(data + place * S::step_bytes, next, S::step_bytes, barriers + place * 8);
    }
    next += half == 0 ? 2048 * S::pieces : stride;
  }
  __device__ __forceinline__ void take(uint4 (&w)[RT * S::pieces], int) {
    wait_for(barriers + slot * 8, phase);
#pragma unroll
    for (int i = 0; i < RT * S::pieces; ++i) w[i] = read16(data + slot * S::step_bytes + i * 512 + lane_place<FMT>() * 16);
  }
  __device__ __forceinline__ void used(int, int, int) {}
  __device__ __forceinline__ void finish(int at, int half, int left) {
    __syncwarp();
    if (left > S::slots) request(slot, (half + S::slots) % 2);
    if (++slot == S::slots) slot = 0, phase ^= 1;
  }
};

// Straight into registers; the registers of a tile are loaded again as soon as they have been used. The shortest way.
template <int FMT, int G, int RT, int MT> struct Direct {
  using S = Shape<FMT, G, RT, MT, false>;
  static constexpr int unroll = MT == 1 && RT == 2 && FMT != kInt8 ? 4 : 2;
  uint4 w[unroll][RT * S::pieces];
  const uint4* words;
  int64_t stride;

  __device__ __forceinline__ void init(char*, int) {}
  __device__ __forceinline__ void start(const GemmParams& p, size_t chunk, int tile, int wk, int steps) {
    words = p.words + chunk * (256 * S::pieces) + tile * (32 * S::pieces) + lane_place<FMT>();
    stride = (int64_t)wk * (256 * S::pieces);
#pragma unroll
    for (int at = 0; at < unroll; ++at)
#pragma unroll
      for (int nt = 0; nt < RT; ++nt) request(at, nt, at / 2, at < steps);
  }
  __device__ __forceinline__ void request(int at, int nt, int chunks, bool wanted) {
#pragma unroll
    for (int j = 0; j < S::pieces; ++j)
      load_weights(w[at][nt * S::pieces + j], words + chunks * stride + (at % 2 * 4 + nt) * (32 * S::pieces) + j * 32, wanted);
  }
  __device__ __forceinline__ void take(uint4 (&to)[RT * S::pieces], int at) {
#pragma unroll
    for (int i = 0; i < RT * S::pieces; ++i) to[i] = w[at][i];
  }
  __device__ __forceinline__ void used(int at, int nt, int left) { request(at, nt, unroll / 2, left > unroll); }
  __device__ __forceinline__ void finish(int at, int half, int) {
    if (half == 1) words += stride;
  }
};

}  // namespace
