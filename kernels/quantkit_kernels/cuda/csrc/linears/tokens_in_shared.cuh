// What the kernels with tokens in shared memory are made of: tokens_in_shared.cu, and one_token.cu of routed experts.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "linears/gemm_params.cuh"
#include "linears/warp_sums.cuh"
#include "linears/warp_weights.cuh"

namespace {

constexpr int kMathWarps = 18;  // warps that multiply: as many rows of `wn` warps as there are warps for
constexpr int kCopyWarps = 2;   // warps that bring x, a chunk each in turn

template <int FMT, int G, int MT> struct Layout {
  using S = Shape<FMT, G, 2, MT, true>;
  static constexpr int threads = 32 * (kMathWarps + kCopyWarps), tokens = 8 * MT;
  static constexpr int row = 256;         // bytes of a token's chunk
  static constexpr int pitch = row + 64;  // in shared memory: no two lanes that read at once meet in a bank
  static constexpr int groups = FMT == kInt4 ? 128 / G : 0;
  static constexpr int sums = groups * tokens * 4, place = tokens * pitch + sums;  // bytes of a chunk
  static constexpr int places = kMathWarps, ahead = places / 4;  // chunks in the ring, those of a helper on their way
  static constexpr int steps = 3;                           // of a warp's weights on their way: behind more of them x comes later
  static constexpr int weights = kMathWarps * steps * S::step_bytes;
  static constexpr int barriers_at = weights + places * place, factors_at = barriers_at + places * 16;
  static constexpr int bytes = factors_at + kMathWarps * 32 * 4;
  static_assert(bytes <= 226 << 10 && kMathWarps * tokens * (32 + 4) * 4 <= barriers_at);
};

// A warp's weights, asked for `steps` steps ahead.
template <int FMT, int G, int MT> struct Copied {
  using D = Layout<FMT, G, MT>;
  using S = typename D::S;
  uint32_t data, slot = 0;
  const char* next;  // the step to be requested next
  int64_t stride;    // from the second half of a chunk to the first of the warp's next

  __device__ __forceinline__ void start(const GemmParams& p, uint32_t ring, size_t chunk, int tile, int wk, int left) {
    const int lane = threadIdx.x & 31;
    data = ring + lane * 16;
    next = reinterpret_cast<const char*>(p.words) + chunk * 4096 + tile * 512 + lane * 16;
    stride = (int64_t)wk * 4096 - 2048;
#pragma unroll
    for (int i = 0; i < D::steps; ++i) request(i, i % 2, i < left);
  }
  __device__ __forceinline__ void request(uint32_t place, int half, bool wanted) {
    if (wanted) {
#pragma unroll
      for (int i = 0; i < 2; ++i) copy16(data + place * S::step_bytes + i * 512, next + i * 512);
    }
    end_copies();
    next += half == 0 ? 2048 : stride;
  }
  __device__ __forceinline__ void take(uint4 (&w)[2], int) {
    wait_for_copies<D::steps - 1>();
#pragma unroll
    for (int i = 0; i < 2; ++i) w[i] = read16(data + slot * S::step_bytes + i * 512);
  }
  __device__ __forceinline__ void used(int, int, int) {}
  __device__ __forceinline__ void finish(int half, int left) {
    request(slot, (half + D::steps) % 2, left > D::steps);
    if (++slot == D::steps) slot = 0;
  }
};

// What a lane multiplies with over half a chunk, out of the chunk at `chunk` in shared memory.
template <int FMT, int G, int MT> __device__ __forceinline__ void read_tokens(uint4 (&x)[Layout<FMT, G, MT>::S::tokens], uint32_t chunk, int half) {
  using D = Layout<FMT, G, MT>;
  const int lane = threadIdx.x & 31;
  chunk += (lane >> 2) * D::pitch + (lane & 3) * 16 + half * (D::row / 2);
#pragma unroll
  for (int i = 0; i < D::S::tokens; ++i) x[i] = read16(chunk + i / 2 * 8 * D::pitch + i % 2 * 64);
}

template <int G, int MT> __device__ __forceinline__ void write_sums(uint32_t chunk, int group, int mt, float first, float second) {
  using D = Layout<kInt4, G, MT>;
  const int lane = threadIdx.x & 31;
  const uint32_t at = chunk + D::tokens * D::pitch + group * (D::tokens * 4) + mt * 32 + lane * 8;
  if (lane < 4) asm volatile("st.shared.v2.f32 [%0], {%1,%2};" :: "r"(at), "f"(first), "f"(second) : "memory");
}

// Sums of x over the groups of a chunk, which lie behind it: by products with ones, whose rows are all the same. Those of a whole chunk are
// two that do not wait for each other.
template <class T, int G, int MT> __device__ __forceinline__ void add_up_tokens(uint32_t chunk) {
  using D = Layout<kInt4, G, MT>;
  const uint32_t ones[4] = {Magic<T>::ones, Magic<T>::ones, Magic<T>::ones, Magic<T>::ones};
  float sum[2][MT][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 x[2 * MT];
    read_tokens<kInt4, G, MT>(x, chunk, half);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        float(&s)[4] = sum[half][mt];
        if (i == 0 || G == 32) mma_first<T>(s, ones, x[2 * mt + i].x, x[2 * mt + i].y);
        else mma<T>(s, ones, x[2 * mt + i].x, x[2 * mt + i].y);
        mma<T>(s, ones, x[2 * mt + i].z, x[2 * mt + i].w);
        if (G == 32 || (G == 64 && i == 1)) write_sums<G, MT>(chunk, half * (64 / G) + (G == 32 ? i : 0), mt, s[0], s[1]);
      }
  }
  if constexpr (G == 128) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) write_sums<G, MT>(chunk, 0, mt, sum[0][mt][0] + sum[1][mt][0], sum[0][mt][1] + sum[1][mt][1]);
  }
}

