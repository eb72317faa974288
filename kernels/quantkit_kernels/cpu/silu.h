// SiLU of a gate times what it gates.

#pragma once

#include "vectors.h"

namespace {

inline Vector gated(Vector gate, Vector up) {
  const Vector small = exponential(gate > 0.f ? -gate : gate), sum = small + 1.f;
  return gate * up * (gate > 0.f ? Vector{} + 1.f : small) / sum;
}

// Gates of a row, what they gate -> to, each [width].
template <class T, class To> inline void gate_row(const T* gate, const T* up, To* to, int width) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, gated(load(gate + i), load(up + i)));
  if (i == width) return;
  T last[2][kLanes] = {};
  To found[kLanes];
  memcpy(last[0], gate + i, (width - i) * sizeof(T));
  memcpy(last[1], up + i, (width - i) * sizeof(T));
  store(found, gated(load(last[0]), load(last[1])));
  memcpy(to + i, found, (width - i) * sizeof(To));
}

}  // namespace
