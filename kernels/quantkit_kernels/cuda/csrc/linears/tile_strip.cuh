// A warpgroup's strip of 64 rows: from the packed words of a stage to operands of wgmma.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/copies.cuh"
#include "common/packed.cuh"
#include "linears/tile.cuh"
#include "common/wgmma.cuh"

namespace {

__device__ __forceinline__ uint32_t read4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// A number as a pair of T.
template <class T> __device__ __forceinline__ uint32_t both(float value) {
  typename Pair<T>::type pair;
  if constexpr (std::is_same_v<T, __half>) pair = __float2half2_rn(value);
  else pair = __float2bfloat162_rn(value);
  return *reinterpret_cast<uint32_t*>(&pair);
}
template <class T> __device__ __forceinline__ uint32_t subtract2(uint32_t a, uint32_t b) {
  using P = typename Pair<T>::type;
  P r = __hsub2(*reinterpret_cast<P*>(&a), *reinterpret_cast<P*>(&b));
  return *reinterpret_cast<uint32_t*>(&r);
}

// The factors of a lane's two rows in one group.
template <class T> struct Group {
  uint32_t scale[2], zero[2];
  __device__ __forceinline__ void set(uint32_t scales, uint32_t zeros) {
    const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&scales));
    scale[0] = both<T>(s.x), scale[1] = both<T>(s.y);
    zero[0] = Magic<T>::value | (zeros & 15) * 0x00080008u, zero[1] = Magic<T>::value | (zeros >> 4 & 15) * 0x00080008u;
  }
};

template <int FMT, class T, int G, int NT, int WGS> struct Strip {
  using S = Tile<FMT, G, NT, WGS>;
  Group<T> group;
  uint4 w;                        // 4 bit: of half a stage
  uint32_t words, scales, zeros;  // where this lane's are in the first stage
  bool has_zeros;

  __device__ __forceinline__ void init(uint32_t ring, int warpgroup, bool with_zeros) {
    const int lane = threadIdx.x & 31, tile = threadIdx.x / 32 % 4, g = lane >> 2, q = lane & 3;
    words = ring + S::words_at + warpgroup * S::words + (FMT == kInt8 ? 0 : tile * 512 + lane * 16);
    scales = ring + S::scales_at + warpgroup * S::scales + g * 16 + tile * 4 + (FMT == kFp4 ? (q >> 1) * 128 : 0);
    zeros = ring + S::zeros_at + warpgroup * S::zeros + g * 4;
    has_zeros = with_zeros;
  }
  // int8, 32 along K as wgmma reads them.
  __device__ __forceinline__ uint64_t weights(uint32_t stage, int slab) const { return weights_at(words + stage, slab); }
  // Ahead of `decode`.
  __device__ __forceinline__ void load(uint32_t stage, int half) {
    if (FMT != kInt8) w = read16(words + stage + half * 2048);
  }
  __device__ __forceinline__ void set_group(uint32_t stage, int index) {
    const uint32_t z = has_zeros ? read4(zeros + stage + index * 32) : 0x88888888u;
    group.set(read4(scales + stage + index * 128), z >> (8 * (threadIdx.x / 32 % 4)));
  }
  // The operands of one turn.
  __device__ __forceinline__ void decode(uint32_t (&a)[S::slabs][4], uint32_t stage, int turn) {
    const int half = turn * 2 / S::turns, from = turn * S::slabs % 4;  // words of the half
#pragma unroll
    for (int j = 0; j < S::slabs; j += 2) {
      if constexpr (FMT == kFp4) {
        const uint32_t four = read4(scales + stage + half * 256);
        const int i = (from + j) / 2;
        const uint32_t lo = fp4_scale(four, i), hi = fp4_scale(four, 2 + i);
        decode_fp4(word_of(w, 2 * i), word_of(w, 2 * i + 1), a[j], a[j + 1]);
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int f = 0; f < 4; ++f) a[j + k][f] = multiply2<T>(a[j + k][f], f % 2 ? hi : lo);
      } else {
        if (G == 32 || (from + j == 0 && (G == 64 || half == 0))) set_group(stage, half * 64 / G + (G == 32 ? (from + j) / 2 : 0));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          decode_int4<T>(word_of(w, from + j + k), a[j + k]);
#pragma unroll
          for (int f = 0; f < 4; ++f) a[j + k][f] = multiply2<T>(subtract2<T>(a[j + k][f], group.zero[f % 2]), group.scale[f % 2]);
        }
      }
    }
  }
};

}  // namespace
