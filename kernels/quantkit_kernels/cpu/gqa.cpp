// Grouped-query attention of one query per row over the paged cache, in float32: a key is read where it lies, once for all heads that share
// it. In 8 bits it is a code, whose scale multiplies the score, or the probability, once. Rows are many threads' work by key head and by parts of the tokens, whose number is that of a row's own length, so that no row depends on the others nor on the threads.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

inline float widened(float x) { return x; }
inline float widened(Half x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float widened(int8_t x) { return x; }
struct Fp8 { uint8_t bits; };  // E4M3
inline float widened(Fp8 x) {  // the bits below the sign lie where a float32 has them, 2^120 too small
  const uint32_t bits = (uint32_t)(x.bits & 0x80) << 24 | (uint32_t)(x.bits & 0x7f) << 20;
  float value;
  memcpy(&value, &bits, 4);
  return value * 0x1p120f;
}

constexpr int kTokens = 32;  // whose values are widened at a time
inline int padded(int size) { return (size + kLanes - 1) / kLanes * kLanes; }

// The scores of one key for H queries [H][wide], into scores[h * stride].
template <int H> inline void score(const float* q, const float* key, int wide, float scale, float* scores, int64_t stride) {
  constexpr int count = (H + 3) / 4 * 4;
  Vector sum[count];
#pragma GCC unroll 8
  for (int h = 0; h < count; ++h) sum[h] = Vector{};
  for (int i = 0; i < wide; i += kLanes) {
    const Vector one = load(key + i);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) sum[h] += load(q + h * wide + i) * one;
  }
  float found[count];
  for (int h = 0; h < count; h += 4) totals(sum + h, found + h);
  for (int h = 0; h < H; ++h) scores[h * stride] = found[h] * scale;
}

// Adds `count` values [kTokens][wide], weighted by weights[h * stride + token], to out[H][wide].
template <int H> inline void add_values(const float* values, const float* weights, int64_t stride, int count, int wide, float* out) {
  for (int i = 0; i < wide; i += kLanes) {
    Vector sum[H];
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) sum[h] = load(out + h * wide + i);
    for (int t = 0; t < count; ++t) {
      const Vector one = load(values + t * wide + i);
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) sum[h] += weights[h * stride + t] * one;
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) store(out + h * wide + i, sum[h]);
  }
}

// Scores [count] become e^(score - largest); their room ends with a whole vector.
inline void exponentials(float* scores, int count, float& top, float& total) {
  const int whole = padded(count);
  std::fill(scores + count, scores + whole, -INFINITY);
  Vector largest = load(scores), sum{};
  for (int i = kLanes; i < whole; i += kLanes) {
    const Vector one = load(scores + i);
    largest = one > largest ? one : largest;
  }
  top = largest[0], total = 0;
  for (int i = 1; i < kLanes; ++i) top = std::max(top, largest[i]);
  for (int i = 0; i < whole; i += kLanes) store(scores + i, exponential(load(scores + i) - top));
  std::fill(scores + count, scores + whole, 0.f);
  for (int i = 0; i < whole; i += kLanes) sum += load(scores + i);
  for (int i = 0; i < kLanes; ++i) total += sum[i];
}

struct Pages {
  const int* table;  // of the row
  int block_size, kv_heads, d;
  // use(token - begin, its row) of tokens begin .. end, page by page.
  template <class Use> void each(int begin, int end, int kv_head, Use use) const {
    for (int token = begin; token < end;) {
      const int within = token % block_size, stop = std::min(end, token - within + block_size);
      int64_t row = ((int64_t)table[token / block_size] * block_size + within) * kv_heads + kv_head;
      for (; token < stop; ++token, row += kv_heads) use(token - begin, row);
    }
  }
};

// Keys or values [.., kv_heads, d]; scales [.., kv_heads] of codes, else null.
template <class T> struct Side {
  const T* numbers;
  const float* scales;
  float scale(int64_t row) const { return scales ? scales[row] : 1.f; }
};

