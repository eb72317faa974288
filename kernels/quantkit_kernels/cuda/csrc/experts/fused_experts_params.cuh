// What the experts of few tokens are given; `FusedExpertsParams` in build.py field by field.

#pragma once

#include <stdint.h>

struct Matrix {  // of every expert, see params.cuh
  const uint4* words;
  const uint8_t* scales;
  const uint8_t* zeros;
  const float* row_scale;
  int n, k;
};

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct FusedExpertsParams {
  Matrix gate_up, down;
  const void* x;              // [tokens, hidden] in T
  void* between;              // [pairs, intermediate] in T
  float* out;                 // [pairs, hidden]
  const int* ids;             // [pairs] expert of each token-expert pair; stride in ints
  const float* pair_weights;  // [pairs]
  int* done;                  // [(1 + entries) * 16] zero; the sum over each token's pairs makes it so again
  int ids_stride, pairs, top_k, experts;
  float limit;                // see `gated`
};
