// SiLU of the gates times what they gate, one pass over memory.

#include <algorithm>

#include "vectors.h"

namespace {

inline Vector gated(Vector gate, Vector up) {
  const Vector small = exponential(gate > 0.f ? -gate : gate), sum = small + 1.f;
  return gate * up * (gate > 0.f ? Vector{} + 1.f : small) / sum;
}

template <class T> void silu_and_mul(const T* x, T* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int r = 0; r < rows; ++r) {
    const T *gate = x + (int64_t)r * 2 * width, *up = gate + width;
    T* to = out + (int64_t)r * width;
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) store(to + i, gated(load(gate + i), load(up + i)));
    if (i == width) continue;
    T last[3][kLanes] = {};
    std::copy_n(gate + i, width - i, last[0]);
    std::copy_n(up + i, width - i, last[1]);
    store(last[2], gated(load(last[0]), load(last[1])));
    std::copy_n(last[2], width - i, to + i);
  }
}

}  // namespace

// x[rows, 2 * width], gates first, -> out[rows, width]; bfloat16 where `half`, else float32.
extern "C" void qk_silu_and_mul(const void* x, void* out, int half, int rows, int width, int threads) {
  if (half) silu_and_mul((const Half*)x, (Half*)out, rows, width, threads);
  else silu_and_mul((const float*)x, (float*)out, rows, width, threads);
}