template <class T> inline void widen(const T* from, float* to, int d) {
  if constexpr (std::is_same_v<T, Half>)
    if (d % kLanes == 0) {
      for (int i = 0; i < d; i += kLanes) store(to + i, load(from + i));
      return;
    }
#pragma omp simd
  for (int i = 0; i < d; ++i) to[i] = widened(from[i]);
}

constexpr int kAhead = 16;  // tokens whose keys are fetched before they are needed: they lie apart, by the other heads
template <class T> inline void fetch(const T* from, int d) {
  for (int i = 0; i < d; i += 64 / (int)sizeof(T)) __builtin_prefetch(from + i);
}

// Tokens begin .. end of one key head for H queries. found: of each query the sums [d], the largest score and the sum of e^(score - largest).
template <int H, class T> void attend(const float* q, const Side<T>& keys, const Side<T>& values, const Pages& pages, int kv_head, int begin, int end, int shared, float* found) {
  const int d = pages.d, count = end - begin, wide = padded(d), room = padded(count);
  std::vector<float> queries((size_t)H * wide), scores((size_t)H * room), some((size_t)kTokens * wide), sums((size_t)H * wide);
  for (int h = 0; h < shared; ++h) std::copy_n(q + (size_t)h * d, d, queries.data() + (size_t)h * wide);
  pages.each(begin, std::min(end, begin + kAhead), kv_head, [&](int, int64_t row) { fetch(keys.numbers + row * d, d); });
  pages.each(begin, end, kv_head, [&](int t, int64_t row) {
    fetch(keys.numbers + (row + kAhead * pages.kv_heads) * d, d);
    fetch(values.numbers + row * d, d);
    widen(keys.numbers + row * d, some.data(), d);
    score<H>(queries.data(), some.data(), wide, keys.scale(row), scores.data() + t, room);
  });
  for (int h = 0; h < shared; ++h) {
    float* to = found + (size_t)h * (d + 2);
    exponentials(scores.data() + (size_t)h * room, count, to[d], to[d + 1]);
  }
  for (int first = 0; first < count; first += kTokens) {
    const int now = std::min(kTokens, count - first);
    pages.each(begin + first, begin + first + now, kv_head, [&](int t, int64_t row) {
      widen(values.numbers + row * d, some.data() + (size_t)t * wide, d);
      if (values.scales)
        for (int h = 0; h < shared; ++h) scores[(size_t)h * room + first + t] *= values.scale(row);
    });
    add_values<H>(some.data(), scores.data() + first, room, now, wide, sums.data());
  }
  for (int h = 0; h < shared; ++h) std::copy_n(sums.data() + (size_t)h * wide, d, found + (size_t)h * (d + 2));
}

// Eight queries at most at a time.
template <class T> void attend_all(const float* q, const Side<T>& keys, const Side<T>& values, const Pages& pages, int kv_head, int begin, int end, int shared, float* found) {
  for (int now; shared; shared -= now, q += now * pages.d, found += now * (pages.d + 2)) {
    now = std::min(shared, 8);
    const auto attended = now > 4 ? attend<8, T> : now > 3 ? attend<4, T> : now > 2 ? attend<3, T> : now > 1 ? attend<2, T> : attend<1, T>;
    attended(q, keys, values, pages, kv_head, begin, end, now, found);
  }
}

int parts_of(int64_t tokens) { return int(std::clamp<int64_t>(tokens / 256, 1, 16)); }

