// How weights reach the warps of fused_experts.cu, and the shared memory of its blocks.

#pragma once

#include <stdint.h>

#include "common/copies.cuh"
#include "experts/expert_jobs.cuh"
#include "common/packed.cuh"
#include "linears/warp_weights.cuh"

namespace {

constexpr int kListBytes = 7 << 10;  // for the entries and the pairs in their order
constexpr int kChunkBytes = 4096;    // of a strip, 128 along K

// Bytes of shared memory: rings, sums [warp][64 rows][tokens], barriers, lists.
template <int FMT, int G, int MT> struct Room {
  static constexpr int tokens = 8 * MT;
  static constexpr int slots = 2;  // chunks on their way to a warp. More would take room from L1, where tokens are
  static constexpr int scales = 128 / G * (FMT == kFp4 ? 64 : 128), zeros = FMT == kFp4 ? 0 : 128 / G * 32;  // of a chunk
  static constexpr int slot_bytes = kChunkBytes + scales + zeros;
  static constexpr int ring_bytes = slots * kWarps * slot_bytes;
  static constexpr int sums_bytes = kWarps * 64 * tokens * 4;
  static constexpr int touched_bytes = 128, claimed_bytes = kWarps * kClaimsRoom * 4;
  static constexpr int bytes = ring_bytes + sums_bytes + kWarps * slots * 8 + touched_bytes + claimed_bytes + kListBytes;
  static_assert(bytes <= kSharedBytes);
};

// A warp's ring of weights, which copies all its jobs one after the other, a chunk at a time: the words in bulk by one lane, scales and
// zero points in pieces of 16 bytes by all.
template <int FMT, int G, int MT, bool FEW> struct JobRing {
  using R = Room<FMT, G, MT>;
  // How the end is noted: by `ended`, or by a `left` of -1, which takes fewer registers. Of the former the compiler makes the loop that was
  // measured with many pairs (docs/lab/experts.md), and spills of it with 16 tokens an entry.
  static constexpr bool flagged = !FEW && MT == 1;
  static constexpr int pieces = (R::scales + R::zeros) / 16;
  Job job;
  Claims<FEW>& claims;
  const Entry* entries;
  uint32_t data, barriers, slot = 0, phase = 0;
  int left = 0, next, stride;  // the chunk to request next, of `left` that are left of the job
  bool ended = false;          // there is no job any more
  const char* words;
  const uint8_t* factors;  // of chunk 0, for this lane's piece
  int factors_step;        // from one chunk to the next

  __device__ __forceinline__ JobRing(const Jobs& work, Claims<FEW>& claimed, const Entry* all) : job(work), claims(claimed), entries(all) {}
  static __device__ __forceinline__ void init(uint32_t barriers) {
    if (elected()) {
      for (int i = 0; i < R::slots; ++i) init_barrier(barriers + i * 8, 33);
      show_barriers_to_copies();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void start(uint32_t data_at, uint32_t barriers_at) {
    data = data_at, barriers = barriers_at;
    if (job.jobs.shared == 0) claims.ask(job.jobs.p.done);
#pragma unroll 1
    for (int i = 0; i < R::slots; ++i) request(i);
  }
  // To a job that has chunks for this warp, if there is one.
  __device__ __forceinline__ void to_next_job() {
    while (left == 0 && !ended) {
      if (job.next_shared()) {
        if (job.number + 1 == job.jobs.shared) claims.ask(job.jobs.p.done);
      } else {
        const int unit = claims.answer(), strips = job.jobs.p.down.n / 64;
        if constexpr (!flagged) {
          if (unit >= job.jobs.units) {
            claims.push(Claims<FEW>::none), left = -1;
            return;
          }
          job.go_down(unit / strips, unit % strips);
          claims.push((uint32_t)job.entry << 16 | job.strip);
        } else {
          ended = unit >= job.jobs.units;
          job.go_down(unit / strips, unit % strips);
          claims.push(ended ? Claims<FEW>::none : (uint32_t)job.entry << 16 | job.strip);
          if (ended) return;
        }
        claims.ask(job.jobs.p.done);
      }
      const Matrix& m = job.matrix();
      left = job.chunks(), stride = job.stride();
      next = (entries[job.entry].expert * (m.n / 64) + job.strip) * (m.k / 128) + job.first_chunk();
      words = reinterpret_cast<const char*>(m.words);
      const int at = (threadIdx.x & 31) * 16;
      factors = at < R::scales ? m.scales + at : m.zeros ? m.zeros + at - R::scales : nullptr;
      factors_step = at < R::scales ? R::scales : R::zeros;
    }
  }
  __device__ __forceinline__ void request(int place) {
    to_next_job();
    if (flagged ? left == 0 : left < 0) return;
    const uint32_t to = data + place * R::slot_bytes;
    if (elected()) {
      expect_bytes(barriers + place * 8, kChunkBytes);
      copy_bulk(to, words + (size_t)next * kChunkBytes, kChunkBytes, barriers + place * 8);
    }
    const int lane = threadIdx.x & 31;
    if (lane < pieces && factors) copy16(to + kChunkBytes + lane * 16, factors + (size_t)next * factors_step);
    if constexpr (pieces > 32) {  // the zero points of groups of 32
      const Matrix& m = job.matrix();
      if (lane < pieces - 32 && m.zeros) copy16(to + kChunkBytes + 512 + lane * 16, m.zeros + (size_t)next * R::zeros + lane * 16);
    }
    arrive_after_copies(barriers + place * 8);
    next += stride;
    --left;
  }
  __device__ __forceinline__ void wait() { wait_for(barriers + slot * 8, phase); }
  __device__ __forceinline__ void take(uint4 (&w)[4], int half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = read16(data + slot * R::slot_bytes + half * (kChunkBytes / 2) + i * 512 + (threadIdx.x & 31) * 16);
  }
  // As Stream has them, of both halves.
  template <int MANY> __device__ __forceinline__ void take_factors(uint32_t (&f)[2][MANY], bool has_zeros) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const uint32_t from = data + slot * R::slot_bytes + kChunkBytes + g * 16;
    const auto scales = [&](uint32_t* to, uint32_t at) {
      const uint4 v = read16(from + at);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    };
    const auto zeros = [&](uint32_t& to, int group) {
      to = 0x88888888u;  // the middle of the grid
      if (has_zeros) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from - g * 12 + R::scales + group * 32) : "memory");
    };
    if constexpr (FMT == kFp4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scales(f[half], half * 256 + ((lane >> 1) & 1) * 128);
    } else if constexpr (G == 128) {
      scales(f[0], 0), zeros(f[1][0], 0);
    } else {
      constexpr int groups = 64 / G;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < groups; ++i) scales(f[half] + i * 4, (half * groups + i) * 128), zeros(f[half][groups * 4 + i], half * groups + i);
    }
  }
  __device__ __forceinline__ void used(int, int, int) {}
  __device__ __forceinline__ void finish() {
    __syncwarp();
    request(slot);
    if (++slot == R::slots) slot = 0, phase ^= 1;
  }
};

}  // namespace
