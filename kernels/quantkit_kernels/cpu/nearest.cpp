// Groups of weights: their extremes, the best of several scales, and the nearest values of the grid. PyTorch reads all weights a dozen times for each
// scale. Compiled without contraction, and sums are PyTorch's own, so the results have its bits.

#include "levels.h"

namespace {

constexpr int kSign = (int)0x80000000;
constexpr int kTorch = 8, kTogether = 4 * kTorch;  // numbers in a vector of PyTorch's sums on every processor, of which four wait for each other
constexpr int kParts = kTogether / kLanes, kLevels = 4;

// Sum of a row in PyTorch's order (aten/src/ATen/native/cpu/SumKernel.cpp). `at(i)`: vector from the i-th number on.
template <class At> float sum_of(int width, At at) {
  Vector sums[kLevels][kParts] = {};
  const int size = width / kTogether;
  int bits = 0;
  while (1 << bits < size) ++bits;
  const int power = std::max(4, bits / kLevels), step = 1 << power;
  int i = 0;
  const auto add = [&] {
    for (int k = 0; k < kParts; ++k) sums[0][k] += at(i * kTogether + k * kLanes);
    ++i;
  };
  while (i + step <= size) {
    for (int j = 0; j < step; ++j) add();
    for (int level = 1; level < kLevels; ++level) {
      for (int k = 0; k < kParts; ++k) {
        sums[level][k] += sums[level - 1][k];
        sums[level - 1][k] = Vector{};
      }
      if (i & ((step - 1) << (level * power))) break;
    }
  }
  while (i < size) add();
  float known[kTogether], rest[kTogether];
  for (int k = 0; k < kParts; ++k) {
    for (int level = 1; level < kLevels; ++level) sums[0][k] += sums[level][k];
    store(known + k * kLanes, sums[0][k]);
  }
  const int left = width % kTogether;
  for (int k = 0; k < left; k += kLanes) store(rest + k, at(size * kTogether + k));
  float total = 0.f;
  for (int lane = 0; lane < kTorch; ++lane) {
    float own = known[lane];
    for (int k = lane; k < left; k += kTorch) own += rest[k];
    for (int k = lane + kTorch; k < kTogether; k += kTorch) own += known[k];
    total += own;
  }
  return total;
}

template <Grid G> inline Vector nearest(Vector w, float scale, float zero, float low, float high) {
  const Vector none = {}, level = w / (none + scale), value = snapped<G>(level, none + zero, low, high);
  return (G == kIntegerWithZero ? value : (Vector)((Bits)value | ((Bits)level & kSign))) * scale;  // a zero keeps its sign
}

template <Grid G> float squared_error(const float* w, const float* importance, int width, float scale, float zero, float low, float high) {
  return sum_of(width, [&](int i) {
    const Vector own = load(w + i), error = nearest<G>(own, scale, zero, low, high) - own, squared = error * error;
    return importance ? squared * load(importance + i) : squared;
  });
}

template <class Use> void by_grid(int grid, Use use) {
  if (grid == kE4m3) return use(std::integral_constant<Grid, kE4m3>());
  if (grid == kE2m1) return use(std::integral_constant<Grid, kE2m1>());
  if (grid == kIntegerWithZero) return use(std::integral_constant<Grid, kIntegerWithZero>());
  use(std::integral_constant<Grid, kInteger>());
}

}  // namespace

// weights [batch][groups][rows][width] by their strides, the last 1, width a multiple of a vector's -> least and largest of each group [batch][groups]
// [rows][2]; NaN for a group that has one.
extern "C" void qk_extremes(const float* weights, float* extremes, int batch, int groups, int rows, int width, int batch_apart, int group_apart,
                            int row_apart, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int b = 0; b < batch; ++b)
    for (int row = 0; row < rows; ++row)
      for (int g = 0; g < groups; ++g) {
        const float* w = weights + (int64_t)b * batch_apart + (int64_t)g * group_apart + (int64_t)row * row_apart;
        Vector low = load(w), high = low;
        Bits none = low != low;
        for (int at = kLanes; at < width; at += kLanes) {
          const Vector own = load(w + at);
          low = least(own, low), high = most(own, high), none |= own != own;
        }
        float* found = extremes + 2 * (((int64_t)b * groups + g) * rows + row);
        found[0] = low[0], found[1] = high[0];
        bool is_none = none[0];
        for (int lane = 1; lane < kLanes; ++lane) {
          found[0] = std::min(found[0], low[lane]), found[1] = std::max(found[1], high[lane]);
          is_none |= none[lane] != 0;
        }
        if (is_none) found[0] = found[1] = __builtin_nanf("");
      }
}

// Of scales and zeros [candidates][batch][groups][rows] those with the least squared error of a group, weighed by importance [batch][groups][width] by
// its strides if it is given; the first of equals. zeros, best_zero: of integers with zero points.
extern "C" void qk_best_scale(const float* weights, const float* scales, const float* zeros, const float* importance, float* best_scale, float* best_zero,
                              int grid, int candidates, int batch, int groups, int rows, int width, int batch_apart, int group_apart, int row_apart,
                              int importance_batch, int importance_group, int low, int high, int threads) {
  by_grid(grid, [=](auto kind) {
    const int64_t all = (int64_t)batch * groups * rows;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int b = 0; b < batch; ++b)
      for (int row = 0; row < rows; ++row)
        for (int g = 0; g < groups; ++g) {
          const float* w = weights + (int64_t)b * batch_apart + (int64_t)g * group_apart + (int64_t)row * row_apart;
          const float* weight = importance ? importance + (int64_t)b * importance_batch + (int64_t)g * importance_group : nullptr;
          const int64_t at = ((int64_t)b * groups + g) * rows + row;
          int best = 0;
          float least_error = 0.f;
          for (int c = 0; c < candidates; ++c) {
            const float zero = zeros ? zeros[c * all + at] : 0.f;
            const float error = squared_error<kind.value>(w, weight, width, scales[c * all + at], zero, low, high);
            if (c == 0 || error < least_error) least_error = error, best = c;
          }
          best_scale[at] = scales[best * all + at];
          if (zeros) best_zero[at] = zeros[best * all + at];
        }
  });
}

// values [batch][rows][groups][width]: the nearest for scales and zeros [batch][groups][rows].
extern "C" void qk_nearest(const float* weights, const float* scales, const float* zeros, float* values, int grid, int batch, int groups, int rows,
                           int width, int batch_apart, int group_apart, int row_apart, int low, int high, int threads) {
  by_grid(grid, [=](auto kind) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int b = 0; b < batch; ++b)
      for (int row = 0; row < rows; ++row)
        for (int g = 0; g < groups; ++g) {
          const float* w = weights + (int64_t)b * batch_apart + (int64_t)g * group_apart + (int64_t)row * row_apart;
          const int64_t at = ((int64_t)b * groups + g) * rows + row;
          float* to = values + (((int64_t)b * rows + row) * groups + g) * width;
          for (int i = 0; i < width; i += kLanes)
            store(to + i, nearest<kind.value>(load(w + i), scales[at], zeros ? zeros[at] : 0.f, low, high));
        }
  });
}
