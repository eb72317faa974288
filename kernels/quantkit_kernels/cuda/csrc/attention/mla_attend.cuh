// Scores and means of latents: a block takes part of a row's tokens for up to 32 heads, in tiles of 64 that are copied into a ring of two.
//
// A tile is nine panels of 64 columns, in which a token has 128 bytes, as wgmma reads them. Of scores [tokens, heads] the tokens are A's rows, of
// sums [latents, heads] the same panels are A transposed; queries and probabilities are B. So a latent is copied once and lies once.
// One warpgroup computes scores and probabilities, two have half of the sums each and may lag one tile, one copies.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"

namespace {

constexpr int kTokens = 64, kPanels = kEntry / 64, kPanelBytes = kTokens * 128, kTileBytes = kPanels * kPanelBytes;
constexpr int kSlots = 2, kFirst = 1;    // tiles of the ring, and of those asked for before the queries: more of them are in the queries' way
constexpr int kFewParts = 8;             // of a row, see parts_of
constexpr int kMath = 384, kCopy = 128;  // threads that multiply; threads that copy
constexpr int kRegisters = 96;           // of a thread: of those left, and of shared memory, two blocks of W_UK's kernel have enough

template <int HEADS> struct Room {  // in shared memory, bytes
  static constexpr int query_panel = HEADS * 128, queries = kSlots * kTileBytes, probabilities = queries + kPanels * query_panel;
  static constexpr int shrink = probabilities + kSlots * query_panel, tops = shrink + 2 * HEADS * 4, shares = tops + 2 * 4 * HEADS * 4, barriers = shares + HEADS * 4, bytes = barriers + 7 * 8;
  static constexpr int pitch = 2 * kLatent + 16;  // of a head's mean: eight rows of a matrix lie in different banks
  static_assert(HEADS * pitch <= kSlots * kTileBytes);
};

template <int BARRIER, int THREADS> __device__ __forceinline__ void meet() { asm volatile("bar.sync %0, %1;" :: "n"(BARRIER), "n"(THREADS) : "memory"); }

// What a block has to do: tokens first .. end of `row`.
struct Part {
  int first, end, tiles;
  __device__ __forceinline__ Part(const Attend& p, int row, int split) {
    const int length = p.lengths[row * p.lengths_stride], units = tiles_of(length, p.tile), parts = parts_of(units, p);
    first = split < parts ? units * split / parts * p.tile : 0;
    end = split < parts ? min(length, units * (split + 1) / parts * p.tile) : 0;
    tiles = (end - first + kTokens - 1) / kTokens;
  }
};

// Copies queries and tiles. Eight threads side by side have 128 bytes of one token, all of them 16 tokens at once.
template <class T, int HEADS>
__device__ __forceinline__ void fill_ring(const T* q, const T* cache, const Attend& p, const Part& part, int row, int head0, uint32_t shared, uint32_t filled, uint32_t emptied, uint32_t queried) {
  using R = Room<HEADS>;
  const int thread = threadIdx.x - kMath, chunk = thread % 8, r = thread / 8;
  const uint32_t own = r * 128 + ((chunk ^ r % 8) << 4);
  const auto look_up = [&](const T* (&from)[kTokens / 16], int tile) {
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) {
      // Tokens past the end repeat the last: their probability is zero, and zero times unwritten memory might be NaN.
      const int token = min(part.first + tile * kTokens + j * 16 + r, part.end - 1), block = token / p.block_size;
      from[j] = cache + ((size_t)p.table[(row * p.table_width + block) * p.table_stride] * p.block_size + token - block * p.block_size) * kEntry + chunk * 8;
    }
  };
  const auto request = [&](const T* const (&from)[kTokens / 16], int tile) {
    const uint32_t slot = tile % kSlots, to = shared + slot * kTileBytes + own;
    const int here = part.end - part.first - tile * kTokens;
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j)
      if (j * 16 < here) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) copy16(to + panel * kPanelBytes + j * 2048, from[j] + panel * 64);
      }
    arrive_after_copies(filled + slot * 8);
  };
  const auto request_queries = [&] {
    wait_for_predecessor();
    let_successor_start();
#pragma unroll
    for (int j = 0; j < HEADS / 16; ++j) {
      const T* from = q + ((size_t)row * p.heads + min(head0 + j * 16 + r, p.heads - 1)) * kEntry + chunk * 8;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) copy16(shared + R::queries + own + panel * R::query_panel + j * 2048, from + panel * 64);
    }
    arrive_after_copies(queried);
  };

  // The newest token was cached before the queries' kernel let this one start, so all of the cache may be read while that ends.
  const T* from[kTokens / 16];
  look_up(from, 0);
  for (int tile = 0; tile < part.tiles; ++tile) {
    const T* next[kTokens / 16];
    look_up(next, tile + 1);
    if (tile == kFirst) request_queries();
    if (tile >= kSlots) wait_for(emptied + tile % kSlots * 8, tile / kSlots - 1 & 1);
    request(from, tile);
#pragma unroll
    for (int j = 0; j < kTokens / 16; ++j) from[j] = next[j];
  }
  if (part.tiles <= kFirst) request_queries();
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// sums += latents of 16 * STEPS tokens, by their probabilities.
template <class T, int STEPS, int SUMS> __device__ __forceinline__ void add_latents(float (&sums)[4][SUMS], uint32_t latents, uint32_t probabilities) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int m = 0; m < 4; ++m) wgmma_shared<T, true>(sums[m], tokens_after(tokens_at(latents), m * kPanelBytes + k * 2048), tokens_after(tokens_at(probabilities), k * 32));
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < 4; ++m) wgmma_done(sums[m]);
}

