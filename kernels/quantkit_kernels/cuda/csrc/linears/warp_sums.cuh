// The tokens and scales that a warp of the kernels for few tokens multiplies its weights with, and the sums it keeps.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/mma.cuh"
#include "common/packed.cuh"
#include "linears/gemm_params.cuh"
#include "linears/warp_weights.cuh"

namespace {

// Loads under a predicate, which leave the registers as they are where nothing is wanted.
template <int WORDS> __device__ __forceinline__ void load_words(uint32_t* to, const uint8_t* p, bool wanted) {
  static_assert(WORDS == 4 || WORDS == 2 || WORDS == 1);
  if constexpr (WORDS == 4) {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "l"(p), "r"((int)wanted));
  } else if constexpr (WORDS == 2) {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted ld.global.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(to[0]), "+r"(to[1]) : "l"(p), "r"((int)wanted));
  } else {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted ld.global.u32 %0, [%1];}" : "+r"(to[0]) : "l"(p), "r"((int)wanted));
  }
}
__device__ __forceinline__ void load_tokens(uint4& v, const char* p, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)wanted) : "memory");
}

__device__ __forceinline__ void read8(float* to, uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(at) : "memory");
}

__device__ __forceinline__ void mma_s8(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// What a lane holds of the two halves of its warp's chunk besides the weights, and where that comes from.
template <int FMT, int G, int RT, int MT> struct Operands {
  using S = Shape<FMT, G, RT, MT, false>;
  uint4 x[2][S::tokens];
  uint32_t f[2][S::factors];
  const uint8_t *scales, *zeros;
  const char* token[MT];
  int wk;  // warps along K: a warp's chunks are this far apart

  template <class P> __device__ __forceinline__ void point(const P& p, int expert, int row, int chunk, int warps_along_k) {
    const int lane = threadIdx.x & 31, g = lane >> 2, tile = (row % 64) / 16;
    const size_t at = ((size_t)expert * (p.n / 64) + row / 64) * (p.k / 128) + chunk;
    wk = warps_along_k;
    if constexpr (FMT == kFp4) scales = p.scales + at * 512 + ((lane >> 1) & 1) * 128 + g * 16 + tile * 4;
    if constexpr (FMT == kInt4) {
      scales = p.scales + at * (128 / G) * 128 + g * 16 + tile * 4;
      zeros = p.zeros ? p.zeros + at * (128 / G) * 32 + g * 4 : nullptr;
    }
  }

  // Without stored zero points the middle of the grid stays.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S::factors; ++i) f[half][i] = 0x88888888u;
#pragma unroll
      for (int i = 0; i < S::tokens; ++i) x[half][i] = {};
    }
  }

  // Of half 0 or 1 of the current chunk.
  __device__ __forceinline__ void request_factors(int half, bool wanted) {
    if constexpr (FMT == kInt4 && G == 128) {
      // The group's scales come with its first half, its zero points with its second.
      if (half == 0) load_words<RT>(f[0], scales, wanted);
      else load_words<1>(f[1], zeros, wanted && zeros);
    } else if constexpr (FMT != kInt8) {
      constexpr int groups = G == 32 ? 2 : 1, bytes = FMT == kFp4 ? 256 : 128;
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        load_words<RT>(f[half] + i * RT, scales + (half * groups + i) * bytes, wanted);
        if constexpr (FMT == kInt4) load_words<1>(f[half] + groups * RT + i, zeros + (half * groups + i) * 32, wanted && zeros);
      }
    }
  }
  // Of the current chunk, or of the warp's next.
  __device__ __forceinline__ void request_tokens(int half, int chunks_ahead, bool wanted) {
    const int64_t at = (int64_t)chunks_ahead * wk * (FMT == kInt8 ? 128 : 256) + half * (FMT == kInt8 ? 64 : 128);
#pragma unroll
    for (int i = 0; i < S::tokens; ++i) {
      if constexpr (FMT == kInt8) load_tokens(x[half][i], token[i] + at, wanted);
      else load_tokens(x[half][i], token[i / 2] + at + (i % 2) * 64, wanted);
    }
  }
  // To the warp's next chunk.
  __device__ __forceinline__ void advance() {
    if constexpr (FMT == kFp4) scales += wk * 512;
    if constexpr (FMT == kInt4) {
      scales += wk * (128 / G) * 128;
      if (zeros) zeros += wk * (128 / G) * 32;
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) token[mt] += (int64_t)wk * (FMT == kInt8 ? 128 : 256);
  }
};