// A warp that brings x: every `kCopyWarps`th chunk of the block's, which begin at `x`, when its place is free, and tells when it is there.
// meanwhile: done when the first chunks were asked for.
template <int FMT, class T, int G, int MT, class Meanwhile>
__device__ __forceinline__ void bring_tokens(const GemmParams& p, const char* x, int helper, int chunks, uint32_t ring, uint32_t filled, uint32_t emptied, const Meanwhile& meanwhile) {
  using D = Layout<FMT, G, MT>;
  constexpr int pieces = D::row / 16, at_once = 32 / pieces;  // copies of a token's chunk, and so many tokens in one instruction
  const int lane = threadIdx.x & 31, token = lane / pieces, column = lane % pieces * 16;
  const size_t row_bytes = (size_t)p.k * 2;
  const char* from = x + token * row_bytes + helper * D::row + column;
  int place = helper, phase = 1, there = helper, c = helper;
  const auto request = [&] {
    if (c < chunks) {
      if (c >= D::places) wait_for(emptied + place * 8, phase);
#pragma unroll
      for (int i = 0; i < D::tokens; i += at_once)
        if (token + i < p.m) copy16(ring + place * D::place + (token + i) * D::pitch + column, from + i * row_bytes);
      from += kCopyWarps * D::row;
      if ((place += kCopyWarps) >= D::places) place -= D::places, phase ^= 1;
    }
    end_copies();
    c += kCopyWarps;
  };
#pragma unroll
  for (int i = 0; i < D::ahead; ++i) request();
  meanwhile();
  while (c < chunks + D::ahead * kCopyWarps) {
    request();
    wait_for_copies<D::ahead>();
    __syncwarp();
    if constexpr (FMT == kInt4) {
      add_up_tokens<T, G, MT>(ring + there * D::place);
      __syncwarp();
    }
    if (lane == 0) arrive(filled + there * 8);
    if ((there += kCopyWarps) >= D::places) there -= D::places;
  }
}

// A block's part of a product, rows and chunks of K, and which of them are a warp's.
struct Part {
  int rows, wk, warp_n, warp_k, part, first, present, begin, chunks;  // present: warps side by side that have rows

  __device__ __forceinline__ explicit Part(const GemmParams& p) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), all = p.k / 128;
    rows = p.wn * 32, wk = kMathWarps / p.wn, warp_n = warp % p.wn, warp_k = warp / p.wn;
    part = blockIdx.x % p.split, first = blockIdx.x / p.split * rows, present = min(p.wn, (p.n - first) / 32);
    begin = all * part / p.split, chunks = all * (part + 1) / p.split - begin;
  }
};

