// The sizes of a block of tile_per_block.cu: what it keeps in shared memory, and how much of a multiprocessor it takes.

#pragma once

#include "common/packed.cuh"

namespace {

template <int FMT, int G, int NT, int WGS> struct Tile {
  // Where the sums fill the registers the warp that copies comes as a warpgroup, which can hand its own over: so many are there then.
  static constexpr int more_registers = NT == 256 ? 240 : 0;
  static constexpr int rows = 64 * WGS, consumers = 128 * WGS, threads = consumers + (more_registers ? 128 : 32);
  static constexpr int blocks = WGS != 2 ? 1 : NT == 24 || NT == 48 || (NT == 32 && FMT != kInt4) ? 3 : NT <= 64 ? 2 : 1;  // of a multiprocessor
  // The turns a stage is multiplied in, so many instructions each: with few tokens registers are better spent on more warps, with 160 on sums.
  static constexpr int turns = (FMT == kFp4 && NT <= 32) || (FMT != kInt8 && (NT == 48 || NT == 160)) ? 4 : 2, slabs = (FMT == kInt8 ? 4 : 8) / turns;
  // Bytes of a stage: tokens, and of each strip words, scales and zero points.
  static constexpr int x = NT * (FMT == kInt8 ? 128 : 256);
  static constexpr int words = FMT == kInt8 ? 8192 : 4096;
  static constexpr int scales = FMT == kInt8 ? 0 : FMT == kFp4 ? 512 : 128 * (128 / G);
  static constexpr int zeros = FMT == kInt4 ? 32 * (128 / G) : 0;
  static constexpr int words_at = x, scales_at = words_at + WGS * words, zeros_at = scales_at + WGS * scales;
  // And once the rows' factors and (int8) the tokens'.
  static constexpr int factors = rows * 4 + NT * 8;
  static constexpr int stage = (zeros_at + WGS * zeros + 1023) / 1024 * 1024;
  static constexpr int room = (227 << 10) / blocks - 1024 - 512 - factors;
  static constexpr int stages = room / stage < 8 ? room / stage : 8;
  static constexpr int pitch = rows + 4;        // floats of a token's sums in shared memory: no two lanes meet in a bank
  static constexpr int pitch_stored = rows + 8;  // 16-bit numbers of a token's results
  static constexpr int bytes = 1024 + factors + (stages * stage > NT * pitch * 4 ? stages * stage : NT * pitch * 4);
  static_assert(NT % 8 == 0 && (NT + 31) / 32 * 32 * pitch_stored * 2 <= NT * pitch * 4);
  static_assert(stages >= 2 && bytes <= room + 1024 + factors);
};

}  // namespace
