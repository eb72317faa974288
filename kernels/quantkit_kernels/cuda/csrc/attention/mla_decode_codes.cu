// Latent attention of a decode step (mla_decode.cu) over a cache in 8 bits.

#include "attention/mla_attend_codes.cuh"
#include "attention/mla_steps.cuh"

// dtype: 0 bf16, 1 fp16, of all but the codes; fp8: 0 int8, 1 E4M3. Returns a cudaError_t.
extern "C" int qk_mla_decode_codes(const MlaDecode* m, const MlaCodes* cache, int dtype, int fp8, void* s) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return absorb_attend_project<T>(*m, kCodeTile, m->splits, s, [&](const Attend& p) {
      return fp8 ? launch_attend_codes<T, Fp8>(m->absorbed, *cache, p, m->rows, s) : launch_attend_codes<T, Int8>(m->absorbed, *cache, p, m->rows, s);
    });
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}
