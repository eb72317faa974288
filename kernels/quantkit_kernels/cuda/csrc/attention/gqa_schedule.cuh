// What gqa_attend.cuh is given, and which work each of its blocks has.

#pragma once

#include <stdint.h>

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct GqaDecode {
  const void *q, *keys, *values;  // [rows, kv_heads * shared, d]; [.., block_size, kv_heads, d] twice
  const float *key_scales, *value_scales;  // [.., block_size, kv_heads] of codes, else null
  const int *table, *lengths;     // [rows, table_width], [rows]; strides in ints, 2 for int64
  void* out;                      // as q
  float* partial;                 // [blocks, 2, 16 * d + 32]: sums, largest scores, sums of p = 2^(score - largest)
  int* arrived;                   // [units], zero before and after
  int table_stride, lengths_stride, table_width, block_size, rows, kv_heads, shared, d, window, blocks, least_tiles;
  float scale;  // times log2(e)
};

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kWarpTokens = 16, kTile = kWarps * kWarpTokens, kHeads = 16;

struct Span { int first, tokens, tiles; };  // of a row: what it sees, and in how many tiles
__device__ __forceinline__ Span span_of(int length, int window) {
  const int first = window > 0 ? max(0, length - window) : 0;
  return {first, length - first, (length - first + kTile - 1) / kTile};
}

// A row's heads that share keys, at begin .. end of the line.
struct Unit {
  int row, number, kv_head, head0, heads;
  long long begin, end;
  Span span;
};

// The line of tiles, and its equal shares. before [rows + 1]: tiles of the rows before, for one unit each; lengths [rows].
struct Line {
  const int *before, *lengths;
  int rows, groups, per_row, blocks;
  long long tiles;
  __device__ long long begin(int block) const { return block * tiles / blocks; }
  __device__ int holder(long long tile) const { return int(((tile + 1) * blocks - 1) / tiles); }
  __device__ Unit unit_at(const GqaDecode& p, long long tile) const {
    int row = 0;  // the last that begins here or before
    for (int high = rows; high - row > 1;) {
      const int middle = (row + high) / 2;
      if ((long long)before[middle] * per_row <= tile) row = middle;
      else high = middle;
    }
    const Span span = span_of(lengths[row], p.window);
    const long long row_begin = (long long)before[row] * per_row;
    const int number = int(tile - row_begin) / span.tiles, head0 = number % groups * kHeads;
    const long long begin = row_begin + (long long)number * span.tiles;
    return {row, number, number / groups, head0, min(kHeads, p.shared - head0), begin, begin + span.tiles, span};
  }
};

// before [rows + 1] and lengths [rows] of `Line`, by the first warp.
__device__ __forceinline__ void count_tiles(const GqaDecode& p, int* before, int* lengths) {
  const int lane = threadIdx.x & 31, each = (p.rows + 31) / 32, row0 = lane * each, row1 = min(p.rows, row0 + each);
  int mine = 0;
  for (int row = lane; row < p.rows; row += 32) lengths[row] = p.lengths[row * p.lengths_stride];
  __syncwarp();
  for (int row = row0; row < row1; ++row) mine += span_of(lengths[row], p.window).tiles;
  int upto = mine;
  for (int o = 1; o < 32; o <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, upto, o);
    if (lane >= o) upto += other;
  }
  int at = upto - mine;
  for (int row = row0; row < row1; ++row) before[row] = at, at += span_of(lengths[row], p.window).tiles;
  if (lane == 31) before[p.rows] = upto;
}

}  // namespace
