// SiLU of a gate times what it gates.

#pragma once

#include "vectors.h"

namespace {

inline Vector gated(Vector gate, Vector up) {
  const Vector small = exponential(gate > 0.f ? -gate : gate), sum = small + 1.f;
  return gate * up * (gate > 0.f ? Vector{} + 1.f : small) / sum;
}

// Gates of a row, what they gate -> to, each [width].
template <class T> inline void gate_row(const T* gate, const T* up, T* to, int width) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, gated(load(gate + i), load(up + i)));
  if (i == width) return;
  T last[3][kLanes] = {};
  memcpy(last[0], gate + i, (width - i) * sizeof(T));
  memcpy(last[1], up + i, (width - i) * sizeof(T));
  store(last[2], gated(load(last[0]), load(last[1])));
  memcpy(to + i, last[2], (width - i) * sizeof(T));
}

}  // namespace
