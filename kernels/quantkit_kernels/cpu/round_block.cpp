// A block of GPTQ's columns, rounded one after the other: each is changed for the errors of those before it and snapped to its grid. Rows do not
// depend on each other, so a thread takes some and holds their errors in its cache.

#include <algorithm>

#include "levels.h"

namespace {

constexpr int kVectors = 4;  // sums that wait for each other's latency
constexpr int kRows = kVectors * kLanes;
constexpr int kColumns = 128;  // at most

// Some rows of a vector's length, of which `count` are there.
struct Part {
  float values[kRows];
  Part(const float* from, int count, float rest) {
    std::copy_n(from, count, values);
    std::fill(values + count, values + kRows, rest);
  }
};

// Tensors of one matrix: float32 [columns][rows], step and zero [groups][rows], group and pivot [columns]. Of a batch, the next one's begins
// `apart` numbers later.
struct Block {
  const float *target, *reaction, *step, *zero, *pivot, *before;
  const int64_t* group;
  float *values, *difference, *factored;  // `before` may be `values`; `factored` is null if it is not asked for
};

// Up to kRows rows of one matrix, the first of which is `first`.
template <Grid G> void round_rows(const Block& block, int columns, int rows, int first, float low, float high) {
  const int count = std::min(kRows, rows - first);
  alignas(64) float errors[kColumns][kRows];
  for (int i = 0; i < columns; ++i) {
    const int64_t at = (int64_t)i * rows + first, own = block.group[i] * rows + first;
    const Part from(block.target + at, count, 0.f), steps(block.step + own, count, 1.f);
    const Part zeros((G == kIntegerWithZero ? block.zero : block.step) + own, count, 0.f), before(block.before + at, count, 0.f);
    Vector here[kVectors];
    for (int v = 0; v < kVectors; ++v) here[v] = load(from.values + v * kLanes);
    const float* coefficients = block.reaction + (int64_t)i * columns;
    for (int j = 0; j < i; ++j)
      for (int v = 0; v < kVectors; ++v) here[v] += coefficients[j] * load(errors[j] + v * kLanes);
    float found[kRows], change[kRows], factored[kRows];
    for (int v = 0; v < kVectors; ++v) {
      const Vector size = load(steps.values + v * kLanes);
      const Vector value = snapped<G>(here[v] / size, load(zeros.values + v * kLanes), low, high) * size, error = here[v] - value;
      store(found + v * kLanes, value);
      store(change + v * kLanes, load(before.values + v * kLanes) - value);
      store(errors[i] + v * kLanes, error);
      if (block.factored) store(factored + v * kLanes, error * block.pivot[i]);
    }
    std::copy_n(found, count, block.values + at);
    std::copy_n(change, count, block.difference + at);
    if (block.factored) std::copy_n(factored, count, block.factored + at);
  }
}

}  // namespace

// target [batch, columns, rows]; reaction [batch, columns, columns], by how much column i changes for an error of 1 in column j; step and zero
// [groups, rows], group [columns] and pivot [batch, columns]; before, values, difference and factored [columns, rows] of each matrix. grid: 0 integers
// from low to high, 1 with zero points, 2 E2M1, 3 e4m3.
extern "C" void qk_round_block(const float* target, const float* reaction, const float* step, const float* zero, const int64_t* group, const float* pivot,
                               const float* before, float* values, float* difference, float* factored, int grid, int batch, int columns, int rows,
                               int step_apart, int group_apart, int before_apart, int values_apart, int difference_apart, int factored_apart, int low,
                               int high, int threads) {
  const int parts = (rows + kRows - 1) / kRows;
  const auto round = grid == kE4m3 ? round_rows<kE4m3> : grid == kE2m1 ? round_rows<kE2m1> : grid == kIntegerWithZero ? round_rows<kIntegerWithZero> : round_rows<kInteger>;
#pragma omp parallel for num_threads(threads)
  for (int part = 0; part < batch * parts; ++part) {
    const int64_t m = part / parts;
    const Block own = {target + m * columns * rows, reaction + m * columns * columns, step + m * step_apart, zero + m * step_apart,
                       factored ? pivot + m * columns : nullptr, before + m * before_apart, group + m * group_apart, values + m * values_apart,
                       difference + m * difference_apart, factored ? factored + m * factored_apart : nullptr};
    round(own, columns, rows, part % parts * kRows, (float)low, (float)high);
  }
}