// What a warp that multiplies holds.
template <int FMT, class T, int G, int MT> struct Multiplier {
  using D = Layout<FMT, G, MT>;
  Copied<FMT, G, MT> weights;
  Operands<FMT, G, 2, MT> stream;
  Sums<FMT, T, G, 2, MT, true> sums;
  int own, tile;

  // The first weights, and their factors. shared: where the rings of all warps begin.
  __device__ __forceinline__ void ask(const GemmParams& p, const Part& part, int expert, uint32_t shared) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), row = part.first + part.warp_n * 32;
    tile = row % 64 / 16;
    own = part.warp_n < part.present && part.warp_k < part.wk ? (part.chunks - part.warp_k + part.wk - 1) / part.wk : 0;
    const size_t strip = (size_t)expert * (p.n / 64) + row / 64;
    weights.start(p, shared + warp * D::steps * D::S::step_bytes, strip * (p.k / 128) + part.begin + part.warp_k, tile, part.wk, 2 * own);
    stream.clear();
    stream.point(p, expert, row, part.begin + part.warp_k, part.wk);
    stream.request_factors(0, own > 0), stream.request_factors(1, own > 0);
  }
  __device__ __forceinline__ void multiply(const Part& part, uint32_t ring, uint32_t filled, uint32_t emptied) {
    const int lane = threadIdx.x & 31;
    sums.clear();
    int place = part.warp_k, phase = 0;
    for (int left = 2 * own; left > 0; left -= 2) {
      wait_for(filled + place * 8, phase);
      const uint32_t chunk = ring + place * D::place;
      sums.given = chunk + D::tokens * D::pitch + (lane & 3) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read_tokens<FMT, G, MT>(stream.x[half], chunk, half);
        sums.step(stream, weights, half, half, left - half, tile);
        weights.finish(half, left - half);
      }
      __syncwarp();
      if (lane == 0) arrive(emptied + place * 8);
      place += part.wk;
      if (place >= D::places) place -= D::places, phase ^= 1;
      stream.advance();
      stream.request_factors(0, left > 2), stream.request_factors(1, left > 2);
    }
  }
  // The sums to red [warp along K][token][rows + 4].
  __device__ __forceinline__ void store(const Part& part, float* red) const {
    const int lane = threadIdx.x & 31, pitch = part.rows + 4;
    if (part.warp_k >= part.wk) return;
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          red[(part.warp_k * D::tokens + mt * 8 + (lane & 3) * 2 + c % 2) * pitch + part.warp_n * 32 + nt * 16 + c / 2 * 8 + (lane >> 2)] = sums.acc[nt][mt][c];
  }
};

// Results of a block, which are its share of those of its cluster: the sums of all warps along K of all its blocks, from block `block` on. They
// are stored as those of `pair`.
template <class D, class T> __device__ __forceinline__ void finish(const GemmParams& p, const Part& part, const float* red, const float* factors, int block, int pair) {
  const int pitch = part.rows + 4;
  // Four results of a token from `row` of the block on.
  const auto add_up = [&](float (&y)[4], int row, int t) {
    constexpr int at_once = 6;
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = 0;
    int from = block, w = 0;
    for (int left = p.split * part.wk; left > 0; left -= at_once) {
      float share[at_once][4];
#pragma unroll
      for (int s = 0; s < at_once; ++s) {
        if (s < left) read_from(share[s], shared_address(red + (w * D::tokens + t) * pitch + row), from);
        if (++w == part.wk) w = 0, ++from;
      }
#pragma unroll
      for (int s = 0; s < at_once; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (s < left) y[e] += share[s][e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] *= factors[row + e];
  };
  const bool silu = p.epilogue == kSiluMul;
  const int produced = silu ? part.rows / 2 : part.rows, fours = produced / 4 * p.m, to = fours * (part.part + 1) / p.split;
  for (int i = fours * part.part / p.split + threadIdx.x; i < to; i += D::threads) {
    const int r = i % (produced / 4) * 4, t = i / (produced / 4), feature = (silu ? part.first / 2 : part.first) + r;
    if (feature >= p.out_n) continue;
    float y[4];
    add_up(y, silu ? r / 8 * 16 + r % 8 : r, t);
    if (silu) {  // rows come as 8 of gate, 8 of up
      float up[4];
      add_up(up, r / 8 * 16 + r % 8 + 8, t);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = gated(y[e], up[e]);
    }
    if (p.epilogue == kWeigh) {
      const float weight = p.pair_weights[pair];
      float* out = reinterpret_cast<float*>(p.out) + (size_t)pair * p.out_n + feature;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (feature + e < p.out_n) out[e] = y[e] * weight;
      continue;
    }
    T rounded[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded[e] = T(y[e]);
    store_run<T, 4>(p, pair + t, feature, rounded);
  }
}

}  // namespace