// A tile's scores become probabilities; what a lane of the first warpgroup knows of its heads 8i + 2q + e.
template <class T, int HEADS> struct TileSoftmax {
  static constexpr int groups = HEADS / 8;
  float largest[groups][2], total[groups][2];  // the largest score, the same in the whole warpgroup, and the sum of its own tokens'

  __device__ __forceinline__ TileSoftmax() {
#pragma unroll
    for (int i = 0; i < groups; ++i) largest[i][0] = largest[i][1] = -INFINITY, total[i][0] = total[i][1] = 0;
  }

  // here: tokens of the tile that count. tops [4][HEADS] and shrink [HEADS] are of this turn alone.
  __device__ __forceinline__ void step(float (&score)[HEADS / 2], int here, float scale, float* tops, float* shrink, uint32_t probabilities, int warp, int lane) {
    const int g = lane >> 2, quad = lane & 3;
    const bool low = warp * 16 + g < here, high = warp * 16 + 8 + g < here;
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      float top[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &first = score[4 * i + e], &second = score[4 * i + 2 + e];
        first = low ? first * scale : -INFINITY, second = high ? second * scale : -INFINITY;
        top[e] = fmaxf(first, second);
        for (int o = 4; o < 32; o *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(0xffffffffu, top[e], o));
      }
      if (g == 0) *reinterpret_cast<float2*>(tops + warp * HEADS + i * 8 + 2 * quad) = make_float2(top[0], top[1]);
    }
    meet<1, 128>();
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      float2 v = make_float2(largest[i][0], largest[i][1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 more = *reinterpret_cast<const float2*>(tops + w * HEADS + i * 8 + 2 * quad);
        v.x = fmaxf(v.x, more.x), v.y = fmaxf(v.y, more.y);
      }
      const float2 less = make_float2(power_of_2(largest[i][0] - v.x), power_of_2(largest[i][1] - v.y));
      if (warp == 0 && g == 0) *reinterpret_cast<float2*>(shrink + i * 8 + 2 * quad) = less;
      largest[i][0] = v.x, largest[i][1] = v.y;
      total[i][0] *= less.x, total[i][1] *= less.y;
    }
    // A head's 64 tokens are 128 bytes, as those of a query's panel.
    uint32_t pairs[2][groups];
#pragma unroll
    for (int i = 0; i < groups; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float first = power_of_2(score[4 * i + 2 * h] - largest[i][0]), second = power_of_2(score[4 * i + 2 * h + 1] - largest[i][1]);
        total[i][0] += first, total[i][1] += second;
        pairs[h][i] = pair_of<T>(first, second);
      }
    if constexpr (HEADS == 32) {
#pragma unroll
      for (int h = 0; h < 2; ++h) store_matrices_transposed(probabilities + lane * 128 + ((warp * 2 + h ^ lane % 8) << 4), pairs[h]);
    } else {
      const uint32_t both[4] = {pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]};
      store_matrices_transposed(probabilities + lane % 16 * 128 + ((warp * 2 + lane / 16 ^ lane % 8) << 4), both);
    }
  }

  // found: of each head the largest score and the sum of all probabilities. shares: one over that sum. tops: of no turn.
  __device__ __forceinline__ void finish(float2* found, int stride, int heads, float* tops, float* shares, int warp, int lane) {
    const int g = lane >> 2, quad = lane & 3;
#pragma unroll
    for (int i = 0; i < groups; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        for (int o = 4; o < 32; o *= 2) total[i][e] += __shfl_xor_sync(0xffffffffu, total[i][e], o);
      if (g == 0) {
        *reinterpret_cast<float2*>(tops + warp * HEADS + i * 8 + 2 * quad) = make_float2(total[i][0], total[i][1]);
        if (warp == 0) *reinterpret_cast<float2*>(shares + i * 8 + 2 * quad) = make_float2(largest[i][0], largest[i][1]);
      }
    }
    meet<1, 128>();
    const int head = threadIdx.x;
    if (head >= HEADS) return;
    const float all = tops[head] + tops[HEADS + head] + tops[2 * HEADS + head] + tops[3 * HEADS + head];
    if (head < heads) found[head * stride] = make_float2(shares[head], all);
    shares[head] = __fdividef(1.f, all);
  }
};

