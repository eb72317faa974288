// A cache of 8 bits, with a scale for each token and head of keys and of values.
//
// Codes become fp16 operands in registers, with queries and probabilities of fp16. A word that ldmatrix brings has four codes along a key, where the query has four columns in a row
// instead of two and two; transposed it has two codes of each of two tokens, of even and of odd columns.
#pragma once

#include "attention/gqa_tokens.cuh"
#include "common/codes.cuh"

namespace {

template <class Type, int WIDTH, class Code> struct Codes {
  using T = Type;
  static constexpr int D = WIDTH, row = D + 16, scales_at = 2 * kWarpTokens * row, slot = scales_at + 2 * kWarpTokens * 4;  // bytes

  struct Scale {
    static constexpr bool scales_values = true;
    float keys[2][2], logs[2][2];
    __device__ float of_key(int n, int e) const { return keys[n][e]; }
    __device__ float log_of_value(int n, int e) const { return logs[n][e]; }
  };

  // As `Halves` has them all.
  static __device__ __forceinline__ void request(const GqaDecode& p, uint32_t to, int place) {
    constexpr int chunks = D / 16;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kWarpTokens * chunks / 32; ++i) {
      const int chunk = i * 32 + lane, token = chunk / chunks, at = chunk % chunks;
      const bool there = at * 16 < p.d;
      const size_t from = (size_t)__shfl_sync(0xffffffffu, place, token) * p.d + (there ? at * 16 : 0);
      copy16_or_zeros(to + token * row + at * 16, (const char*)p.keys + from, there);
      copy16_or_zeros(to + (kWarpTokens + token) * row + at * 16, (const char*)p.values + from, there);
    }
    const int own = __shfl_sync(0xffffffffu, place, lane % kWarpTokens);
    copy4(to + scales_at + lane * 4, (lane < kWarpTokens ? p.key_scales : p.value_scales) + own);
  }

  template <int HALVES> static __device__ __forceinline__ void load_queries(uint32_t (&queries)[D / 16][4], const GqaDecode& p, const Unit& unit) {
    const int lane = threadIdx.x & 31, g = lane >> 2, part = lane & 3;
    const T* from = (const T*)p.q + ((size_t)unit.row * p.kv_heads * p.shared + unit.kv_head * p.shared + unit.head0) * p.d;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = g + h * 8, column = k * 16 + 4 * part;
        const bool there = (HALVES == 2 || h == 0) && head < unit.heads && column < p.d;
        const uint2 four = there ? *reinterpret_cast<const uint2*>(from + head * p.d + column) : make_uint2(0, 0);
        queries[k][h] = two_queries<T>(four.x), queries[k][2 + h] = two_queries<T>(four.y);
      }
  }

  template <int HALVES> static __device__ __forceinline__ void attend(Sums<D>& sums, const uint32_t (&queries)[D / 16][4], uint32_t slot, int left, float scale) {
    const int lane = threadIdx.x & 31, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;
    float score[2][4] = {};
    const uint32_t keys = slot + ((matrix & 1) * 8 + matrix_row) * row + (matrix >> 1) * 16;
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t words[4];
      load_matrices(words, keys + k * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) mma<__half>(score[i % 2], queries[2 * k + i / 2], two_codes<Code, 0, 1>(words[i]), two_codes<Code, 2, 3>(words[i]));
    }
    Scale scales;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t at = slot + scales_at + (n * 8 + 2 * part) * 4;
      const float2 of_keys = read8(at), of_values = read8(at + kWarpTokens * 4);
      scales.keys[n][0] = kQueryStep * scale * of_keys.x, scales.keys[n][1] = kQueryStep * scale * of_keys.y;
      scales.logs[n][0] = __log2f(of_values.x), scales.logs[n][1] = __log2f(of_values.y);
    }
    uint32_t probabilities[4] = {};
    exponentiate<__half, D, HALVES>(probabilities, sums, score, left, scales);
    const uint32_t values = slot + (kWarpTokens + (matrix & 1) * 8 + matrix_row) * row + (matrix >> 1) * 16;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      uint32_t words[4];
      load_matrices_transposed(words, values + n * 32);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t first = words[2 * c], second = words[2 * c + 1];
        mma<__half>(sums.of[4 * n + 2 * c], probabilities, two_codes<Code, 0, 2>(first), two_codes<Code, 0, 2>(second));
        mma<__half>(sums.of[4 * n + 2 * c + 1], probabilities, two_codes<Code, 1, 3>(first), two_codes<Code, 1, 3>(second));
      }
    }
  }

  static __device__ __forceinline__ void add_sums(float* to, const Sums<D>& sums, int h, float share, bool more, int part) {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      float4* at = reinterpret_cast<float4*>(to + c * 16 + 4 * part);
      const float4 before = more ? *at : make_float4(0.f, 0.f, 0.f, 0.f);
      const auto &even = sums.of[2 * c], &odd = sums.of[2 * c + 1];
      *at = make_float4(before.x + share * even[2 * h], before.y + share * odd[2 * h], before.z + share * even[2 * h + 1], before.w + share * odd[2 * h + 1]);
    }
  }
};

}  // namespace
