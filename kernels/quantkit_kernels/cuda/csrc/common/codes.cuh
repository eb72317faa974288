// Numbers of 8 bits, a byte each: how floats become codes, and codes the 16-bit operands of a matrix instruction, exactly.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

namespace {

struct Int8 {
  static constexpr float largest = 127.f;
  static __device__ __forceinline__ uint8_t of(float x) { return (uint8_t)(int8_t)__float2int_rn(fminf(fmaxf(x, -largest), largest)); }
};
struct Fp8 {  // E4M3
  static constexpr float largest = 448.f;
  static __device__ __forceinline__ uint8_t of(float x) { return (uint8_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

constexpr float kLeastScale = 1e-10f;

// Eight codes of a row, as bytes.
template <class Code> __device__ __forceinline__ uint2 codes_of_eight(const float (&x)[8], float scale) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i / 4] |= (uint32_t)Code::of(__fdiv_rn(x[i], scale)) << i % 4 * 8;
  return make_uint2(words[0], words[1]);
}

// Codes FIRST and SECOND of a word's four, side by side as two numbers of fp16, exactly. Int8: 1024 + (code + 128) less 1152.
template <class Code, int FIRST, int SECOND> __device__ __forceinline__ uint32_t two_codes(uint32_t word) {
  uint32_t both;
  if constexpr (std::is_same_v<Code, Int8>) {
    both = __byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4040 | SECOND << 8 | FIRST);
    const __half2 less = __hsub2(*reinterpret_cast<const __half2*>(&both), __half2(__half_raw{0x6480}, __half_raw{0x6480}));
    return *reinterpret_cast<const uint32_t*>(&less);
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((uint16_t)__byte_perm(word, 0, 0x4400 | SECOND << 4 | FIRST)));
    return both;
  }
}

// Queries that meet codes are fp16, too, and divided by 16: of bf16 they keep all bits between 2^-10 and 2^19, and beyond that 2^-20 or infinity.
constexpr float kQueryStep = 16.f;
template <class T> __device__ __forceinline__ uint32_t two_queries(uint32_t pair) {
  const T* both = reinterpret_cast<const T*>(&pair);
  const __half2 less = __floats2half2_rn(float(both[0]) / kQueryStep, float(both[1]) / kQueryStep);
  return *reinterpret_cast<const uint32_t*>(&less);
}

}  // namespace
