// The CPU's products compiled for aarch64 and judged against float64, under qemu where the host is another (make test-aarch64): of few and of
// many rows, of whole vectors and of odd sizes. Speed is not seen here.

#include <math.h>
#include <stdio.h>

#include <array>
#include <random>
#include <vector>

#include "../../kernels/quantkit_kernels/cpu/int8.h"

extern "C" void qk_int8_rows(const void*, const float*, const void*, void*, int, int, int, int, int);
extern "C" void qk_w8a16_linear(const void*, const float*, const float*, float*, int, int, int, int, int);
extern "C" void qk_dense_rows(const void*, const void*, void*, int, int, int, int, int);

int main() {
  std::mt19937 rng(0);
  std::normal_distribution<float> normal;
  double int8_worst = 0, w8a16_worst = 0, dense_worst = 0;
  for (const auto& [m, n, k] : std::vector<std::array<int, 3>>{{1, 64, 2048}, {5, 10, 100}, {3, 3, 5}, {17, 35, 389}, {9, 64, 7168}}) {
    std::vector<int8_t> codes(n * k);
    std::vector<float> scale(n), x(m * k), y(m * n), w(n * k);
    for (auto& one : codes) one = (int8_t)(int(rng() % 255) - 127);
    for (auto& one : scale) one = 0.5f + fabsf(normal(rng));
    for (auto& one : x) one = normal(rng);
    for (int i = 0; i < n * k; ++i) w[i] = codes[i] * scale[i / k];
    const auto worst = [&](auto&& input) {  // of the sum of magnitudes
      double found = 0;
      for (int row = 0; row < m; ++row)
        for (int column = 0; column < n; ++column) {
          double sum = 0, magnitude = 0;
          for (int i = 0; i < k; ++i) {
            const double product = input(row, i) * codes[column * k + i] * scale[column];
            sum += product, magnitude += fabs(product);
          }
          found = std::max(found, fabs(y[row * n + column] - sum) / magnitude);
        }
      return found;
    };
    std::vector<double> rounded(m * k);
    for (int row = 0; row < m; ++row) {
      float most = 0;
      for (int i = 0; i < k; ++i) most = std::max(most, fabsf(x[row * k + i]));
      const float step = most / 127;
      for (int i = 0; i < k; ++i) rounded[row * k + i] = nearbyint(x[row * k + i] / step) * (double)step;
    }
    qk_int8_rows(codes.data(), scale.data(), x.data(), y.data(), m, n, k, 0, 1);
    int8_worst = std::max(int8_worst, worst([&](int row, int i) { return rounded[row * k + i]; }));
    qk_w8a16_linear(codes.data(), scale.data(), x.data(), y.data(), m, n, k, k, 1);
    w8a16_worst = std::max(w8a16_worst, worst([&](int row, int i) { return (double)x[row * k + i]; }));
    qk_dense_rows(w.data(), x.data(), y.data(), 0, m, n, k, 1);
    dense_worst = std::max(dense_worst, worst([&](int row, int i) { return (double)x[row * k + i]; }));
  }
#if defined(__ARM_FEATURE_DOTPROD)
  const char* form = "dot product";
#else
  const char* form = "portable";
#endif
  printf("%s: int8 %.1e, w8a16 %.1e, dense %.1e of the sum of magnitudes\n", form, int8_worst, w8a16_worst, dense_worst);
  return int8_worst < 1e-7 && w8a16_worst < 1e-6 && dense_worst < 1e-6 ? 0 : 1;  // int8's sums are exact, the others' of float32
}
