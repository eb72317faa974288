// W[N, K] in 16 bits from the 4-bit layout, for products with so many tokens that torch's own matmul is faster.

#include <cuda_runtime.h>

#include "common/packed.cuh"
#include "linears/gemm_params.cuh"

namespace {

// One warp per tile of 16 x 64.
template <int FMT, class T, int G> __global__ void expand(const GemmParams p, T* out) {
  const int steps = p.k / 64, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const size_t index = (size_t)blockIdx.x * (blockDim.x / 32) + (threadIdx.x >> 5);
  const int t = index % 4, kt = index / 4 % steps, row = (int)(index / 4 / steps) * 64 + t * 16;
  if (row >= p.n) return;
  const uint4 words = __ldg(p.words + index * 32 + lane);
  const float row_lo = p.row_scale[row + g], row_hi = p.row_scale[row + 8 + g];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[2][4];
    float lo, hi, zero_lo = 0.f, zero_hi = 0.f;
    if constexpr (FMT == kFp4) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(p.scales + index / 4 * 256 + (q >> 1) * 128 + g * 16 + t * 4);
      decode_fp4(word_of(words, 2 * i), word_of(words, 2 * i + 1), a[0], a[1]);
      const uint32_t bits_lo = fp4_scale(four, i), bits_hi = fp4_scale(four, 2 + i);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int f = 0; f < 4; ++f) a[j][f] = multiply2<T>(a[j][f], f % 2 ? bits_hi : bits_lo);
      lo = row_lo, hi = row_hi;
    } else {
      const size_t group = G == 32 ? index / 4 * 2 + i : G == 64 ? index / 4 : index / 8;
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(p.scales + group * 128 + g * 16 + t * 4));
      const uint32_t zeros = (p.zeros ? *reinterpret_cast<const uint32_t*>(p.zeros + group * 32 + g * 4) : 0x88888888u) >> (8 * t);
      zero_lo = zero_of<T>(zeros, 0), zero_hi = zero_of<T>(zeros, 1);
      lo = scale.x * row_lo, hi = scale.y * row_hi;
      decode_int4<T>(word_of(words, 2 * i), a[0]);
      decode_int4<T>(word_of(words, 2 * i + 1), a[1]);
    }
    T rows[2][8];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const T* pair = reinterpret_cast<const T*>(&a[j][f]);
#pragma unroll
        for (int e = 0; e < 2; ++e) rows[f % 2][4 * j + 2 * (f / 2) + e] = T((float(pair[e]) - (f % 2 ? zero_hi : zero_lo)) * (f % 2 ? hi : lo));
      }
    const size_t at = (size_t)(row + g) * p.k + kt * 64 + 32 * i + 8 * q;
    if (row + g < p.out_n) *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<uint4*>(rows[0]);
    if (row + 8 + g < p.out_n) *reinterpret_cast<uint4*>(out + at + (size_t)8 * p.k) = *reinterpret_cast<uint4*>(rows[1]);
  }
}

}  // namespace

using bf16 = __nv_bfloat16;

extern "C" int qk_expand(const GemmParams* p, int format, int dtype, int group, void* out, void* stream) {
  const int blocks = p->n / 64 * (p->k / 64) / 2;
  const auto run = [&](auto kernel, auto* to) {
    kernel<<<blocks, 256, 0, (cudaStream_t)stream>>>(*p, to);
    return (int)cudaGetLastError();
  };
  if (format == kFp4) return run(expand<kFp4, bf16, 16>, (bf16*)out);
  if (group == 32) return dtype == 0 ? run(expand<kInt4, bf16, 32>, (bf16*)out) : run(expand<kInt4, __half, 32>, (__half*)out);
  if (group == 64) return dtype == 0 ? run(expand<kInt4, bf16, 64>, (bf16*)out) : run(expand<kInt4, __half, 64>, (__half*)out);
  return dtype == 0 ? run(expand<kInt4, bf16, 128>, (bf16*)out) : run(expand<kInt4, __half, 128>, (__half*)out);
}
