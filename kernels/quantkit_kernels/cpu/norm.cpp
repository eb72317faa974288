// RMS norm of rows, of the sum of two where a residual is given, and rotary embedding of halves: each one pass over memory, float32 inside.

#include <math.h>

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

// `use(at, count)` of whole vectors of a row, and of what is left.
template <class Use> inline void by_vectors(int width, Use use) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) use(i, kLanes);
  if (i < width) use(i, width - i);
}

template <class T> inline Vector some(const T* from, int count) {
  if (count == kLanes) return load(from);
  T room[kLanes] = {};
  std::copy_n(from, count, room);
  return load(room);
}

template <class T> inline void put(T* to, Vector value, int count) {
  if (count == kLanes) return store(to, value);
  T room[kLanes];
  store(room, value);
  std::copy_n(room, count, to);
}

template <class T, class W> void rms_norm(const T* x, const T* residual, const W* weight, T* out, T* total, int rows, int width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (int64_t)r * width;
    const T* row = x + at;
    if (residual) {
      by_vectors(width, [&](int i, int count) { put(total + at + i, some(x + at + i, count) + some(residual + at + i, count), count); });
      row = total + at;
    }
    Vector squares{};
    by_vectors(width, [&](int i, int count) {
      const Vector one = some(row + i, count);
      squares += one * one;
    });
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
    const float factor = 1 / sqrtf(sum / (float)width + eps);
    by_vectors(width, [&](int i, int count) { put(out + at + i, some(row + i, count) * factor * some(weight + i, count), count); });
  }
}

template <class T> void rotate(const T* x, const float* cos, const float* sin, T* out, int rows, int heads, int width, int row_stride, int head_stride, int threads) {
  const int half = width / 2;
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h) {
      const T* from = x + (int64_t)r * row_stride + (int64_t)h * head_stride;
      T* to = out + ((int64_t)r * heads + h) * width;
      by_vectors(half, [&](int i, int count) {
        const Vector first = some(from + i, count), second = some(from + half + i, count);
        const Vector c = some(cos + (int64_t)r * half + i, count), s = some(sin + (int64_t)r * half + i, count);
        put(to + i, first * c - second * s, count);
        put(to + half + i, first * s + second * c, count);
      });
    }
}

}  // namespace

// x[rows, width], and residual, or null, -> out, and their sum in `total`: bfloat16 where `half`, else float32; weight[width] by `half_weight`.
extern "C" void qk_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* total, int half, int half_weight, int rows, int width, int threads, float eps) {
  const auto run = [&](auto* like, auto* gain) {
    using T = std::remove_pointer_t<decltype(like)>;
    rms_norm((const T*)x, (const T*)residual, gain, (T*)out, (T*)total, rows, width, eps, threads);
  };
  if (half && half_weight) run((Half*)nullptr, (const Half*)weight);
  else if (half) run((Half*)nullptr, (const float*)weight);
  else if (half_weight) run((float*)nullptr, (const Half*)weight);
  else run((float*)nullptr, (const float*)weight);
}

// x[rows, heads, width] by strides, the last 1, -> out, rotated by the angles cos, sin [rows, width / 2] of its rows, one half with the other.
extern "C" void qk_rotate(const void* x, const float* cos, const float* sin, void* out, int half, int rows, int heads, int width, int row_stride, int head_stride, int threads) {
  if (half) rotate((const Half*)x, cos, sin, (Half*)out, rows, heads, width, row_stride, head_stride, threads);
  else rotate((const float*)x, cos, sin, (float*)out, rows, heads, width, row_stride, head_stride, threads);
}
