// y[M, N] = x[M, K] @ W[N, K]^T for a weight-only int8 weight and few tokens, in float32.
//
// codes int8 [N, K], scales float [N, K / group]: a vector of codes along K is multiplied with each token's, and the sum of a group scaled.

#include "vectors.h"

namespace {

typedef int8_t LooseCodes __attribute__((vector_size(kLanes), aligned(1), may_alias));

inline Vector load_codes(const int8_t* from) { return __builtin_convertvector(*(const LooseCodes*)from, Vector); }

struct Weight {
  const int8_t* codes;
  const float* scales;
  int n, k, group;
};

// M tokens with one row of W.
template <int M> void multiply_row(const Weight& w, const float* x, float* y, int row) {
  const int8_t* codes = w.codes + (int64_t)row * w.k;
  const int groups = w.k / w.group;
  Vector sum[M] = {};
  float rest[M] = {};
  for (int g = 0; g < groups; ++g) {
    const float scale = w.scales[(int64_t)row * groups + g];
    const int end = (g + 1) * w.group;
    int k = g * w.group;
    Vector part[M] = {};
    for (; k + kLanes <= end; k += kLanes) {
      const Vector value = load_codes(codes + k);
      for (int m = 0; m < M; ++m) part[m] += value * load(x + (int64_t)m * w.k + k);
    }
    for (int m = 0; m < M; ++m) sum[m] += part[m] * scale;
    for (; k < end; ++k)
      for (int m = 0; m < M; ++m) rest[m] += codes[k] * scale * x[(int64_t)m * w.k + k];
  }
  for (int m = 0; m < M; ++m) {
    float total = rest[m];
    for (int lane = 0; lane < kLanes; ++lane) total += sum[m][lane];
    y[(int64_t)m * w.n + row] = total;
  }
}

template <int M> void multiply(const Weight& w, const float* x, float* y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int row = 0; row < w.n; ++row) multiply_row<M>(w, x, y, row);
}

}  // namespace

// x float [m, k], y float [m, n], both contiguous; group divides k.
extern "C" void qk_w8a16_linear(const void* codes, const float* scales, const float* x, float* y, int m, int n, int k, int group, int threads) {
  const Weight w = {(const int8_t*)codes, scales, n, k, group};
  for (int done = 0, now; done < m; done += now, x += (int64_t)now * k, y += (int64_t)now * n) {
    now = m - done >= 4 ? 4 : m - done >= 2 ? 2 : 1;
    if (now == 4) multiply<4>(w, x, y, threads);
    else if (now == 2) multiply<2>(w, x, y, threads);
    else multiply<1>(w, x, y, threads);
  }
}
