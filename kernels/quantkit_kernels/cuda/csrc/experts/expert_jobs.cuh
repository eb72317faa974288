// The work of fused_experts.cu, and how blocks and warps come by it. That file says what an entry and a strip are.

#pragma once

#include <stdint.h>

#include "experts/fused_experts_params.cuh"
#include "linears/warp_weights.cuh"

namespace {

struct Entry {
  uint16_t first;  // of its pairs, order[first] .. order[first + count - 1]
  uint16_t expert : 11, count : 5;
};

// As below, for up to 32 pairs, by one warp. The entries come in another order.
template <int TOKENS> __device__ int list_few_entries(const FusedExpertsParams& p, Entry* entries, uint16_t* order) {
  __shared__ int all;
  const int lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    const int expert = lane < p.pairs ? p.ids[(size_t)lane * p.ids_stride] : -1 - lane;
    const unsigned same = __match_any_sync(0xffffffffu, expert), below = (1u << lane) - 1;
    const int rank = __popc(same & below), count = expert < 0 || rank % TOKENS ? 0 : min(TOKENS, __popc(same) - rank);
    const unsigned firsts = __ballot_sync(0xffffffffu, count);
    int upto = count;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, upto, o);
      if (lane >= o) upto += other;
    }
    if (count) entries[__popc(firsts & below)] = {(uint16_t)(upto - count), (uint16_t)expert, (uint16_t)count};
    const int first_lane = rank < TOKENS ? __ffs(same) - 1 : __fns(same, 0, rank / TOKENS * TOKENS + 1);
    const int first = __shfl_sync(0xffffffffu, upto - count, first_lane);
    if (expert >= 0) order[first + rank % TOKENS] = lane;
    if (lane == 0) all = __popc(firsts);
  }
  __syncthreads();
  return all;
}

constexpr int kRanked = 128;

// As below, for up to kRanked pairs: a thread with one of them looks at all others for its place. room: for 2 * kRanked ints.
template <int TOKENS> __device__ int list_by_rank(const FusedExpertsParams& p, Entry* entries, uint16_t* order, int* room) {
  const int i = threadIdx.x, lane = i & 31, expert = i < p.pairs ? p.ids[(size_t)i * p.ids_stride] : -1;
  int* begins = room + kRanked;  // by place: of an entry's first pair its expert and how many there are, else 0
  if (i < kRanked) room[i] = expert, begins[i] = 0;
  __syncthreads();
  if ((i & ~31) < p.pairs) {
    int before = 0, same = 0, rank = 0;  // pairs of later experts; of this one, and those of them that come first
    const auto look = [&](int other, int j) { before += other > expert, same += other == expert, rank += other == expert && j < i; };
    for (int j = 0; j < p.pairs; j += 4) {
      const int4 others = *reinterpret_cast<const int4*>(room + j);
      look(others.x, j), look(others.y, j + 1), look(others.z, j + 2), look(others.w, j + 3);
    }
    if (expert >= 0) {
      order[before + rank] = i;
      if (rank % TOKENS == 0) begins[before + rank] = expert << 8 | min(TOKENS, same - rank);
    }
  }
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int first = 0; first < kRanked; first += 32) {
    const int begin = begins[first + lane];
    const unsigned lanes = __ballot_sync(0xffffffffu, begin);
    if (begin && i == first + lane) entries[all + __popc(lanes & ((1u << lane) - 1))] = {(uint16_t)i, (uint16_t)(begin >> 8), (uint16_t)(begin & 0xff)};
    all += __popc(lanes);
  }
  __syncthreads();
  return all;
}

