// The routed experts of few tokens in one launch: for every token-expert pair between = silu(gate) * up, then out = weight * down(between).
//
// A problem of memory bandwidth like stream_gemm.cu, whose loop this is, but cut into many small products: one per expert that a token
// asked for, none of them long enough to hide its own beginning and end. So there are as many blocks as the device holds at once, all the
// work is dealt out to them beforehand, and a warp's ring of copies runs on from one piece of work into the next, over the border between
// the two products too: weights keep coming while sums are added up and while `between` is waited for.
//
// Work: an expert with up to 8 * MT of its pairs is an entry. Of gate_up a block has a strip of an entry at a time, its warps a chunk of
// 128 along K each in turn; of down a warp has a strip by itself, all of K. Blocks that have one strip of gate_up less than the others take
// so much more of down. A warp waits for an entry's `between` by a counter of its finished strips. Nothing is waited for that a block which
// started later, or work that comes later in a block, has to do: with all blocks on the device this cannot lock up.

#include <cuda_runtime.h>
#include <stdint.h>

#include "experts_params.cuh"
#include "launch.cuh"
#include "stream_sums.cuh"
#include "stream_weights.cuh"

namespace {

constexpr int kDoneStride = 16;          // ints from one entry's counter to the next: a sector of its own each
constexpr int kListBytes = 7 << 10;      // of shared memory, for the entries and the pairs in their order
constexpr int kChunkBytes = 4096;        // of a strip, 128 along K

struct Entry {
  uint16_t first;  // of its pairs, order[first] .. order[first + count - 1]
  uint16_t expert : 11, count : 5;
};

// Bytes of shared memory: rings, sums [warp][64 rows][tokens], barriers, lists.
template <int FMT, int G, int MT> struct Room {
  static constexpr int tokens = 8 * MT;
  static constexpr int slots = 2;  // chunks on their way to a warp. More would take room from L1, where tokens are
  static constexpr int scales = 128 / G * (FMT == kFp4 ? 64 : 128), zeros = FMT == kFp4 ? 0 : 128 / G * 32;  // of a chunk
  static constexpr int slot_bytes = kChunkBytes + scales + zeros;
  static constexpr int ring_bytes = slots * kWarps * slot_bytes;
  static constexpr int sums_bytes = kWarps * 64 * tokens * 4;
  static constexpr int touched_bytes = 128;
  static constexpr int bytes = ring_bytes + sums_bytes + kWarps * slots * 8 + touched_bytes + kListBytes;
  static_assert(bytes <= kSharedBytes);
};

// As below, for up to 32 pairs, by one warp. The entries come in another order.
template <int TOKENS> __device__ int list_few_entries(const ExpertsParams& p, Entry* entries, uint16_t* order) {
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

// Entries of one expert after the other, the last first: a shared one, which all tokens ask for, would else be what the launch ends on. An
// expert's pairs stay in their order, for all blocks must come to the same entries. Returns how many; `counts` is room for 8 numbers per
// expert. All threads of the block, which are synchronized when it returns.
template <int TOKENS> __device__ int list_entries(const ExpertsParams& p, Entry* entries, uint16_t* order, uint16_t* counts) {
  if (p.pairs <= 32) return list_few_entries<TOKENS>(p, entries, order);
  __shared__ uint32_t totals[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int share = (p.pairs + kThreads - 1) / kThreads * 32, begin = warp * share, end = min(p.pairs, begin + share);  // of a warp
  for (int i = threadIdx.x; i < p.experts * kWarps / 2; i += kThreads) reinterpret_cast<uint32_t*>(counts)[i] = 0;
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
  const auto expert_of = [&](int base) { return base + lane < end ? p.ids[(size_t)(base + lane) * p.ids_stride] : -1; };
  for (int base = begin; base < end; base += 32) count(expert_of(base));
  __syncthreads();
  const int each = (p.experts + kThreads - 1) / kThreads, from = threadIdx.x * each, to = min(p.experts, from + each);
  const auto total = [&](int expert) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += counts[expert * kWarps + w];
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
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int warps = counts[expert * kWarps + w];
      counts[expert * kWarps + w] = first;
      first += warps;
    }
  }
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int expert = expert_of(base), place = count(expert);
    if (expert >= 0) order[place] = base + lane;
  }
  __syncthreads();
  return all >> 16;
}