template <class T>
void decode(const float* q, const Side<T>& keys, const Side<T>& values, const int* tables, const int64_t* lengths, const float* sinks, float* out, int rows, int kv_heads, int shared, int d, int block_size,
            int table_width, int window, int threads) {
  const auto first_of = [&](int row) { return window ? (int)std::max<int64_t>(0, lengths[row] - window) : 0; };
  int parts = 1;
  for (int row = 0; row < rows; ++row) parts = std::max(parts, parts_of(lengths[row] - first_of(row)));
  const int units = rows * kv_heads, stride = d + 2;
  std::vector<float> found((size_t)units * parts * shared * stride);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int unit = 0; unit < units; ++unit)
    for (int part = 0; part < parts; ++part) {
      const int row = unit / kv_heads, kv_head = unit % kv_heads, first = first_of(row);
      const int64_t tokens = lengths[row] - first, own = parts_of(tokens);
      const int begin = first + int(tokens * std::min<int64_t>(part, own) / own), end = first + int(tokens * std::min<int64_t>(part + 1, own) / own);
      float* here = found.data() + ((size_t)unit * parts + part) * shared * stride;
      const Pages pages = {tables + (int64_t)row * table_width, block_size, kv_heads, d};
      for (int h = 0; h < shared; ++h) here[(size_t)h * stride + d] = -INFINITY;
      if (end > begin) attend_all(q + (size_t)unit * shared * d, keys, values, pages, kv_head, begin, end, shared, here);
    }
#pragma omp parallel for num_threads(threads)
  for (int head = 0; head < units * shared; ++head) {
    const float* own = found.data() + ((size_t)(head / shared) * parts * shared + head % shared) * stride;
    float *to = out + (size_t)head * d, top = -INFINITY, total = 0;
    std::fill(to, to + d, 0.f);
    const auto of = [&](int part) { return own + (size_t)part * shared * stride; };
    for (int part = 0; part < parts; ++part) top = std::max(top, of(part)[d]);
    if (top == -INFINITY) continue;  // a row without tokens
    if (sinks) {  // one more key, whose value is zero
      const float sink = sinks[head % (kv_heads * shared)];
      top = std::max(top, sink), total = expf(sink - top);
    }
    for (int part = 0; part < parts; ++part) total += expf(of(part)[d] - top) * of(part)[d + 1];
    for (int part = 0; part < parts; ++part) {
      const float share = expf(of(part)[d] - top) / total;
      const float* from = of(part);
      if (share == 0) continue;
#pragma omp simd
      for (int i = 0; i < d; ++i) to[i] += share * from[i];
    }
  }
}

}  // namespace

// sinks null or [kv_heads * shared]: the score of a key without a value. q, out [rows, kv_heads * shared, d], bfloat16 where `half`, else float32;
// caches [.., block_size, kv_heads, d] of kind 0 bfloat16, 1 float32, 2 int8 or 3 E4M3, the latter two with scales [.., block_size, kv_heads];
// tables [rows, table_width].
extern "C" void qk_gqa_decode(const void* q, const void* keys, const void* values, const int* tables, const int64_t* lengths, const float* sinks, void* out, const float* key_scales,
                              const float* value_scales, int half, int kind, int rows, int kv_heads, int shared, int d, int block_size, int table_width, int window, int threads, float scale) {
  const int count = rows * kv_heads * shared * d;
  std::vector<float> queries(count), attended(half ? count : 0);
  by_vectors(count, [&](int i, int some_of) {
    put(queries.data() + i, (half ? some((const Half*)q + i, some_of) : some((const float*)q + i, some_of)) * scale, some_of);
  });
  float* found = half ? attended.data() : (float*)out;
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    decode<T>(queries.data(), {(const T*)keys, key_scales}, {(const T*)values, value_scales}, tables, lengths, sinks, found, rows, kv_heads, shared, d, block_size, table_width, window,
              threads);
  };
  if (kind == 0) run((Half*)nullptr);
  else if (kind == 1) run((float*)nullptr);
  else if (kind == 2) run((int8_t*)nullptr);
  else run((Fp8*)nullptr);
  if (half) by_vectors(count, [&](int i, int some_of) { put((Half*)out + i, some(found + i, some_of), some_of); });
}
