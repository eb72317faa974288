// Causal attention of a prompt's newest tokens in float32: some queries over some keys at a time, whose running maximum, sum and weighted
// values (online softmax, arXiv 2112.05682) are kept from call to call. Queries that share a key head are rows of one product. Both products
// of a block are of packed columns that lie side by side, so that a tile of rows by columns stays in registers.

#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif
constexpr int kColumns = kLanes * kVectors, kTile = 6, kRows = 8 * kTile, kKeys = 256;

inline int padded(int size, int to) { return (size + to - 1) / to * to; }

// c[kTile, kColumns] = a[kTile, depth] b[depth, kColumns], added to what is in c where ADD.
template <bool ADD> inline void multiply(const float* a, int of_a, const float* b, int depth, float* c, int of_c) {
  Vector sum[kTile][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = ADD ? load(c + r * of_c + v * kLanes) : Vector{};
  for (int k = 0; k < depth; ++k, b += kColumns) {
    Vector columns[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) columns[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += a[r * of_a + k] * columns[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTile; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(c + r * of_c + v * kLanes, sum[r][v]);
}

// Scores of a row become weights: those of keys `low` .. `high` of `count`, 0 elsewhere. Returns what sums before are worth, next to these.
inline float weigh(float* row, int low, int high, int count, float& best, float& total) {
  if (high <= low) {
    std::fill(row, row + count, 0.f);
    return 1.f;
  }
  std::fill(row, row + low, -INFINITY);
  std::fill(row + high, row + count, -INFINITY);
  Vector largest = load(row);
  for (int i = kLanes; i < count; i += kLanes) {
    const Vector one = load(row + i);
    largest = one > largest ? one : largest;
  }
  float top = best;
  for (int i = 0; i < kLanes; ++i) top = std::max(top, largest[i]);
  for (int i = 0; i < count; i += kLanes) store(row + i, exponential(load(row + i) - top));
  std::fill(row, row + low, 0.f);
  std::fill(row + high, row + count, 0.f);
  Vector sum{};
  for (int i = 0; i < count; i += kLanes) sum += load(row + i);
  const float shrink = expf(best - top);
  best = top, total *= shrink;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  return shrink;
}

struct Sizes {
  int queries, before, keys, kv_heads, shared, d, e, window;
  int heads() const { return kv_heads * shared; }
};

// Columns of x[count, kv_heads, width] of one head, kColumns side by side, the rest 0. Keys: [keys / kColumns][d][kColumns]; values:
// [e / kColumns][keys][kColumns].
void pack(const float* k, const float* v, const Sizes& s, int head, float* keys, float* values) {
  const int seen = padded(s.keys, kColumns);
  for (int t = 0; t < s.keys; ++t) {
    const float *key = k + ((int64_t)t * s.kv_heads + head) * s.d, *value = v + ((int64_t)t * s.kv_heads + head) * s.e;
    float* to = keys + (int64_t)(t / kColumns) * s.d * kColumns + t % kColumns;
    for (int i = 0; i < s.d; ++i) to[(int64_t)i * kColumns] = key[i];
    for (int i = 0; i < s.e; ++i) values[((int64_t)(i / kColumns) * seen + t) * kColumns + i % kColumns] = value[i];
  }
}

// Rows first .. first + kRows of [queries, shared] of one head; those beyond the last are zeros.
void attend(const float* q, const float* keys, const float* values, const Sizes& s, int head, int first, float* best, float* total, float* out) {
  const int rows = std::min(kRows, s.queries * s.shared - first), seen = padded(s.keys, kColumns), wide = padded(s.e, kColumns);
  std::vector<float> queries((size_t)kRows * s.d), sums((size_t)kRows * wide), scores(kRows * kKeys);
  const auto number = [&](int r) { return (int64_t)((first + r) / s.shared) * s.heads() + head * s.shared + (first + r) % s.shared; };
  for (int r = 0; r < rows; ++r) {
    std::copy_n(q + number(r) * s.d, s.d, queries.data() + (size_t)r * s.d);
    std::copy_n(out + number(r) * s.e, s.e, sums.data() + (size_t)r * wide);
  }
  // A query sees the keys below `high` of it. Keys before all windows, and after the newest query, are left out.
  const auto high = [&](int r) { return s.before + (first + r) / s.shared + 1; };
  const auto low = [&](int r) { return s.window ? std::max(0, high(r) - s.window) : 0; };
  for (int begin = low(0) / kKeys * kKeys, end = std::min(s.keys, high(rows - 1)); begin < end; begin += kKeys) {
    const int count = std::min(kKeys, padded(end - begin, kColumns));
    for (int c = 0; c < count; c += kColumns)
      for (int r = 0; r < rows; r += kTile)
        multiply<false>(queries.data() + (size_t)r * s.d, s.d, keys + (int64_t)(begin + c) * s.d, s.d, scores.data() + r * kKeys + c, kKeys);
    for (int r = 0; r < rows; ++r) {
      const auto within = [&](int key) { return std::clamp(key - begin, 0, count); };
      const float shrink = weigh(scores.data() + r * kKeys, within(low(r)), within(std::min(high(r), s.keys)), count, best[number(r)], total[number(r)]);
      if (shrink != 1)
        for (int i = 0; i < wide; i += kLanes) store(sums.data() + (size_t)r * wide + i, load(sums.data() + (size_t)r * wide + i) * shrink);
    }
    for (int c = 0; c < wide; c += kColumns)
      for (int r = 0; r < rows; r += kTile)
        multiply<true>(scores.data() + r * kKeys, kKeys, values + ((int64_t)c / kColumns * seen + begin) * kColumns, count, sums.data() + (size_t)r * wide + c, wide);
  }
  for (int r = 0; r < rows; ++r) std::copy_n(sums.data() + (size_t)r * wide, s.e, out + number(r) * s.e);
}

}  // namespace

// q[queries, heads, d], times the scale, of tokens before .. before + queries of those whose keys k[keys, kv_heads, d] and values
// v[keys, kv_heads, e] are given; `before` may be negative, where the first of them see none of these, or reach beyond the keys. window: keys
// that a query sees, 0 for all before it. best, total[queries, heads] and out[queries, heads, e] are of the keys before: the largest score,
// the sum of e^(score - largest), and the values weighted so.
extern "C" void qk_prompt_attend(const float* q, const float* k, const float* v, float* best, float* total, float* out, int queries, int before, int keys, int kv_heads, int shared,
                                 int d, int e, int window, int threads) {
  const Sizes s = {queries, before, keys, kv_heads, shared, d, e, window};
  const int64_t seen = padded(keys, kColumns), of_keys = seen * d, of_values = seen * padded(e, kColumns);
  std::vector<float> packed((size_t)((of_keys + of_values) * kv_heads));
  float *key_columns = packed.data(), *value_columns = key_columns + of_keys * kv_heads;
#pragma omp parallel for num_threads(threads)
  for (int head = 0; head < kv_heads; ++head) pack(k, v, s, head, key_columns + head * of_keys, value_columns + head * of_values);
  const int blocks = (queries * shared + kRows - 1) / kRows;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int unit = 0; unit < kv_heads * blocks; ++unit) {
    const int head = unit % kv_heads, block = blocks - 1 - unit / kv_heads;  // the longest first
    attend(q, key_columns + head * of_keys, value_columns + head * of_values, s, head, block * kRows, best, total, out);
  }
}
