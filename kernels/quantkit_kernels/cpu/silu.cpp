// SiLU of the gates times what they gate, one pass over memory; also with Hadamard matrices in the same pass.

#include <math.h>

#include "silu.h"

namespace {

template <class T> void silu_and_mul(const T* x, T* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int r = 0; r < rows; ++r) gate_row(x + (int64_t)r * 2 * width, x + (int64_t)r * 2 * width + width, out + (int64_t)r * width, width);
}

constexpr int kLargest = 1024;  // rows of a Hadamard matrix

// values[block] times Sylvester's Hadamard matrix, H x H' of a vector's lanes and of vectors, over the root of its size -> out.
template <class T> void rotate(float* values, T* out, int block, const Vector* signs) {
  for (int i = 0; i < block; i += kLanes) {
    Vector sum = {};
    for (int j = 0; j < kLanes; ++j) sum += values[i + j] * signs[j];
    store(values + i, sum);
  }
  for (int half = kLanes; half < block; half *= 2)
    for (int i = 0; i < block; i += 2 * half)
      for (int j = i; j < i + half; j += kLanes) {
        const Vector a = load(values + j), b = load(values + j + half);
        store(values + j, a + b);
        store(values + j + half, a - b);
      }
  const float scale = 1 / sqrtf(block);
  for (int i = 0; i < block; i += kLanes) store(out + i, load(values + i) * scale);
}

template <class T> void silu_and_rotate(const T* x, T* out, int rows, int width, int block, int threads) {
  Vector signs[kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) signs[i][j] = __builtin_parity(i & j) ? -1 : 1;
#pragma omp parallel for num_threads(threads)
  for (int64_t b = 0; b < (int64_t)rows * width / block; ++b) {
    const int64_t begin = b * block, from = begin / width * 2 * width + begin % width;
    float values[kLargest];
    gate_row(x + from, x + from + width, values, block);
    rotate(values, out + begin, block, signs);
  }
}

}  // namespace

// As qk_silu_and_mul, and every `block` of width times a Hadamard matrix. block: a power of two, from a vector's lanes to kLargest.
extern "C" void qk_silu_and_rotate(const void* x, void* out, int half, int rows, int width, int block, int threads) {
  if (half) silu_and_rotate((const Half*)x, (Half*)out, rows, width, block, threads);
  else silu_and_rotate((const float*)x, (float*)out, rows, width, block, threads);
}

// x[rows, 2 * width], gates first, -> out[rows, width]; bfloat16 where `half`, else float32.
extern "C" void qk_silu_and_mul(const void* x, void* out, int half, int rows, int width, int threads) {
  if (half) silu_and_mul((const Half*)x, (Half*)out, rows, width, threads);
  else silu_and_mul((const float*)x, (float*)out, rows, width, threads);
}
