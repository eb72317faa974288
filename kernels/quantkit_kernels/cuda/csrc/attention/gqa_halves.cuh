// A cache of 16 bits.
#pragma once

#include "attention/gqa_tokens.cuh"

namespace {

template <class Type, int WIDTH> struct Halves {
  using T = Type;
  static constexpr int D = WIDTH, row = 2 * D + 16, slot = 2 * kWarpTokens * row;  // bytes: eight rows of a matrix lie in different banks

  struct Scale {
    static constexpr bool scales_values = false;
    float of_all;
    __device__ float of_key(int, int) const { return of_all; }
    __device__ float log_of_value(int, int) const { return 0; }
  };

  // place: as `look_up` finds it.
  static __device__ __forceinline__ void request(const GqaDecode& p, uint32_t to, int place) {
    constexpr int chunks = D / 8;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kWarpTokens * chunks / 32; ++i) {
      const int chunk = i * 32 + lane, token = chunk / chunks, at = chunk % chunks;
      const bool there = at * 8 < p.d;
      const size_t from = (size_t)__shfl_sync(0xffffffffu, place, token) * p.d + (there ? at * 8 : 0);
      copy16_or_zeros(to + token * row + at * 16, (const T*)p.keys + from, there);
      copy16_or_zeros(to + (kWarpTokens + token) * row + at * 16, (const T*)p.values + from, there);
    }
  }

  template <int HALVES> static __device__ __forceinline__ void load_queries(uint32_t (&queries)[D / 16][4], const GqaDecode& p, const Unit& unit) {
    const int lane = threadIdx.x & 31, g = lane >> 2, part = lane & 3;
    const T* from = (const T*)p.q + ((size_t)unit.row * p.kv_heads * p.shared + unit.kv_head * p.shared + unit.head0) * p.d;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = g + (i & 1) * 8, column = k * 16 + (i >> 1) * 8 + 2 * part;
        queries[k][i] = (HALVES == 2 || i % 2 == 0) && head < unit.heads && column < p.d ? *reinterpret_cast<const uint32_t*>(from + head * p.d + column) : 0;
      }
  }

  // Keys and values of 16 tokens at `slot`: rows of D, keys before values. `left` of them count.
  template <int HALVES> static __device__ __forceinline__ void attend(Sums<D>& sums, const uint32_t (&queries)[D / 16][4], uint32_t slot, int left, float scale) {
    const int lane = threadIdx.x & 31, matrix = lane >> 3, matrix_row = lane & 7;
    float score[2][4] = {};
    const uint32_t keys = slot + ((matrix >> 1) * 8 + matrix_row) * row + (matrix & 1) * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t b[4];
      load_matrices(b, keys + k * 32);
      mma<T>(score[0], queries[k], b[0], b[1]), mma<T>(score[1], queries[k], b[2], b[3]);
    }
    uint32_t probabilities[4] = {};
    exponentiate<T, D, HALVES>(probabilities, sums, score, left, Scale{scale});
    const uint32_t values = slot + (kWarpTokens + (matrix & 1) * 8 + matrix_row) * row + (matrix >> 1) * 16;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values + n * 32);
      mma<T>(sums.of[2 * n], probabilities, b[0], b[1]), mma<T>(sums.of[2 * n + 1], probabilities, b[2], b[3]);
    }
  }

  // A lane's sums of half h of the heads, times share, to a head's row `to`; added to what is there where `more`.
  static __device__ __forceinline__ void add_sums(float* to, const Sums<D>& sums, int h, float share, bool more, int part) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float2* at = reinterpret_cast<float2*>(to + n * 8 + 2 * part);
      const float2 before = more ? *at : make_float2(0.f, 0.f);
      *at = make_float2(before.x + share * sums.of[n][2 * h], before.y + share * sums.of[n][2 * h + 1]);
    }
  }
};

}  // namespace
