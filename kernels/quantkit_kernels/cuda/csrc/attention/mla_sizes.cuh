// What latent attention of a decode step is given, its sizes as DeepSeek-V3 has them, and what `attend` leaves for `project`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaDecode {
  const void *q, *kv_b;           // [rows, heads, 192]; [heads, 256, 512]
  const float *cosines, *sines;   // [rows, 32]
  const void* cache;              // [blocks, block_size, 576]; null where it is in 8 bits
  const int *table, *lengths;     // [rows, table_width], [rows]; strides in ints, 2 for int64
  void* absorbed;                 // [rows, heads, 576], room, as the next two
  void *weighted, *found;         // [rows, heads, splits, 512]; [rows, heads, splits] of two floats
  void* out;                      // [rows, heads, 128]
  int table_stride, lengths_stride, table_width, block_size, rows, heads, splits, interleaved;  // splits: at most 256
  float scale;
};

namespace {

constexpr int kLatent = 512, kRope = 64, kEntry = kLatent + kRope, kNope = 128, kValue = 128, kQuery = kNope + kRope;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kTile = 32;  // kTile: tokens by which a row is shared out

struct Attend {
  const int *table, *lengths;  // [rows, table_width], [rows]; strides in ints, 2 for int64
  int table_stride, lengths_stride, table_width, block_size, heads, splits;
  float scale;                 // times log2(e)
  int tile, few;               // tokens by which a row is shared out; see parts_of
  void* weighted;              // [rows, heads, splits, 512]: mean of latents weighed by p = 2^(score - largest), in the model's type
  float2* found;               // [rows, heads, splits]: largest score, sum of p
};

// exp2f without its steps for results below 2^-126, which are zero here.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ int tiles_of(int length, int tile) { return (length + tile - 1) / tile; }
// A row's tiles are shared out over this many of the grid's splits, none of which is without work: a tile each up to `few` of them, else two, for
// each more part is to be merged. Tiles are fewer than 2^23.
__device__ __forceinline__ int parts_of(int tiles, const Attend& p) { return min(p.splits, max(min(tiles, p.few), (tiles + 1) / 2)); }

}  // namespace
