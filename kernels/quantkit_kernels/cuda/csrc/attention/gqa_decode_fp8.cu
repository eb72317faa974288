// gqa_attend.cuh over a cache of E4M3.

#include "attention/gqa_attend.cuh"
#include "attention/gqa_codes.cuh"

namespace {

template <class T> int run_width(const GqaDecode& p, void* stream) {
  if (p.d <= 64) return run<Codes<T, 64, Fp8>>(p, stream);
  if (p.d <= 128) return run<Codes<T, 128, Fp8>>(p, stream);
  return run<Codes<T, 256, Fp8>>(p, stream);
}

}  // namespace

// As qk_gqa_decode; d is a multiple of 16.
extern "C" int qk_gqa_decode_fp8(const GqaDecode* p, int dtype, void* stream) { return dtype == 0 ? run_width<__nv_bfloat16>(*p, stream) : run_width<__half>(*p, stream); }