// Sums of a warp: of whole products, and for INT4 of the current group. GIVEN: those of x over a group are computed elsewhere.
template <int FMT, class T, int G, int RT, int MT, bool GIVEN = false> struct Sums {
  using S = Shape<FMT, G, RT, MT, false>;
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  static constexpr int parts = FMT == kInt4 ? RT : 1;
  Acc acc[RT][MT][4];
  float part[parts][MT][4], sum[MT][4];
  uint32_t given;  // where the chunk's sums of x are in shared memory, [groups][tokens] from the lane's first token on

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < RT; ++i)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][mt][c] = 0;
    clear_group();
  }
  __device__ __forceinline__ void clear_group() {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[mt][c] = 0.f;
#pragma unroll
        for (int i = 0; i < parts; ++i) part[i][mt][c] = 0.f;
      }
  }
  // acc += scale * (part - zero * sum), for `zeros` of the warp's first tile onwards. group: of the chunk.
  __device__ __forceinline__ void end_group(const uint32_t* scale, uint32_t zeros, int group) {
    if constexpr (GIVEN) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        read8(sum[mt], given + (group * MT + mt) * 32);
        sum[mt][2] = sum[mt][0], sum[mt][3] = sum[mt][1];
      }
    }
#pragma unroll
    for (int nt = 0; nt < RT; ++nt) {
      const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&scale[nt]));
      const float lo = zero_of<T>(zeros, 2 * nt), hi = zero_of<T>(zeros, 2 * nt + 1);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[nt][mt][c] += (c < 2 ? s.x : s.y) * (part[nt][mt][c] - (c < 2 ? lo : hi) * sum[mt][c]);
    }
    if (!GIVEN) clear_group();
  }

  // A[j] of words 2i + j of a tile's share, which span 32 along K.
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], const uint4& words, int i, uint32_t four) {
    if constexpr (FMT == kFp4) {
      const uint32_t lo = fp4_scale(four, i), hi = fp4_scale(four, 2 + i);
      decode_fp4(word_of(words, 2 * i), word_of(words, 2 * i + 1), a[0], a[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) a[j][k] = multiply2<T>(a[j][k], k % 2 ? hi : lo);
    } else {
      decode_int4<T>(word_of(words, 2 * i), a[0]);
      decode_int4<T>(word_of(words, 2 * i + 1), a[1]);
    }
  }

  // Two tiles at a time over 32 along K, so that products do not wait for one another; with the first two tiles the sums of x.
  __device__ __forceinline__ void two_tiles(const Operands<FMT, G, RT, MT>& s, const uint4 (&w)[2], int half, int nt, int i) {
    const uint4(&x)[S::tokens] = s.x[half];
    const uint32_t ones[4] = {Magic<T>::ones, Magic<T>::ones, Magic<T>::ones, Magic<T>::ones};
    uint32_t a[2][2][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) decode(a[t], w[t], i, FMT == kFp4 ? s.f[half][nt + t] : 0);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const uint32_t b0 = word_of(x[2 * mt + i], 2 * j), b1 = word_of(x[2 * mt + i], 2 * j + 1);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if constexpr (FMT == kFp4) mma<T>(acc[nt + t][mt], a[t][j], b0, b1);
          else if (GIVEN && j == 0 && (i == 0 || G == 32) && (half == 0 || G < 128)) mma_first<T>(part[nt + t][mt], a[t][j], b0, b1);
          else mma<T>(part[nt + t][mt], a[t][j], b0, b1);
        }
        if (FMT == kInt4 && !GIVEN && nt == 0) mma<T>(sum[mt], ones, b0, b1);
      }
  }

  // One step of 64 out of slot `at`; `left` steps of the warp are not done yet.
  template <class Weights> __device__ __forceinline__ void step(const Operands<FMT, G, RT, MT>& s, Weights& weights, int at, int half, int left, int tile) {
    const int shift = RT == 4 ? 0 : 8 * tile;
    uint4 w[RT * S::pieces];
    weights.take(w, at);
    if constexpr (FMT == kInt8) {
#pragma unroll
      for (int nt = 0; nt < RT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            const uint32_t b0 = word_of(s.x[half][mt], 2 * j), b1 = word_of(s.x[half][mt], 2 * j + 1);
            const uint4 &lower = w[nt * 2], &upper = w[nt * 2 + 1];  // of its 16 rows
            mma_s8(acc[nt][mt], {word_of(lower, 2 * j), word_of(upper, 2 * j), word_of(lower, 2 * j + 1), word_of(upper, 2 * j + 1)}, b0, b1);
          }
        weights.used(at, nt, left);
      }
    } else {
      constexpr int turns = FMT == kInt4 && G == 32 ? 2 : 1;  // of the tiles: each group of 32 by itself, or all of the step
#pragma unroll
      for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int nt = 0; nt < RT; nt += 2) {
          const uint4 two[2] = {w[nt], w[nt + 1]};
#pragma unroll
          for (int i = turn; i < turn + 3 - turns; ++i) two_tiles(s, two, half, nt, i);
          if (turn == turns - 1) weights.used(at, nt, left), weights.used(at, nt + 1, left);
        }
        if constexpr (FMT == kInt4 && G == 32) end_group(s.f[half] + turn * RT, s.f[half][2 * RT + turn] >> shift, half * 2 + turn);
      }
      if constexpr (FMT == kInt4 && G == 128) {
        if (half == 1) end_group(s.f[0], s.f[1][0] >> shift, 0);
      }
      if constexpr (FMT == kInt4 && G == 64) end_group(s.f[half], s.f[half][RT] >> shift, half);
    }
  }
};

}  // namespace
