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
extern "C" void qk_int4_rows(const uint8_t*, const void*, const void*, void*, int, int, int, int, int, int, int, int);

namespace {

// Of y[m][n] off the product of x and w in float64, the worst, as a part of the sum of magnitudes.
template <class X, class W> double worst(const std::vector<float>& y, int m, int n, int k, const X& x, const W& w) {
  double found = 0;
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < k; ++i) {
        const double product = (double)x(row, i) * w(column, i);
        sum += product, magnitude += fabs(product);
      }
      found = std::max(found, fabs(y[row * n + column] - sum) / magnitude);
    }
  return found;
}

// Int4 in groups of 32, in blocks of 32 rows as int4.cpp says, the last of fewer.
double int4_worst(std::mt19937& rng) {
  constexpr int group = 32, block = 32;
  std::normal_distribution<float> normal;
  double most = 0;
  for (const auto& [m, n, k] : std::vector<std::array<int, 3>>{{1, 64, 512}, {5, 48, 96}, {17, 80, 384}, {9, 16, 32}}) {
    std::vector<uint8_t> codes(n * k), packed(n * k / 2);
    std::vector<float> sides(k / group * n * 2), x(m * k), y(m * n);
    for (auto& one : codes) one = rng() % 16;
    for (auto& one : sides) one = normal(rng);
    for (auto& one : x) one = normal(rng);
    for (int first = 0, at = 0; first < n; first += block)
      for (int i = 0, rows = std::min(block, n - first); i < k; ++i)
        for (int byte = 0; byte < rows / 2; ++byte, ++at) {
          const int low = first + (rows == block ? byte : 2 * byte), high = low + (rows == block ? block / 2 : 1);
          packed[at] = codes[low * k + i] | codes[high * k + i] << 4;
        }
    qk_int4_rows(packed.data(), sides.data(), x.data(), y.data(), 0, 0, m, n, k, group, block, 1);
    const auto weight = [&, n = n, k = k](int column, int i) {
      const float* side = &sides[(i / group * n + column) * 2];
      return (codes[column * k + i] - 8.0) * side[0] + side[1];
    };
    most = std::max(most, worst(y, m, n, k, [&, k = k](int row, int i) { return x[row * k + i]; }, weight));
  }
  return most;
}

}  // namespace

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
    const auto weight = [&, k = k](int column, int i) { return (double)codes[column * k + i] * scale[column]; };
    const auto given = [&, k = k](int row, int i) { return x[row * k + i]; };
    std::vector<double> rounded(m * k);
    for (int row = 0; row < m; ++row) {
      float most = 0;
      for (int i = 0; i < k; ++i) most = std::max(most, fabsf(x[row * k + i]));
      const float step = most / 127;
      for (int i = 0; i < k; ++i) rounded[row * k + i] = nearbyint(x[row * k + i] / step) * (double)step;
    }
    qk_int8_rows(codes.data(), scale.data(), x.data(), y.data(), m, n, k, 0, 1);
    int8_worst = std::max(int8_worst, worst(y, m, n, k, [&, k = k](int row, int i) { return rounded[row * k + i]; }, weight));
    qk_w8a16_linear(codes.data(), scale.data(), x.data(), y.data(), m, n, k, k, 1);
    w8a16_worst = std::max(w8a16_worst, worst(y, m, n, k, given, weight));
    qk_dense_rows(w.data(), x.data(), y.data(), 0, m, n, k, 1);
    dense_worst = std::max(dense_worst, worst(y, m, n, k, given, weight));
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  const char* form = "i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
  const char* form = "dot product";
#else
  const char* form = "portable";
#endif
  const double int4 = int4_worst(rng);
  printf("%s: int8 %.1e, int4 %.1e, w8a16 %.1e, dense %.1e of the sum of magnitudes\n", form, int8_worst, int4, w8a16_worst, dense_worst);
  // int8's sums are exact and rounded three times, by 2^-24 each; the others' are of float32.
  return int8_worst < 1.8e-7 && int4 < 1e-6 && w8a16_worst < 1e-6 && dense_worst < 1e-6 ? 0 : 1;
}
