// What a product of the kernels for tiles is given; `TileParams` of abi.py.

#pragma once

#include <stdint.h>

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct TileParams {
  const uint4* words;         // weights as in gemm_params.cuh
  const uint8_t* scales;
  const uint8_t* zeros;
  const float* row_scale;
  const uint8_t* x;           // [tiles][bytes of a row / 128][tokens of a tile][128 bytes], see arrange.cu
  const float* x_scale;       // INT8 [slots]
  void* out;                  // kStore [slots, N], kSiluMul [slots, N/2], kWeigh [pairs, N], in T
  const int* tile_expert;     // [tiles] whose tokens a tile has, -1 for none; null for one linear, where slots are tokens
  const int* tile_count;      // [tiles] how many
  const int* order;           // [slots] the token-expert pair in a slot
  const float* pair_weights;  // [pairs], kWeigh
  int tiles, m, n, k, out_n;  // n is padded to whole strips, out_n is what is stored
  int split, epilogue;
  float limit;                // kSiluMul, see `gated`
};
