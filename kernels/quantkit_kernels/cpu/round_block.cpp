// A block of GPTQ's columns, rounded one after the other: each is changed for the errors of those before it and snapped to its grid. Rows do not
// depend on each other, so a thread takes some and holds their errors in its cache.

#include <algorithm>

#include "vectors.h"

namespace {

enum Grid { kInteger, kIntegerWithZero, kE2m1, kE4m3 };
constexpr int kVectors = 4;  // sums that wait for each other's latency
constexpr int kRows = kVectors * kLanes;
constexpr int kColumns = 128;  // at most
constexpr float kE2m1Max = 6.f, kE4m3Max = 448.f;

inline Vector least(Vector a, Vector b) { return a > b ? b : a; }  // NaN of a stays
inline Vector most(Vector a, Vector b) { return a < b ? b : a; }
inline Vector whole(Vector x) { return (x + 12582912.f) - 12582912.f; }  // ties to even; |x| below 2^22
inline Vector size_of(Vector x) { return (Vector)((Bits)x & 0x7fffffff); }

// Clamped before it is rounded, which is the same where the ends are whole levels.
template <Grid G> inline Vector snapped(Vector level, Vector zero, float low, float high) {
  const Vector none = {};
  if (G == kE2m1) {
    level = least(most(level, none - kE2m1Max), none + kE2m1Max);
    const Vector size = size_of(level), spacing = size < 2.f ? none + 0.5f : size < 4.f ? none + 1.f : none + 2.f;
    return whole(level / spacing) * spacing;
  }
  if (G == kE4m3) {  // an eighth of the level's power of two, at least 2^-9
    level = least(most(level, none - kE4m3Max), none + kE4m3Max);
    const Vector eighth = (Vector)(((Bits)level & 0x7f800000) - (3 << 23)), least_one = none + 0x1p-9f;
    const Vector spacing = (Bits)eighth > (Bits)least_one ? eighth : least_one;
    return whole(level / spacing) * spacing;
  }
  const Vector shift = G == kIntegerWithZero ? zero : none;
  return whole(least(most(level, low - shift), high - shift));
}

// Some rows of a vector's length, of which `count` are there.
struct Part {
  float values[kRows];
  Part(const float* from, int count, float rest) {
    std::copy_n(from, count, values);
    std::fill(values + count, values + kRows, rest);
  }
};

// Up to kRows rows [columns][rows] of one matrix.
template <Grid G>
void round_rows(const float* target, const float* reaction, const float* step, const float* zero, float* values, float* missed, int columns, int rows,
                int count, float low, float high) {
  alignas(64) float errors[kColumns][kRows];
  for (int i = 0; i < columns; ++i) {
    const int64_t at = (int64_t)i * rows;
    const Part from(target + at, count, 0.f), steps(step + at, count, 1.f), zeros(G == kIntegerWithZero ? zero + at : step + at, count, 0.f);
    Vector here[kVectors];
    for (int v = 0; v < kVectors; ++v) here[v] = load(from.values + v * kLanes);
    const float* coefficients = reaction + (int64_t)i * columns;
    for (int j = 0; j < i; ++j)
      for (int v = 0; v < kVectors; ++v) here[v] += coefficients[j] * load(errors[j] + v * kLanes);
    float found[kRows];
    for (int v = 0; v < kVectors; ++v) {
      const Vector size = load(steps.values + v * kLanes);
      const Vector value = snapped<G>(here[v] / size, load(zeros.values + v * kLanes), low, high) * size;
      store(found + v * kLanes, value);
      store(errors[i] + v * kLanes, here[v] - value);
    }
    std::copy_n(found, count, values + at);
    std::copy_n(errors[i], count, missed + at);
  }
}

}  // namespace

// target, step, zero, missed [batch, columns, rows]; reaction [batch, columns, columns], by how much column i changes for an error of 1 in column j;
// values [columns, rows] of each matrix, `apart` numbers from one to the next. grid: 0 integers from low to high, 1 with zero points, 2 E2M1, 3 e4m3.
extern "C" void qk_round_block(const float* target, const float* reaction, const float* step, const float* zero, float* values, float* missed, int grid,
                               int batch, int columns, int rows, int apart, int low, int high, int threads) {
  const int parts = (rows + kRows - 1) / kRows;
  const auto round = grid == kE4m3 ? round_rows<kE4m3> : grid == kE2m1 ? round_rows<kE2m1> : grid == kIntegerWithZero ? round_rows<kIntegerWithZero> : round_rows<kInteger>;
#pragma omp parallel for num_threads(threads)
  for (int part = 0; part < batch * parts; ++part) {
    const int64_t matrix = part / parts, first = (int64_t)(part % parts) * kRows, own = matrix * columns * rows + first;
    round(target + own, reaction + matrix * columns * columns, step + own, zero + own, values + matrix * apart + first, missed + own, columns, rows,
          (int)std::min<int64_t>(kRows, rows - first), (float)low, (float)high);
  }
}
