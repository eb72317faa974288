// gqa_attend.cuh over a cache of 16 bits.

#include "attention/gqa_attend.cuh"
#include "attention/gqa_halves.cuh"

namespace {

template <class T> int run_width(const GqaDecode& p, void* stream) {
  if (p.d <= 64) return run<Halves<T, 64>>(p, stream);
  if (p.d <= 96) return run<Halves<T, 96>>(p, stream);
  if (p.d <= 128) return run<Halves<T, 128>>(p, stream);
  if (p.d <= 192) return run<Halves<T, 192>>(p, stream);
  return run<Halves<T, 256>>(p, stream);
}

}  // namespace

// dtype: 0 bf16, 1 fp16. d is a multiple of 8 of at most 256, rows are at most 1024, slots times kv_heads fewer than 2^31. blocks: of the grid, of which
// each has a share of least_tiles or more, or none.
extern "C" int qk_gqa_decode(const GqaDecode* p, int dtype, void* stream) { return dtype == 0 ? run_width<__nv_bfloat16>(*p, stream) : run_width<__half>(*p, stream); }
