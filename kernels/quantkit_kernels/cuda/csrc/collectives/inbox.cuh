// Words that the GPUs of one host write into each other's memory, and read there.
//
// An empty word is EMPTY; a value that looks like it, a NaN of its own kind, is sent as another NaN. So the data are their own flag, and one
// pass over the link is all that a rank waits for. Calls take the two halves of an inbox in turn. Who has read a word empties it: a peer
// writes there again two calls later, and then it has seen this rank's values of the call between, which were sent after this call ended.
// Every rank must make the same calls in the same order. No multicast.

#pragma once

#include <stdint.h>

#include "common/launch.cuh"

namespace {

constexpr int MOST_RANKS = 8;
constexpr unsigned EMPTY = 0xffffffffu, OTHER_NAN = 0x7fff7fffu;

// Memory of each rank as this process sees it: two halves of a part per sender, of `room` words each.
struct Inboxes {
  uint4* of[MOST_RANKS];
};

// `calls` made so far on this device, and blocks of the running one that `arrived`.
struct State {
  unsigned calls, arrived;
};

__device__ __forceinline__ uint4 read_word(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void write_word(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ bool is_full(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

__device__ __forceinline__ uint4 sendable(uint4 v) {
  const auto fix = [](unsigned word) { return word == EMPTY ? OTHER_NAN : word; };
  return {fix(v.x), fix(v.y), fix(v.z), fix(v.w)};
}

// Every thread of every block once it knows the number of calls.
__device__ __forceinline__ void count_call(State* state, unsigned calls, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicInc(&state->arrived, blocks - 1) == blocks - 1) *(volatile unsigned*)&state->calls = calls + 1;
}

// The word that each of the others sent, and `own` at this rank's place. inbox: of this rank, the word of the first sender.
template <int RANKS> __device__ __forceinline__ void receive(uint4 (&parts)[RANKS], uint4* inbox, int rank, int room) {
  bool full;
  do {
    full = true;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank) {
        parts[r] = read_word(inbox + (size_t)r * room);
        full &= is_full(parts[r]);
      }
  } while (!full);
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r != rank) write_word(inbox + (size_t)r * room, {EMPTY, EMPTY, EMPTY, EMPTY});
}

// In the order of the ranks, in float32.
template <class T, int RANKS> __device__ __forceinline__ uint4 sum(const uint4 (&parts)[RANKS]) {
  constexpr int VALUES = sizeof(uint4) / sizeof(T);
  float sums[VALUES] = {};
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sums[i] += float(reinterpret_cast<const T*>(&parts[r])[i]);
  uint4 total;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) reinterpret_cast<T*>(&total)[i] = T(sums[i]);
  return total;
}

}  // namespace
