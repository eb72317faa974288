// The routed experts of few tokens in one launch: for every token-expert pair between = silu(gate) * up, then out = weight * down(between).
//
// The product is limited by memory bandwidth, as that of tokens_in_registers.cu, whose loop this is. But it is cut into many small products,
// one for each expert that a token asked for, and none is long enough to hide its own beginning and end. So the launch has as many blocks as
// the device holds at once. Strips of the first product are dealt out to them beforehand, those of the second, where there are many pairs, go
// to whichever warp comes for one: of two blocks of a multiprocessor the older is served first and ends long before the other, whatever both
// were given. A warp's ring of copies goes on from one piece of work to the next, also from the first product to the second: weights keep
// coming while sums are added up and while a warp waits for `between`.
//
// Up to 8 * MT pairs of one expert are an entry. A strip is 64 rows. In gate_up a block has one strip of an entry at a time, and its warps
// take chunks of 128 along K in turn. In down a warp has a strip alone, with all of K. A warp waits for an entry's `between` by a counter of
// its finished strips. Every block does its share of gate_up first and waits for nothing in it, and all blocks are on the device at once, so
// no block waits for ever.

#include <cuda_runtime.h>
#include <stdint.h>

#include "experts/fused_experts_params.cuh"
#include "experts/expert_ring.cuh"
#include "experts/expert_jobs.cuh"
#include "common/launch.cuh"
#include "linears/warp_sums.cuh"
#include "linears/warp_weights.cuh"

namespace {

constexpr int kDoneStride = 16;  // ints from one entry's counter to the next: a sector of its own each, the first after that of claimed strips

// Where there are fewer, strips of down are dealt out beforehand, too: all warps would ask the counter at once. On a rank of R1's four 36 pairs
// lost some 2 us of 58 by claims, 72 gained 2 of 106, and 288 gained 12 of 264.
constexpr int kFewPairs = 64;

// Brings the 32 bytes at `from` to L1; what is copied is of no use.
__device__ __forceinline__ void touch(uint32_t to, const void* from, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted cp.async.ca.shared.global [%0], [%1], 4;}" :: "r"(to), "l"(from), "r"((int)wanted) : "memory");
}

// After it, what was written before `count` signals can be read.
__device__ __forceinline__ void wait_until_done(const int* counter, int count) {
  int done;
  for (;;) {
    // An acquiring load empties L1, which the block's other warps need.
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
    if (done >= count) break;
    __nanosleep(64);
  }
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
}

