// Few rows of x by an unquantized weight, bfloat16 or float32, as it lies: every number is read from memory once, for all rows. bfloat16 by its own
// products where the processor has them, summed in float32, else in float32. Torch multiplies few rows slower than memory is.

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kSums = 24;  // that stay in registers
#else
constexpr int kSums = 12;
#endif
constexpr int kMostRows = 8;

#if defined(__AVX512BF16__)
template <class T> constexpr bool kPairs = sizeof(T) == 2;  // two neighbours are multiplied as they lie
#else
template <class T> constexpr bool kPairs = false;
#endif

// Parts of a chunk, a vector of the weight: of 2 * kLanes bfloat16 those at even places and those at odd ones, of float32, or in pairs, all.
template <class T> constexpr int kParts = kPairs<T> ? 1 : 4 / sizeof(T);
template <class T> constexpr int kChunk = 4 / sizeof(T) * kLanes;
template <class T> constexpr int kWide = kParts<T> * kLanes;  // lanes that a token's chunk fills
typedef Words Chunk;
inline Chunk whole(const void* from) {
  Chunk chunk;
  memcpy(&chunk, from, sizeof chunk);
  return chunk;
}
template <class T> inline Vector part(Chunk chunk, int number) {
  return (Vector)(kParts<T> == 1 ? chunk : number ? chunk & 0xffff0000u : chunk << 16);
}
template <class T> inline Vector add(Vector sum, Vector weights, Vector tokens) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)tokens);
#endif
  return multiply_add(weights, tokens, sum);
}

inline void put(float* to, float value) { *to = value; }
inline void put(Half* to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  to->bits = (uint16_t)(value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40);
}

// M tokens [chunks][M][kWide] by R rows of the weight. y [M, n].
template <int M, int R, class T> void multiply(const T* w, const float* x, T* y, int n, int k) {
  constexpr int chunk = kChunk<T>;
  constexpr int count = (R * M + 3) / 4 * 4;
  Vector sum[count];
#pragma GCC unroll 24
  for (int i = 0; i < count; ++i) sum[i] = Vector{};
  const auto add_chunk = [&](const T* from, int stride) __attribute__((always_inline)) {
    Chunk chunks[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(from + (int64_t)(r + 2 * R) * stride, 0, 2);  // into L2, which waits for more lines at once than L1
      chunks[r] = whole(from + (int64_t)r * stride);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kParts<T>; ++p) {
      Vector weights[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) weights[r] = part<T>(chunks[r], p);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Vector tokens = *(const Vector*)(x + m * kWide<T> + p * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r * M + m] = add<T>(sum[r * M + m], weights[r], tokens);
      }
    }
    x += M * kWide<T>;
  };
  int i = 0;
  for (; i + chunk <= k; i += chunk) add_chunk(w + i, k);
  if (i < k) {
    T last[R * chunk] = {};
    for (int r = 0; r < R; ++r) std::copy_n(w + (int64_t)r * k + i, k - i, last + r * chunk);
    add_chunk(last, chunk);
  }
  float found[count];
#pragma GCC unroll 6
  for (int i = 0; i < count; i += 4) totals(sum + i, found + i);
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) put(y + (int64_t)m * n + r, found[r * M + m]);
}

// For how many tokens there is code.
constexpr int kSizes[] = {1, 2, 3, 4, 6, 8, 12};
inline int largest(int count) { return *(std::upper_bound(std::begin(kSizes), std::end(kSizes), std::min(count, kSums / 2)) - 1); }

template <int Size = 0, class T> void multiply_rows(const T* w, const float* x, T* y, int m, int first, int stop, int n, int k) {
  if constexpr (Size < (int)std::size(kSizes) && kSizes[Size] <= kSums / 2) {
    constexpr int M = kSizes[Size], R = std::min(kMostRows, kSums / M);
    if (m != M) return multiply_rows<Size + 1>(w, x, y, m, first, stop, n, k);
    for (; first + R <= stop; first += R) multiply<M, R>(w + (int64_t)first * k, x, y + first, n, k);
    for (; first < stop; ++first) multiply<M, 1>(w + (int64_t)first * k, x, y + first, n, k);
  }
}

// Tokens begin .. begin + m, in parts side by side; those after the last of k are 0.
template <class T> void pack(const T* x, float* to, int m, int k) {
  constexpr int chunk = kChunk<T>;
  for (int i = 0; i < k; i += chunk)
    for (int token = 0; token < m; ++token, to += kWide<T>) {
      T some[chunk] = {};
      std::copy_n(x + (int64_t)token * k + i, std::min(chunk, k - i), some);
      for (int p = 0; p < kParts<T>; ++p) store(to + p * kLanes, part<T>(whole(some), p));
    }
}

template <class T> void rows(const T* w, const T* x, T* y, int m, int n, int k, int threads) {
  constexpr int together = 96;  // rows of the weight, a whole number of all R
  const int64_t wide = (int64_t)(k + kChunk<T> - 1) / kChunk<T> * kWide<T>;
  std::vector<Vector> room(m * wide / kLanes);
  float* tokens = (float*)room.data();
  for (int at = 0, size; at < m; at += size) {
    size = largest(m - at);
    pack(x + (int64_t)at * k, tokens + at * wide, size, k);
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int first = 0; first < n; first += together)
    for (int at = 0, size; at < m; at += size) {
      size = largest(m - at);
      multiply_rows(w, tokens + at * wide, y + (int64_t)at * n, size, first, std::min(n, first + together), n, k);
    }
}

}  // namespace

// x[m, k] -> y[m, n] by w[n, k], all bfloat16 where `half`, else float32.
extern "C" void qk_dense_rows(const void* w, const void* x, void* y, int half, int m, int n, int k, int threads) {
  if (half) rows((const Half*)w, (const Half*)x, (Half*)y, m, n, k, threads);
  else rows((const float*)w, (const float*)x, (float*)y, m, n, k, threads);
}