// The work of a block and of its warps.
struct Jobs {
  const ExpertsParams& p;
  int warp, shared, early, count;  // of a warp: strips of gate_up with the others of its block, strips of down before the rest and in all
  int early_first, early_stride, late_first, late_stride;

  __device__ __forceinline__ Jobs(const ExpertsParams& params, int entries) : p(params) {
    warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    const int blocks = gridDim.x, block = blockIdx.x, items = entries * (p.gate_up.n / 64), units = entries * (p.down.n / 64);
    const int full = items % blocks;  // blocks that have one more
    shared = items / blocks + (block < full);
    // What the others take of down before all of them share the rest, in the same bytes.
    const int ahead = min(units, full == 0 ? 0 : (blocks - full) * max(1, p.gate_up.k / p.down.k));
    early_stride = (blocks - full) * kWarps, early_first = (block - full) * kWarps + warp;
    early = block >= full && early_first < ahead ? (ahead - early_first + early_stride - 1) / early_stride : 0;
    late_stride = blocks * kWarps, late_first = ahead + block * kWarps + warp;
    count = shared + early + (late_first < units ? (units - late_first + late_stride - 1) / late_stride : 0);
  }
};

// One piece of a warp's work after the other.
struct Job {
  const Jobs& jobs;
  int number = -1, entry, strip, entry_step, strip_step;

  __device__ __forceinline__ explicit Job(const Jobs& work) : jobs(work) {}
  __device__ __forceinline__ bool down() const { return number >= jobs.shared; }
  __device__ __forceinline__ const Matrix& matrix() const { return down() ? jobs.p.down : jobs.p.gate_up; }
  __device__ __forceinline__ bool next() {
    if (++number >= jobs.count) return false;
    const int strips = matrix().n / 64;
    entry += entry_step, strip += strip_step;
    if (strip >= strips) strip -= strips, ++entry;
    if (number == 0 || number == jobs.shared || number == jobs.shared + jobs.early) {
      const bool late = number >= jobs.shared + jobs.early;
      const int at = !down() ? blockIdx.x : late ? jobs.late_first : jobs.early_first;
      const int step = !down() ? gridDim.x : late ? jobs.late_stride : jobs.early_stride;
      entry = at / strips, strip = at % strips, entry_step = step / strips, strip_step = step % strips;
    }
    return true;
  }
  // Chunks of 128 along K: the warp's first, how far they are apart, and how many.
  __device__ __forceinline__ int first_chunk() const { return down() ? 0 : jobs.warp; }
  __device__ __forceinline__ int stride() const { return down() ? 1 : kWarps; }
  __device__ __forceinline__ int chunks() const {
    const int all = matrix().k / 128;
    return down() ? all : (all - jobs.warp + kWarps - 1) / kWarps;
  }
};

