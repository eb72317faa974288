// What a product of the kernels for few tokens, and expand.cu, are given; `GemmParams` of abi.py.

#pragma once

#include <stdint.h>

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct GemmParams {
  const uint4* words;         // [experts][N/64][K/64] steps of a strip
  const uint8_t* scales;      // INT4 [experts][N/64][K/group][128 bytes]; FP4 [experts][N/64][K/64][256 bytes]; INT8 none
  const uint8_t* zeros;       // INT4 [experts][N/64][K/group][32 bytes] or null
  const float* row_scale;     // [experts][N]
  const void* x;              // [rows, K] bf16 or fp16; INT8: int8
  const float* x_scale;       // INT8 [rows]
  void* out;                  // kStore [M, N], kSiluMul [pairs, N/2] in T; kWeigh [pairs, N] float
  const int* ids;             // [pairs] expert of each token-expert pair, null for one linear; stride in ints
  const float* pair_weights;  // [pairs], kWeigh
  float* sums;                // [tiles][split][rows of a block][tokens of a block], kNothing between calls
  int ids_stride, pairs, top_k, by_expert;
  int m, n, k, out_n;         // n is padded to whole strips, out_n is what is stored
  int wn, split, epilogue;
  float limit;                // kSiluMul, see `gated`
};
