// Latent attention of one query per row over the paged cache, absorbed: scores are (q W_UK) . latent, results (p . latent) W_UV
// (arXiv 2405.04434, section 2.1.2). Sizes of DeepSeek-V3: latents of 512 and a rotary key of 64, heads of 128 + 64 and 128.
//
// Three launches. `absorb` multiplies the queries with W_UK and turns their rotary part. `attend` reads each latent once for up to 32 heads:
// a block takes part of a row's tokens, in tiles of 64, and leaves their mean latent. `project` merges the parts and multiplies with W_UV.
//
// The device shares a row's tokens out, by the length that the row has there, over as many blocks as the grid has for the longest row: a
// captured graph stays right when lengths change, and nothing past a row's end is read.

#include "attention/mla_attend.cuh"
#include "attention/mla_steps.cuh"

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_mla_decode(const MlaDecode* m, int dtype, void* s) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    return absorb_attend_project<T>(*m, kTile, kFewParts, s, [&](const Attend& p) { return launch_attend<T>(m->absorbed, m->cache, p, m->rows, s); });
  };
  return dtype == 0 ? run((__nv_bfloat16*)nullptr) : run((__half*)nullptr);
}

// `attend` alone, of queries that are in `absorbed`: their mean latents are in `weighted` afterwards. splits: 1.
extern "C" int qk_mla_attend(const MlaDecode* m, int dtype, void* s) {
  const Attend p = attend_of(*m, kTile, kFewParts);
  return dtype == 0 ? launch_attend<__nv_bfloat16>(m->absorbed, m->cache, p, m->rows, s) : launch_attend<__half>(m->absorbed, m->cache, p, m->rows, s);
}