// A warp's ring of weights, which copies all its jobs one after the other, a chunk at a time: the words in bulk by one lane, scales and
// zero points in pieces of 16 bytes by all.
template <int FMT, int G, int MT> struct JobRing {
  using R = Room<FMT, G, MT>;
  static constexpr int pieces = (R::scales + R::zeros) / 16;
  Job job;
  const Entry* entries;
  uint32_t data, barriers, slot = 0, phase = 0;
  int left = 0, next, stride;  // the chunk to request next, of `left` that are left of the job
  const char* words;
  const uint8_t* factors;  // of chunk 0, for this lane's piece
  int factors_step;        // from one chunk to the next

  __device__ __forceinline__ JobRing(const Jobs& work, const Entry* all) : job(work), entries(all) {}
  static __device__ __forceinline__ void init(uint32_t barriers) {
    if (elected()) {
      for (int i = 0; i < R::slots; ++i) init_barrier(barriers + i * 8, 33);
      show_barriers_to_copies();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void start(uint32_t data_at, uint32_t barriers_at) {
    data = data_at, barriers = barriers_at;
    to_next_job();
    for (int i = 0; i < R::slots; ++i) request(i);
  }
  __device__ __forceinline__ void to_next_job() {
    while (left == 0 && job.next()) {
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
    if (left == 0) return;
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
    if (--left == 0) to_next_job();
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

// Brings the 32 bytes at `from` to L1; what is copied is of no use.
__device__ __forceinline__ void touch(uint32_t to, const void* from, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted cp.async.ca.shared.global [%0], [%1], 4;}" :: "r"(to), "l"(from), "r"((int)wanted) : "memory");
}

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

template <int FMT, class T, int G, int MT> __global__ void __launch_bounds__(kThreads, 2) stream_experts(const ExpertsParams p) {
  using R = Room<FMT, G, MT>;
  constexpr int tokens = R::tokens;
  extern __shared__ __align__(128) char shared[];
  float* red = reinterpret_cast<float*>(shared + R::ring_bytes);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, q = lane & 3;
  constexpr int barriers_at = R::ring_bytes + R::sums_bytes, touched_at = barriers_at + kWarps * R::slots * 8, lists_at = touched_at + R::touched_bytes;
  const uint32_t barriers = shared_address(shared) + barriers_at + warp * R::slots * 8, touched = shared_address(shared) + touched_at + lane * 4;
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + lists_at);
  Entry* entries = reinterpret_cast<Entry*>(order + (p.pairs + 1) / 2 * 2);

  JobRing<FMT, G, MT>::init(barriers);
  wait_for_predecessor();
  let_successor_start();
  const Jobs jobs(p, list_entries<tokens>(p, entries, order, reinterpret_cast<uint16_t*>(red)));
  JobRing<FMT, G, MT> ring(jobs, entries);
  ring.start(shared_address(shared) + warp * R::slots * R::slot_bytes, barriers);

  for (Job job(jobs); job.next();) {
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
      wait_until_done(p.done + job.entry * kDoneStride, p.gate_up.n / 64);
    }
    // A column of the product depends on its own token only, so places without a token repeat the first and are not stored. Tokens come to
    // the registers a chunk ahead and to L1 two.
    Stream<FMT, G, 4, MT> stream;
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
          store<T>(p.between, pair * (m.n / 2) + job.strip * 32 + r, a / (1.f + __expf(-a)) * b);
        }
      }
      __syncthreads();
      // A release only, for an acquire would empty L1.
      if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(p.done + job.entry * kDoneStride) : "memory");
    }
  }
}

template <int FMT, class T, int G, int MT> int launch(const ExpertsParams& p, void* stream) {
  auto kernel = stream_experts<FMT, T, G, MT>;
  constexpr int bytes = Room<FMT, G, MT>::bytes;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return (int)allowed;
  int device, multiprocessors, blocks;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, bytes);
  if (error != cudaSuccess) return (int)error;
  return start(kernel, multiprocessors * blocks, kThreads, bytes, stream, p);
}

template <int FMT, class T, int G> int launch(const ExpertsParams& p, int token_tiles, void* stream) {
  if constexpr (G == 32) return launch<FMT, T, G, 1>(p, stream);
  else return token_tiles == 1 ? launch<FMT, T, G, 1>(p, stream) : launch<FMT, T, G, 2>(p, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16; token_tiles of 8 pairs of an entry: 1 or 2. Returns a cudaError_t.
extern "C" int qk_stream_experts(const ExpertsParams* p, int format, int dtype, int group, int token_tiles, void* s) {
  const int entries = min(p->pairs, p->experts + p->pairs / 8);
  if (p->pairs * 2 + 4 + entries * (int)sizeof(Entry) > kListBytes || p->experts > 1024) return (int)cudaErrorInvalidValue;
  if (format == kFp4) return launch<kFp4, bf16, 16>(*p, token_tiles, s);
  if (group == 32) return dtype == 0 ? launch<kInt4, bf16, 32>(*p, token_tiles, s) : launch<kInt4, __half, 32>(*p, token_tiles, s);
  if (group == 64) return dtype == 0 ? launch<kInt4, bf16, 64>(*p, token_tiles, s) : launch<kInt4, __half, 64>(*p, token_tiles, s);
  return dtype == 0 ? launch<kInt4, bf16, 128>(*p, token_tiles, s) : launch<kInt4, __half, 128>(*p, token_tiles, s);
}