// A head's mean of latents, of a half of which this warpgroup has the sums, to memory: through room that tiles had, so that a warp stores 512
// bytes of a head at once.
template <class T, int HEADS> __device__ __forceinline__ void store_means(T* to, int stride, int last_head, const float (&sums)[4][HEADS / 2], const float* shares, uint32_t room, int half, int warp, int lane) {
  constexpr int pitch = Room<HEADS>::pitch, groups = HEADS / 8;
  const int quad = lane & 3;
  room += half * kLatent;
  float2 share[groups];
#pragma unroll
  for (int i = 0; i < groups; ++i) share[i] = *reinterpret_cast<const float2*>(shares + i * 8 + 2 * quad);
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int two = 0; two < groups; two += 2) {
      uint32_t matrices[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = two + n / 2, h = n % 2;
        matrices[n] = pair_of<T>(sums[m][4 * i + 2 * h] * share[i].x, sums[m][4 * i + 2 * h + 1] * share[i].y);
      }
      store_matrices_transposed(room + (two * 8 + lane / 16 * 8 + lane % 8) * pitch + (m * 64 + warp * 16 + lane / 8 % 2 * 8) * 2, matrices);
    }
  if (half == 0) meet<3, 128>();
  else meet<4, 128>();
  uint4 means[HEADS / 4];
#pragma unroll
  for (int i = 0; i < HEADS / 4; ++i) means[i] = read16(room + (i * 4 + warp) * pitch + lane * 16);
  // Heads past the last have its queries, and its means.
#pragma unroll
  for (int i = 0; i < HEADS / 4; ++i) __stcg(reinterpret_cast<uint4*>(to + half * (kLatent / 2) + lane * 8 + (size_t)min(i * 4 + warp, last_head) * stride), means[i]);
}

