// The layout of packed weights, which `prepare` stores (layout.py), and how a word of it becomes numbers.
//
// Weights lie in the order in which a warp's lanes consume them as the A operand (16 rows) of a matrix instruction: 64 rows (a strip) by 64
// along K (a step) is a run of 2 KB (int8: 4 KB). The order of K inside a step is chosen so that a lane's share of x is one or two 16-byte
// loads of plain row-major activations.
//
// Order, g = lane / 4, q = lane % 4, tile t of a strip of 64 rows, 64 along K (a step):
//   4 bit   word j of 4: element e of field h + 2b is W[16t + 8h + g, 32(j/2) + 8q + 4(j%2) + 2b + e]
//   8 bit   a row's 64 bytes side by side, which wgmma reads too: chunk c of 16 bytes of row r at place c ^ (r / 2 % 4); a lane has
//           chunk q of the rows 16t + 8h + g
// INT4: field f of half-word e lies at bits 16e + 3 .. 6 once the word is rotated right by 4f. Scales: [g][t][h] fp16 per group; zero points:
// nibble 2t + h of word g. FP4: fields as `decode_fp4` says; scales [q/2][g][t], byte 2h + (j/2). Every row has a float32 factor besides.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace {

enum Format { kInt4 = 0, kFp4 = 1, kInt8 = 2 };
enum Epilogue { kStore = 0, kSiluMul = 1, kWeigh = 2 };

// silu(gate) * up of a gate of at most `limit` and an up within -limit .. limit; 0: as they are.
__device__ __forceinline__ float gated(float gate, float up, float limit) {
  if (limit > 0) gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.f + __expf(-gate)) * up;
}

template <class T> struct Pair;
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct Pair<__half> { using type = __half2; };

__device__ __forceinline__ uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

template <class T> __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  using P = typename Pair<T>::type;
  P r = __hmul2(*reinterpret_cast<P*>(&a), *reinterpret_cast<P*>(&b));
  return *reinterpret_cast<uint32_t*>(&r);
}

// A code at bits 3..6 of 16 (bf16) or 128 (fp16) makes the number 16 + code or 128 + code, exactly. Offset and zero point are subtracted
// from the sums: sum (offset + code) x - (offset + zero) sum x, the last by one more mma with ones for W.
template <class T> struct Magic;
template <> struct Magic<__nv_bfloat16> {
  static constexpr uint32_t value = 0x41804180u, ones = 0x3f803f80u, float_bits = 0x41800000u;
  static constexpr int float_shift = 19;  // of a zero point in a float32 with these bits
};
template <> struct Magic<__half> {
  static constexpr uint32_t value = 0x58005800u, ones = 0x3c003c00u, float_bits = 0x43000000u;
  static constexpr int float_shift = 16;
};

template <class T> __device__ __forceinline__ void decode_int4(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t mask = 0x00780078u, magic = Magic<T>::value;
  a[0] = and_or(word, mask, magic);
  a[1] = and_or(word >> 4, mask, magic);
  a[2] = and_or(word >> 8, mask, magic);
  a[3] = and_or(__funnelshift_r(word, word, 12), mask, magic);
}

// offset + zero point number `index` of a word.
template <class T> __device__ __forceinline__ float zero_of(uint32_t zeros, int index) {
  constexpr int shift = Magic<T>::float_shift;
  const int by = shift - 4 * index;
  return __uint_as_float(and_or(by >= 0 ? zeros << by : zeros >> -by, 15u << shift, Magic<T>::float_bits));
}

// E2M1 (sign, two exponent bits, one mantissa bit) has the bit order of any float: with the sign at bit 15 and the rest at bits 8..6 of a
// bf16 the number is value * 2^-126, which the scale corrects. In each half of a word the fields 0, 1, 2 lie 3 bits apart, ready to be
// shifted and masked. Field 3 of two words shares the bits that are left, 14, 13, 11, 10: the first word has both signs and mantissa bits
// (its own sign, mantissa; the other's sign, mantissa), the second both exponents (the first's, its own).
constexpr uint32_t kFp4Mask = 0x81c081c0u;

__device__ __forceinline__ void decode_fp4(uint32_t first, uint32_t second, uint32_t (&a)[4], uint32_t (&b)[4]) {
  a[0] = first & kFp4Mask;
  a[1] = (first << 3) & kFp4Mask;
  a[2] = (first << 6) & kFp4Mask;
  b[0] = second & kFp4Mask;
  b[1] = (second << 3) & kFp4Mask;
  b[2] = (second << 6) & kFp4Mask;
  const uint32_t left = and_or(first << 1, 0x90009000u, and_or(first >> 7, 0x00480048u, (second >> 6) & 0x01b001b0u));
  a[3] = left & kFp4Mask;
  b[3] = (left << 3) & kFp4Mask;
}

// Byte `index` of four e5m3 scales as a pair of bf16 with 224 added to the exponent, see `pack_fp4` for the bias.
__device__ __forceinline__ uint32_t fp4_scale(uint32_t four, int index) {
  return __byte_perm(four, 0, 0x4040 + 0x0101 * index) * 16 + 0x70007000u;
}

template <class T> __device__ __forceinline__ void store(void* out, size_t at, float value) { reinterpret_cast<T*>(out)[at] = T(value); }

// `each` results of one token from `feature` on, with one store where they fit.
template <class T, int EACH, class P> __device__ __forceinline__ void store_run(const P& p, int slot, int feature, const T (&y)[EACH]) {
  T* to = reinterpret_cast<T*>(p.out) + (size_t)slot * p.out_n + feature;
  using Run = std::conditional_t<EACH == 8, uint4, uint2>;
  if (feature + EACH <= p.out_n && p.out_n % EACH == 0) {
    *reinterpret_cast<Run*>(to) = *reinterpret_cast<const Run*>(y);
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (feature + i < p.out_n) to[i] = y[i];
  }
}

}  // namespace
