// Tiles that are left over when every block has one. Their K is cut into parts, and most blocks compute one part before their own tile.
//
// The sums of a part go to `partial` as the threads hold them, [tile left over][part][four sums][thread][4]. When a block has finished its own
// tile and all parts of the other tile are there, it adds up a slice of that tile, in the parts' order, so that results do not depend on
// timing. The block that brought the last part takes the slices that are left. No block waits for another.

#pragma once

#include <stdint.h>
#include <string.h>

#include "common/packed.cuh"
#include "linears/tile_params.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
// partial: sums of parts; arrived: counters, zero between calls; parts: of each tile left over.
struct Shares {
  float* partial;
  int* arrived;
  int parts;
};

namespace {

struct Share {
  int index, part, block_n, begin, stages;  // which of the tiles left over and which of its parts; none without stages
};

// What the warp that copies finds out for the others: the slice that the block adds up, if below `parts`, and whether its part was the last.
struct Slice {
  int number;
  bool last;
};

// Of a tile: parts handed over, slices claimed, blocks that are done with it.
enum Counter { kHanded, kClaimed, kDone, kCounters = 4 };
__device__ __forceinline__ int* counters_of(const Shares& all, const Share& share) { return all.arrived + share.index * kCounters; }

template <int ROWS> __device__ __forceinline__ Share share_of(const TileParams& p, const Shares& all) {
  const int index = blockIdx.x / all.parts, part = blockIdx.x % all.parts, block_n = gridDim.x + index, stages = p.k / 128;
  if (block_n * ROWS >= p.n) return {};
  const int begin = stages * part / all.parts;
  return {index, part, block_n, begin, stages * (part + 1) / all.parts - begin};
}

// The sums of a part, which are cleared.
template <int THREADS, int MANY> __device__ __forceinline__ void hand_over(const Shares& all, const Share& share, float (&acc)[MANY]) {
  uint4* const to = reinterpret_cast<uint4*>(all.partial) + (size_t)(share.index * all.parts + share.part) * (THREADS * MANY / 4) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < MANY; i += 4) {
    uint4 four;
    memcpy(&four, acc + i, 16);
    __stcg(to + i / 4 * THREADS, four);
  }
#pragma unroll
  for (int i = 0; i < MANY; ++i) acc[i] = 0;
}

// One thread, when all of the block have handed over.
__device__ __forceinline__ bool tell_handed(const Shares& all, const Share& share) {
  __threadfence();
  return atomicAdd(counters_of(all, share) + kHanded, 1) == all.parts - 1;
}
// One thread, near the end of the block.
__device__ __forceinline__ int claim_slice(const Shares& all, const Share& share) {
  const bool whole = atomicAdd(counters_of(all, share) + kHanded, 0) == all.parts;
  __threadfence();
  return whole ? atomicAdd(counters_of(all, share) + kClaimed, 1) : all.parts;
}

template <class T, int THREADS, int ROWS, int MANY> __device__ void add_up_slice(const TileParams& p, const Shares& all, const Share& share, int slice, int count) {
  constexpr int fours = THREADS * MANY / 4, at_once = 12;
  const uint4* const from = reinterpret_cast<const uint4*>(all.partial) + (size_t)share.index * all.parts * fours;
  for (int at = fours * slice / all.parts + threadIdx.x; at < fours * (slice + 1) / all.parts; at += THREADS) {
    const int thread = at % THREADS, lane = thread % 32, token = at / THREADS * 8 + lane % 4 * 2;
    const int row = share.block_n * ROWS + thread / 32 * 16 + lane / 4;
    float sum[4] = {};
    for (int part = 0; part < all.parts; part += at_once) {
      uint4 more[at_once] = {};
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        if (part + i < all.parts) more[i] = __ldcg(from + (size_t)(part + i) * fours + at);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        float four[4];
        memcpy(four, more + i, 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += four[c];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int feature = row + c / 2 * 8, t = token + c % 2;
      if (feature >= p.out_n || t >= count) continue;
      const float y = sum[c] * p.row_scale[feature];
      store<T>(p.out, (size_t)t * p.out_n + feature, y);
    }
  }
}

// All threads that multiply, when the block's own tile is done.
template <class T, int THREADS, int ROWS, int MANY>
__device__ __forceinline__ void add_up_share(const TileParams& p, const Shares& all, const Share& share, Slice* slice, int count) {
  int* const counters = counters_of(all, share);
  for (;;) {
    const int number = slice->number;
    if (number >= all.parts) break;
    add_up_slice<T, THREADS, ROWS, MANY>(p, all, share, number, count);
    if (!slice->last) break;
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
    if (threadIdx.x == 0) slice->number = atomicAdd(counters + kClaimed, 1);
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
  }
  if (threadIdx.x == 0 && atomicAdd(counters + kDone, 1) == all.parts - 1) counters[kHanded] = counters[kClaimed] = counters[kDone] = 0;
}

}  // namespace
