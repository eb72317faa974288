// RMS norm of rows, of the sum of two where a residual is given, and rotary embedding of halves: each one pass over memory, float32 inside.
// What GQA does before attention is made of both, in one call: a step of few tokens is made of calls.

#include <math.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

template <class T, class W> inline void norm_row(const T* row, const W* weight, T* out, int width, float eps) {
  Vector squares{};
  by_vectors(width, [&](int i, int count) {
    const Vector one = some(row + i, count);
    squares += one * one;
  });
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
  const float factor = 1 / sqrtf(sum / (float)width + eps);
  by_vectors(width, [&](int i, int count) { put(out + i, some(row + i, count) * factor * some(weight + i, count), count); });
}

template <class T, class W> void rms_norm(const T* x, const T* residual, const W* weight, T* out, T* total, int rows, int width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    const int64_t at = (int64_t)r * width;
    if (residual) by_vectors(width, [&](int i, int count) { put(total + at + i, some(x + at + i, count) + some(residual + at + i, count), count); });
    norm_row((residual ? total : x) + at, weight, out + at, width, eps);
  }
}

// A head's first 2 * `half` channels by its token's angles.
template <class T> inline void rotate_head(const T* from, const float* cos, const float* sin, T* to, int half) {
  by_vectors(half, [&](int i, int count) {
    const Vector first = some(from + i, count), second = some(from + half + i, count);
    const Vector c = some(cos + i, count), s = some(sin + i, count);
    put(to + i, first * c - second * s, count);
    put(to + half + i, first * s + second * c, count);
  });
}

template <class T> void rotate(const T* x, const float* cos, const float* sin, T* out, int rows, int heads, int width, int row_stride, int head_stride, int threads) {
  const int half = width / 2;
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < heads; ++h)
      rotate_head(x + (int64_t)r * row_stride + (int64_t)h * head_stride, cos + (int64_t)r * half, sin + (int64_t)r * half, out + ((int64_t)r * heads + h) * width, half);
}

// Each token's queries to q, its keys and values to its slot.
template <class T, class W>
void prepare(const T* qkv, const W* q_gain, const W* k_gain, const float* cos, const float* sin, const int64_t* slots, T* q, T* keys, T* values, int rows, int heads, int kv_heads,
             int width, int half, int threads, float eps) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    const T* from = qkv + (int64_t)r * (heads + 2 * kv_heads) * width;
    T *own = q + (int64_t)r * heads * width, *key = keys + slots[r] * kv_heads * width;
    std::vector<T> normed(width);
    for (int h = 0; h < heads + kv_heads; ++h, from += width) {
      T* to = h < heads ? own + (int64_t)h * width : key + (int64_t)(h - heads) * width;
      const W* gain = h < heads ? q_gain : k_gain;
      if (gain) norm_row(from, gain, normed.data(), width, eps);
      const T* head = gain ? normed.data() : from;
      rotate_head(head, cos + (int64_t)r * half, sin + (int64_t)r * half, to, half);
      std::copy(head + 2 * half, head + width, to + 2 * half);
    }
    std::copy_n(from, (int64_t)kv_heads * width, values + slots[r] * kv_heads * width);
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

// qkv[rows, (heads + 2 * kv_heads) * width], queries, keys and values of each token, -> q[rows, heads, width] and rows slots[r] of keys and values
// [.., kv_heads, width], all bfloat16 where `half`, else float32. Gains [width] of norms over a head, or null, by `half_gains`; cos, sin [rows, angles].
extern "C" void qk_gqa_prepare(const void* qkv, const void* q_gain, const void* k_gain, const float* cos, const float* sin, const int64_t* slots, void* q, void* keys, void* values,
                               int half, int half_gains, int rows, int heads, int kv_heads, int width, int angles, int threads, float eps) {
  const auto run = [&](auto* like, auto* gain) {
    using T = std::remove_pointer_t<decltype(like)>;
    using W = std::remove_pointer_t<decltype(gain)>;
    prepare((const T*)qkv, (const W*)q_gain, (const W*)k_gain, cos, sin, slots, (T*)q, (T*)keys, (T*)values, rows, heads, kv_heads, width, angles, threads, eps);
  };
  if (half && half_gains) run((Half*)nullptr, (Half*)nullptr);
  else if (half) run((Half*)nullptr, (float*)nullptr);
  else if (half_gains) run((float*)nullptr, (Half*)nullptr);
  else run((float*)nullptr, (float*)nullptr);
}
