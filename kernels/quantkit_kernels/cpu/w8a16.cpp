// y[M, N] = x[M, K] @ W[N, K]^T for a weight-only int8 weight and few tokens, in float32.
//
// codes int8 [N, K], scales float [N, K / group]: a vector of codes along K becomes weights once, for all tokens.

#include <iterator>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kSums = 24;  // that stay in registers
#else
constexpr int kSums = 8;
#endif
constexpr int kMostRows = 8;

struct Weight {
  const int8_t* codes;
  const float* scales;
  int n, k, group;
};

// M tokens by R rows of the weight, from `row` on.
template <int M, int R> void multiply(const Weight& w, const float* x, float* y, int row) {
  constexpr int count = (R * M + 3) / 4 * 4;
  const int8_t* codes = w.codes + (int64_t)row * w.k;
  const float* scales = w.scales + (int64_t)row * (w.k / w.group);
  Vector sum[count];
#pragma GCC unroll 24
  for (int i = 0; i < count; ++i) sum[i] = Vector{};
  for (int g = 0, k = 0; k < w.k; ++g, k += w.group) {
    float scale[R];
    for (int r = 0; r < R; ++r) scale[r] = scales[r * (w.k / w.group) + g];
    by_vectors(w.group, [&](int at, int some_count) __attribute__((always_inline)) {
      Vector weights[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int8_t* from = codes + (int64_t)r * w.k + k + at;
        __builtin_prefetch(from + (int64_t)2 * R * w.k, 0, 2);  // into L2, which waits for more lines at once than L1
        weights[r] = some(from, some_count) * scale[r];
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const Vector tokens = some(x + (int64_t)m * w.k + k + at, some_count);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r * M + m] = multiply_add(weights[r], tokens, sum[r * M + m]);
      }
    });
  }
  float found[count];
#pragma GCC unroll 6
  for (int i = 0; i < count; i += 4) totals(sum + i, found + i);
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) y[(int64_t)m * w.n + row + r] = found[r * M + m];
}

// For how many tokens there is code.
constexpr int kSizes[] = {1, 2, 4, 8};
inline int largest(int count) { return *(std::upper_bound(std::begin(kSizes), std::end(kSizes), std::min(count, kSums / 2)) - 1); }

template <int Size = 0> void multiply_rows(const Weight& w, const float* x, float* y, int m, int first, int stop) {
  if constexpr (Size < (int)std::size(kSizes) && kSizes[Size] <= kSums / 2) {
    constexpr int M = kSizes[Size], R = std::min(kMostRows, kSums / M);
    if (m != M) return multiply_rows<Size + 1>(w, x, y, m, first, stop);
    for (; first + R <= stop; first += R) multiply<M, R>(w, x, y, first);
    for (; first < stop; ++first) multiply<M, 1>(w, x, y, first);
  }
}

}  // namespace

// x float [m, k], y float [m, n], both contiguous; group divides k.
extern "C" void qk_w8a16_linear(const void* codes, const float* scales, const float* x, float* y, int m, int n, int k, int group, int threads) {
  constexpr int together = 24;  // rows of the weight, a whole number of all R
  const Weight w = {(const int8_t*)codes, scales, n, k, group};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int first = 0; first < n; first += together)
    for (int at = 0, size; at < m; at += size) {
      size = largest(m - at);
      multiply_rows(w, x + (int64_t)at * k, y + (int64_t)at * n, size, first, std::min(n, first + together));
    }
}
