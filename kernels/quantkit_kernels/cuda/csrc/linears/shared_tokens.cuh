// What a block of tokens_in_shared.cu has in shared memory, and how its warps read it: weights in a ring of each warp, tokens in one for all.

#pragma once

#include <stdint.h>

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
  static constexpr int steps = 3;                           // of a warp's weights in flight: with more of them x arrives later
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

// Sums of x over the groups of a chunk, which lie after it: by products with ones, whose rows are all the same. Those of a whole chunk are
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

}  // namespace
