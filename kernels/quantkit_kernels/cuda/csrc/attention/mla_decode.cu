// Latent attention of one query per row over the paged cache, absorbed: scores are (q W_UK) . latent, results (p . latent) W_UV
// (arXiv 2405.04434, section 2.1.2). Sizes of DeepSeek-V3: latents of 512 and a rotary key of 64, heads of 128 + 64 and 128.
//
// Three launches. `absorb` multiplies the queries with W_UK and turns their rotary part. `attend` reads each latent once for up to 32 heads:
// a block takes part of a row's tokens, in tiles of 32 that are copied into a ring of four; its eight warps share the 576 products of a score
// four ways and the 512 columns of a result eight ways, so a latent passes from shared memory to the tensor cores twice. `project` merges the
// parts and multiplies with W_UV.
//
// The device shares a row's tokens out, by the length that the row has there, over as many blocks as the grid has for the longest row: a
// captured graph stays right when lengths change, and nothing past a row's end is read.

#include "attention/mla_absorb.cuh"
#include "attention/mla_attend.cuh"
#include "attention/mla_project.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaDecode {
  const void *q, *kv_b;           // [rows, heads, 192]; [heads, 256, 512]
  const float *cosines, *sines;   // [rows, 32]
  const void* cache;              // [blocks, block_size, 576]
  const int *table, *lengths;     // [rows, table_width], [rows]; strides in ints, 2 for int64
  void* absorbed;                 // [rows, heads, 576], room, as the next two
  float* weighted;                // [rows, heads, splits, 512]
  void* found;                    // [rows, heads, splits] of two floats
  void* out;                      // [rows, heads, 128]
  int table_stride, lengths_stride, table_width, block_size, rows, heads, splits, interleaved;  // splits: at most 256
  float scale;
};

namespace {

using bf16 = __nv_bfloat16;

}  // namespace

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_mla_decode(const MlaDecode* m, int dtype, void* s) {
  const Attend p = {m->table, m->lengths, m->table_stride, m->lengths_stride, m->table_width, m->block_size, m->heads, m->splits, m->scale * 1.4426950408889634f, m->weighted, (float2*)m->found};
  int error = dtype == 0 ? launch_absorb<bf16>(m->q, m->kv_b, m->cosines, m->sines, m->absorbed, m->rows, m->heads, m->interleaved, s)
                         : launch_absorb<__half>(m->q, m->kv_b, m->cosines, m->sines, m->absorbed, m->rows, m->heads, m->interleaved, s);
  if (error == 0) error = dtype == 0 ? launch_attend<bf16>(m->absorbed, m->cache, p, m->rows, s) : launch_attend<__half>(m->absorbed, m->cache, p, m->rows, s);
  if (error == 0) error = dtype == 0 ? launch_project<bf16>(m->kv_b, m->out, p, m->rows, s) : launch_project<__half>(m->kv_b, m->out, p, m->rows, s);
  return error;
}
