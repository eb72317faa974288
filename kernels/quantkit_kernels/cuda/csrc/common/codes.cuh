// Numbers of 8 bits, a byte each: how floats become codes, and codes the 16-bit operands of a matrix instruction, exactly.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "common/packed.cuh"

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

// Codes FIRST and SECOND of a word's four, side by side as two numbers of T.
//
// Int8 as bf16: 0x4300 | seven bits is 128 + them, and 0x4300 | the sign bit is 128 or 256: their difference is the number. As fp16, which has
// room for all eight bits: 1024 + (code + 128) less 1152.
// E4M3: its bits below those of the sign are moved to where exponent and mantissa of T meet; 2^120 or 2^8 makes up for the other bias.
template <class T, class Code, int FIRST, int SECOND> __device__ __forceinline__ uint32_t two_codes(uint32_t word) {
  using P = typename Pair<T>::type;
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  const auto minus = [](uint32_t a, uint32_t b) {
    const P r = __hsub2(*reinterpret_cast<const P*>(&a), *reinterpret_cast<const P*>(&b));
    return *reinterpret_cast<const uint32_t*>(&r);
  };
  if constexpr (std::is_same_v<Code, Int8> && bf16) {
    const uint32_t both = __byte_perm(word, 0x43434343u, 0x4040 | SECOND << 8 | FIRST);
    return minus(both & 0xff7fff7fu, both & 0xff80ff80u);
  } else if constexpr (std::is_same_v<Code, Int8>) {
    return minus(__byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4040 | SECOND << 8 | FIRST), 0x64806480u);
  } else {
    const uint32_t both = __byte_perm(word, 0, 0x0404 | SECOND << 12 | FIRST << 4);
    constexpr int by = bf16 ? 4 : 1;
    return multiply2<T>(and_or(both, 0x80008000u, (both >> by) & (0x7f007f00u >> by)), bf16 ? 0x7b807b80u : 0x5c005c00u);
  }
}

}  // namespace