template <int FMT, class T, int G, int MT, bool FEW> __global__ void __launch_bounds__(kThreads, 2) fused_experts(const FusedExpertsParams p) {
  using R = Room<FMT, G, MT>;
  constexpr int tokens = R::tokens;
  extern __shared__ __align__(128) char shared[];
  float* red = reinterpret_cast<float*>(shared + R::ring_bytes);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, q = lane & 3;
  constexpr int barriers_at = R::ring_bytes + R::sums_bytes, touched_at = barriers_at + kWarps * R::slots * 8;
  constexpr int claimed_at = touched_at + R::touched_bytes, lists_at = claimed_at + R::claimed_bytes;
  const uint32_t barriers = shared_address(shared) + barriers_at + warp * R::slots * 8, touched = shared_address(shared) + touched_at + lane * 4;
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + lists_at);
  Entry* entries = reinterpret_cast<Entry*>(order + (p.pairs + 1) / 2 * 2);

  JobRing<FMT, G, MT, FEW>::init(barriers);
  wait_for_predecessor();
  let_successor_start();
  const Jobs jobs(p, list_entries<tokens>(p, entries, order, reinterpret_cast<uint16_t*>(red)));
  Claims<FEW> claims(jobs, shared_address(shared) + claimed_at + warp * kClaimsRoom * 4);
  JobRing<FMT, G, MT, FEW> ring(jobs, claims, entries);
  ring.start(shared_address(shared) + warp * R::slots * R::slot_bytes, barriers);

  Job job(jobs);
  for (;;) {
    if (!job.next_shared()) {
      const uint32_t claimed = claims.pop();
      if (claimed == Claims<FEW>::none) break;
      job.go_down(claimed >> 16, claimed & 0xffff);
    }
    const bool down = job.down();
    const Matrix& m = job.matrix();
    const Entry entry = entries[job.entry];
    const float* row_scale = m.row_scale + (size_t)entry.expert * m.n + job.strip * 64;
    // What comes after the product of down.
    float scale[2], pair_weight[MT][2];
    if (down) {
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = __ldg(row_scale + i * 32 + lane);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int e = 0; e < 2; ++e) pair_weight[mt][e] = p.pair_weights[order[entry.first + min(mt * 8 + q * 2 + e, entry.count - 1)]];
      wait_until_done(p.done + (1 + job.entry) * kDoneStride, p.gate_up.n / 64);
    }
    // A column of the product depends on its own token only, so places without a token repeat the first and are not stored. Tokens come to
    // the registers a chunk ahead and to L1 two.
    Operands<FMT, G, 4, MT> stream;
    const int step = job.stride() * 256;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int pair = order[entry.first + (mt * 8 + g < entry.count ? mt * 8 + g : 0)];
      stream.token[mt] = reinterpret_cast<const char*>(down ? p.between : p.x) + (size_t)m.k * 2 * (down ? pair : pair / p.top_k) + q * 16 + job.first_chunk() * 256;
    }
    const auto touch_tokens = [&](int ahead, bool wanted) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const char* from = stream.token[mt] + ahead + q * 16;
        const bool mine = wanted && mt * 8 + g < entry.count;
        touch(touched, from, mine), touch(touched, from + 128, mine);
      }
    };
    int left = job.chunks();
    stream.wk = 0;
    stream.request_tokens(0, 0, left > 0), stream.request_tokens(1, 0, left > 0);
    touch_tokens(step, left > 1);

    Sums<FMT, T, G, 4, MT> sums;
    sums.clear();
    for (; left > 0; --left) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) stream.token[mt] += step;
      touch_tokens(step, left > 2);
      ring.wait();
      ring.take_factors(stream.f, m.zeros);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums.step(stream, ring, half, half, left, 0);
        stream.request_tokens(half, 0, left > 1);
      }
      ring.finish();
    }

    if (down) {
      float* to = p.out + job.strip * 64 + g;
#pragma unroll
      for (int nt = 0; nt < 4; ++nt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = __shfl_sync(0xffffffffu, scale[nt / 2], nt % 2 * 16 + h * 8 + g);
#pragma unroll
          for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int t = mt * 8 + q * 2 + e;
              if (t < entry.count) to[(size_t)order[entry.first + t] * m.n + nt * 16 + h * 8] = sums.acc[nt][mt][h * 2 + e] * factor * pair_weight[mt][e];
            }
        }
    } else {
      float* mine = red + warp * 64 * tokens;
#pragma unroll
      for (int nt = 0; nt < 4; ++nt)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(mine + (nt * 16 + h * 8 + g) * tokens + mt * 8 + q * 2) = {sums.acc[nt][mt][h * 2], sums.acc[nt][mt][h * 2 + 1]};
      // Of the strip's rows, which come as 8 of gate, 8 of up, a thread has one of each for MT tokens or rows.
      const int t = threadIdx.x % tokens;
      float gate_scale[MT], up_scale[MT];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const int r = threadIdx.x / tokens + i * (kThreads / tokens), gate = r / 8 * 16 + r % 8;
        gate_scale[i] = __ldg(row_scale + gate), up_scale[i] = __ldg(row_scale + gate + 8);
      }
      __syncthreads();
      if (t < entry.count) {
        const size_t pair = order[entry.first + t];
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          const int r = threadIdx.x / tokens + i * (kThreads / tokens), gate = r / 8 * 16 + r % 8;
          float a = 0, b = 0;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) a += red[(w * 64 + gate) * tokens + t], b += red[(w * 64 + gate + 8) * tokens + t];
          a *= gate_scale[i], b *= up_scale[i];
          store<T>(p.between, pair * (m.n / 2) + job.strip * 32 + r, gated(a, b, p.limit));
        }
      }
      __syncthreads();
      // A release only, for an acquire would empty L1.
      if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(p.done + (1 + job.entry) * kDoneStride) : "memory");
    }
  }
}

template <int FMT, class T, int G, int MT, bool FEW> int launch(const FusedExpertsParams& p, void* stream) {
  auto kernel = fused_experts<FMT, T, G, MT, FEW>;
  constexpr int bytes = Room<FMT, G, MT>::bytes;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, bytes)) return fault;
  int device, multiprocessors, blocks;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, bytes);
  if (error != cudaSuccess) return (int)error;
  return start(kernel, multiprocessors * blocks, kThreads, bytes, stream, p);
}

template <int FMT, class T, int G> int launch(const FusedExpertsParams& p, int token_tiles, void* stream) {
  if constexpr (G != 32)
    if (token_tiles == 2) return launch<FMT, T, G, 2, false>(p, stream);
  return p.pairs < kFewPairs ? launch<FMT, T, G, 1, true>(p, stream) : launch<FMT, T, G, 1, false>(p, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16; token_tiles of 8 pairs of an entry: 1 or 2. Returns a cudaError_t.
extern "C" int qk_fused_experts(const FusedExpertsParams* p, int format, int dtype, int group, int token_tiles, void* s) {
  const int entries = min(p->pairs, p->experts + p->pairs / 8);
  if (p->pairs * 2 + 4 + entries * (int)sizeof(Entry) > kListBytes || p->experts > 1024) return (int)cudaErrorInvalidValue;
  if (format == kFp4) return launch<kFp4, bf16, 16>(*p, token_tiles, s);
  if (group == 32) return dtype == 0 ? launch<kInt4, bf16, 32>(*p, token_tiles, s) : launch<kInt4, __half, 32>(*p, token_tiles, s);
  if (group == 64) return dtype == 0 ? launch<kInt4, bf16, 64>(*p, token_tiles, s) : launch<kInt4, __half, 64>(*p, token_tiles, s);
  return dtype == 0 ? launch<kInt4, bf16, 128>(*p, token_tiles, s) : launch<kInt4, __half, 128>(*p, token_tiles, s);
}