// A block per HEADS heads, part of a row's tokens, and row.
template <class T, int HEADS> __global__ void __maxnreg__(kRegisters) attend(const T* q, const T* cache, const Attend p) {
  using R = Room<HEADS>;
  constexpr int groups = HEADS / 8;
  extern __shared__ __align__(1024) char memory[];
  float *shrink = reinterpret_cast<float*>(memory + R::shrink), *tops = reinterpret_cast<float*>(memory + R::tops), *shares = reinterpret_cast<float*>(memory + R::shares);
  const uint32_t at = shared_address(memory), filled = at + R::barriers, emptied = filled + 16, ready = filled + 32, queried = filled + 48;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, job = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), quad = lane & 3;
  const int head0 = blockIdx.x * HEADS, split = blockIdx.y, row = blockIdx.z;
  const Part part(p, row, split);
  if (part.tiles == 0) {
    wait_for_predecessor();
    let_successor_start();
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) init_barrier(filled + i * 8, kCopy), init_barrier(emptied + i * 8, 8), init_barrier(ready + i * 8, 4);
    init_barrier(queried, kCopy);
  }
  __syncthreads();
  if (job == 3) return fill_ring<T, HEADS>(q, cache, p, part, row, head0, at, filled, emptied, queried);

  const size_t place = ((size_t)row * p.heads + head0) * p.splits + split;
  if (job == 0) {
    TileSoftmax<T, HEADS> softmax;
    const uint64_t queries = tokens_at(at + R::queries);
    wait_for(queried, 0);
    for (int turn = 0; turn < part.tiles; ++turn) {
      const uint32_t slot = __shfl_sync(0xffffffffu, turn % kSlots, 0), tile = at + slot * kTileBytes;
      wait_for(filled + slot * 8, turn / kSlots & 1);  // and so the sums of the turn before last are done
      show_to_copies();
      float score[HEADS / 2] = {};
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kEntry / 16; ++k)
        wgmma_shared<T, false>(score, tokens_after(tokens_at(tile), k / 4 * kPanelBytes + k % 4 * 32), tokens_after(queries, k / 4 * R::query_panel + k % 4 * 32));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_done(score);
      softmax.step(score, part.end - part.first - turn * kTokens, p.scale, tops + slot * 4 * HEADS, shrink + slot * HEADS, at + R::probabilities + slot * R::query_panel, warp, lane);
      show_to_copies();
      __syncwarp();
      if (lane == 0) arrive(ready + slot * 8);
    }
    softmax.finish(p.found + place, p.splits, p.heads - head0, tops + part.tiles % 2 * 4 * HEADS, shares, warp, lane);
    meet<2, kMath>();
    return;
  }

  float sums[4][HEADS / 2] = {};  // of 64 latents each
  const int half = job - 1;
  for (int turn = 0; turn < part.tiles; ++turn) {
    const uint32_t slot = __shfl_sync(0xffffffffu, turn % kSlots, 0), probabilities = at + R::probabilities + slot * R::query_panel;
    const uint32_t latents = at + slot * kTileBytes + half * 4 * kPanelBytes;
    const int here = part.end - part.first - turn * kTokens;
    wait_for(ready + slot * 8, turn / kSlots & 1);
    wait_for(filled + slot * 8, turn / kSlots & 1);
    show_to_copies();
    float2 less[groups];
    bool same = true;
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      less[i] = *reinterpret_cast<const float2*>(shrink + slot * HEADS + i * 8 + 2 * quad);
      same = same && less[i].x == 1.f && less[i].y == 1.f;
    }
    if (!__all_sync(0xffffffffu, same)) {
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int i = 0; i < groups; ++i) sums[m][4 * i] *= less[i].x, sums[m][4 * i + 1] *= less[i].y, sums[m][4 * i + 2] *= less[i].x, sums[m][4 * i + 3] *= less[i].y;
    }
    // Two paths, each without a branch: after a branch no product would begin before the product before it has ended.
    if (here >= kTokens) add_latents<T, kTokens / 16>(sums, latents, probabilities);
    else
#pragma unroll 1
      for (int k = 0; k * 16 < here; ++k) add_latents<T, 1>(sums, latents + k * 2048, probabilities + k * 32);
    if (lane == 0) arrive(emptied + slot * 8);
  }
  meet<2, kMath>();
  store_means<T, HEADS>(reinterpret_cast<T*>(p.weighted) + place * kLatent, p.splits * kLatent, p.heads - 1 - head0, sums, shares, at, half, warp, lane);
}

template <class T, int HEADS> int launch_attend_of(const void* q, const void* cache, const Attend& p, int rows, void* s) {
  static SharedMemory shared;
  if (const int fault = shared.allow(attend<T, HEADS>, Room<HEADS>::bytes)) return fault;
  return start(attend<T, HEADS>, dim3((p.heads + HEADS - 1) / HEADS, p.splits, rows), kMath + kCopy, Room<HEADS>::bytes, s, (const T*)q, (const T*)cache, p);
}

template <class T> int launch_attend(const void* q, const void* cache, const Attend& p, int rows, void* s) {
  return p.heads > 16 ? launch_attend_of<T, 32>(q, cache, p, rows, s) : launch_attend_of<T, 16>(q, cache, p, rows, s);
}

}  // namespace
