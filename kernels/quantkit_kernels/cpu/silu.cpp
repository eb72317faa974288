// SiLU of the gates times what they gate, one pass over memory.

#include "silu.h"

namespace {

template <class T> void silu_and_mul(const T* x, T* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int r = 0; r < rows; ++r) gate_row(x + (int64_t)r * 2 * width, x + (int64_t)r * 2 * width + width, out + (int64_t)r * width, width);
}

}  // namespace

// x[rows, 2 * width], gates first, -> out[rows, width]; bfloat16 where `half`, else float32.
extern "C" void qk_silu_and_mul(const void* x, void* out, int half, int rows, int width, int threads) {
  if (half) silu_and_mul((const Half*)x, (Half*)out, rows, width, threads);
  else silu_and_mul((const float*)x, (float*)out, rows, width, threads);
}