// Entries of one expert after the other, the last first: a shared one, which all tokens ask for, would else be what the launch ends on. An
// expert's pairs stay in their order, for all blocks must come to the same entries. Returns how many; `counts` is room for 8 numbers per
// expert. All threads of the block, which are synchronized when it returns.
template <int TOKENS> __device__ int list_entries(const FusedExpertsParams& p, Entry* entries, uint16_t* order, uint16_t* counts) {
  if (p.pairs <= 32) return list_few_entries<TOKENS>(p, entries, order);
  if (p.pairs <= kRanked) return list_by_rank<TOKENS>(p, entries, order, reinterpret_cast<int*>(counts));
  __shared__ uint32_t totals[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int share = (p.pairs + kThreads - 1) / kThreads * 32, begin = warp * share, end = min(p.pairs, begin + share);  // of a warp
  // Asked for at once, and kept where there are no more than 64 a warp: every wait for memory here is one of the whole device.
  const auto expert_of = [&](int base) { return base + lane < end ? p.ids[(size_t)(base + lane) * p.ids_stride] : -1; };
  const int kept[2] = {expert_of(begin), expert_of(begin + 32)};
  const auto kept_or_read = [&](int base) { return base == begin ? kept[0] : base == begin + 32 ? kept[1] : expert_of(base); };
  for (int i = threadIdx.x; i < p.experts; i += kThreads) reinterpret_cast<uint4*>(counts)[i] = {};
  __syncthreads();
  // Adds 32 pairs to the warp's numbers of its experts; returns what the lane's had before it.
  const auto count = [&](int expert) {
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int before = expert < 0 ? 0 : counts[expert * kWarps + warp];
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) counts[expert * kWarps + warp] = before + __popc(same);
    __syncwarp();
    return before + __popc(same & ((1u << lane) - 1));
  };
  for (int base = begin; base < end; base += 32) count(kept_or_read(base));
  __syncthreads();
  const int each = (p.experts + kThreads - 1) / kThreads, from = threadIdx.x * each, to = min(p.experts, from + each);
  struct __align__(16) OfWarps { uint16_t of[kWarps]; };
  OfWarps* numbers = reinterpret_cast<OfWarps*>(counts);
  const auto total = [&](int expert) {
    const OfWarps number = numbers[expert];
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += number.of[w];
    return sum;
  };
  uint32_t mine = 0;  // entries in the upper half, pairs in the lower
  for (int i = from; i < to; ++i) {
    const uint32_t all = total(p.experts - 1 - i);
    mine += (all + TOKENS - 1) / TOKENS << 16 | all;
  }
  uint32_t upto = mine;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, upto, o);
    if (lane >= o) upto += other;
  }
  if (lane == 31) totals[warp] = upto;
  __syncthreads();
  uint32_t before = upto - mine, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += totals[w];
    all += totals[w];
  }
  int entry = before >> 16, first = before & 0xffff;
  for (int i = from; i < to; ++i) {
    const int expert = p.experts - 1 - i, last = first + total(expert);
    for (int at = first; at < last; at += TOKENS) entries[entry++] = {(uint16_t)at, (uint16_t)expert, (uint16_t)min(last - at, TOKENS)};
    OfWarps number = numbers[expert];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int warps = number.of[w];
      number.of[w] = first;
      first += warps;
    }
    numbers[expert] = number;
  }
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int expert = kept_or_read(base), place = count(expert);
    if (expert >= 0) order[place] = base + lane;
  }
  __syncthreads();
  return all >> 16;
}

// The work of a block, and of all warps together.
struct Jobs {
  const FusedExpertsParams& p;
  int warp, items, shared, units;  // strips of gate_up, those of the block, of which its warps take chunks; strips of down, that warps claim

  __device__ __forceinline__ Jobs(const FusedExpertsParams& params, int entries) : p(params) {
    warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    const int blocks = gridDim.x;
    items = entries * (p.gate_up.n / 64);
    shared = items / blocks + ((int)blockIdx.x < items % blocks);
    units = entries * (p.down.n / 64);
  }
};

// One piece of a warp's work after the other.
struct Job {
  const Jobs& jobs;
  int number = -1, entry, strip;

  __device__ __forceinline__ explicit Job(const Jobs& work) : jobs(work) {}
  __device__ __forceinline__ bool down() const { return number >= jobs.shared; }
  __device__ __forceinline__ const Matrix& matrix() const { return down() ? jobs.p.down : jobs.p.gate_up; }
  // To the block's next strip of gate_up, if there is one.
  __device__ __forceinline__ bool next_shared() {
    if (number + 1 >= jobs.shared) return false;
    const int strips = jobs.p.gate_up.n / 64;
    if (++number == 0) {
      entry = blockIdx.x / strips, strip = blockIdx.x % strips;
    } else {
      entry += gridDim.x / strips, strip += gridDim.x % strips;
      if (strip >= strips) strip -= strips, ++entry;
    }
    return true;
  }
  // To a strip of down.
  __device__ __forceinline__ void go_down(int to_entry, int to_strip) { number = jobs.shared, entry = to_entry, strip = to_strip; }
  // Chunks of 128 along K: the warp's first, how far they are apart, and how many.
  __device__ __forceinline__ int first_chunk() const { return down() ? 0 : jobs.warp; }
  __device__ __forceinline__ int stride() const { return down() ? 1 : kWarps; }
  __device__ __forceinline__ int chunks() const {
    const int all = matrix().k / 128;
    return down() ? all : (all - jobs.warp + kWarps - 1) / kWarps;
  }
};

constexpr int kClaimsRoom = 4;

// The strips of down that a warp has claimed: they are claimed when their weights are to be asked for, which is up to two of them before the
// warp multiplies. The device's counter is read ahead, so that no warp waits for it. FEW: each warp has its strips beforehand, without it.
template <bool FEW> struct Claims {
  static constexpr uint32_t none = 0xffffffffu;
  uint32_t place;  // in shared memory, kClaimsRoom words of the warp's own
  int asked = 0, pushed = 0, popped = 0;
  // Of few: the next one, how far they are apart, how many are left of these, and where those after them begin.
  int next = 0, step = 0, early = 0, late = 0;

  __device__ __forceinline__ Claims(const Jobs& jobs, uint32_t words) : place(words) {
    if constexpr (FEW) {
      const int blocks = gridDim.x, block = blockIdx.x, full = jobs.items % blocks;  // blocks that have one strip of gate_up more
      // What the others take of down before all of them share the rest, in the same bytes.
      const int ahead = min(jobs.units, full == 0 ? 0 : (blocks - full) * max(1, jobs.p.gate_up.k / jobs.p.down.k));
      step = (blocks - full) * kWarps, next = (block - full) * kWarps + jobs.warp;
      early = block >= full && next < ahead ? (ahead - next + step - 1) / step : 0;
      late = ahead + block * kWarps + jobs.warp;
    }
  }
  // One strip more for this warp, lane 0 knows which: a number beyond the last where there is none.
  __device__ __forceinline__ void ask(int* counter) {
    if constexpr (FEW) {
      if (early-- == 0) next = late, step = gridDim.x * kWarps;
      asked = next, next += step;
    } else {
      asm volatile("{.reg .pred first; setp.eq.s32 first, %2, 0; @first atom.relaxed.gpu.global.add.s32 %0, [%1], 1;}" : "+r"(asked) : "l"(counter), "r"(threadIdx.x & 31) : "memory");
    }
  }
  __device__ __forceinline__ int answer() const { return __shfl_sync(0xffffffffu, asked, 0); }
  __device__ __forceinline__ void push(uint32_t what) {
    if ((threadIdx.x & 31) == 0) asm volatile("st.shared.u32 [%0], %1;" :: "r"(place + pushed % kClaimsRoom * 4), "r"(what) : "memory");
    ++pushed;
  }
  __device__ __forceinline__ uint32_t pop() {
    uint32_t what;
    __syncwarp();
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(what) : "r"(place + popped % kClaimsRoom * 4) : "memory");
    ++popped;
    return what;
  }
};

}  // namespace
