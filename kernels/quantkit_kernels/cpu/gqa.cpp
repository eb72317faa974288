// Grouped-query attention of one query per row over the paged cache, in float32: a key is read where it lies, once for all heads that share
// it. In 8 bits it is a code, whose scale multiplies the score, or the probability, once. Rows are many threads' work by key head, and where those are fewer than the threads, by parts of the tokens too.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

struct Half { uint16_t bits; };  // bfloat16
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

inline float dot(const float* a, const float* b, int size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

struct Pages {
  const int* table;  // of the row
  int block_size, kv_heads, d;
  int64_t row(int token, int kv_head) const { return ((int64_t)table[token / block_size] * block_size + token % block_size) * kv_heads + kv_head; }
};

// Keys or values [.., kv_heads, d]; scales [.., kv_heads] of codes, else null.
template <class T> struct Side {
  const T* numbers;
  const float* scales;
  float scale(int64_t row) const { return scales ? scales[row] : 1.f; }
};

// Tokens begin .. end of one key head for `shared` queries. found: of each query the sums [d], the largest score and the sum of e^(score - largest).
template <class T> void attend(const float* q, const Side<T>& keys, const Side<T>& values, const Pages& pages, int kv_head, int begin, int end, int shared, float* found) {
  const int d = pages.d, count = end - begin, stride = d + 2;
  std::vector<float> scores((size_t)shared * count), wide(d);
  for (int t = 0; t < count; ++t) {
    const int64_t row = pages.row(begin + t, kv_head);
    const T* key = keys.numbers + row * d;
    const float scale = keys.scale(row);
#pragma omp simd
    for (int i = 0; i < d; ++i) wide[i] = widened(key[i]);
    for (int h = 0; h < shared; ++h) scores[(size_t)h * count + t] = dot(q + (size_t)h * d, wide.data(), d) * scale;
  }
  for (int h = 0; h < shared; ++h) {
    float *own = scores.data() + (size_t)h * count, *to = found + (size_t)h * stride, total = 0;
    const float top = *std::max_element(own, own + count);
    for (int t = 0; t < count; ++t) total += own[t] = expf(own[t] - top);
    std::fill(to, to + d, 0.f);
    to[d] = top, to[d + 1] = total;
  }
  for (int t = 0; t < count; ++t) {
    const int64_t row = pages.row(begin + t, kv_head);
    const T* value = values.numbers + row * d;
    const float scale = values.scale(row);
#pragma omp simd
    for (int i = 0; i < d; ++i) wide[i] = widened(value[i]);
    for (int h = 0; h < shared; ++h) {
      const float weight = scores[(size_t)h * count + t] * scale;
      float* to = found + (size_t)h * stride;
#pragma omp simd
      for (int i = 0; i < d; ++i) to[i] += weight * wide[i];
    }
  }
}

template <class T>
void decode(const float* q, const Side<T>& keys, const Side<T>& values, const int* tables, const int* lengths, const float* sinks, float* out, int rows, int kv_heads, int shared, int d, int block_size,
            int table_width, int window, int threads) {
  const int units = rows * kv_heads, parts = std::max(1, threads / units), stride = d + 2;
  std::vector<float> found((size_t)units * parts * shared * stride);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int unit = 0; unit < units; ++unit)
    for (int part = 0; part < parts; ++part) {
      const int row = unit / kv_heads, kv_head = unit % kv_heads, first = window ? std::max(0, lengths[row] - window) : 0;
      const int64_t tokens = lengths[row] - first;
      const int begin = first + int(tokens * part / parts), end = first + int(tokens * (part + 1) / parts);
      float* here = found.data() + ((size_t)unit * parts + part) * shared * stride;
      const Pages pages = {tables + (int64_t)row * table_width, block_size, kv_heads, d};
      for (int h = 0; h < shared; ++h) here[(size_t)h * stride + d] = -INFINITY;
      if (end > begin) attend(q + (size_t)unit * shared * d, keys, values, pages, kv_head, begin, end, shared, here);
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

// sinks null or [kv_heads * shared]: the score of a key without a value. q, out [rows, kv_heads * shared, d], q times the scale; caches
// [.., block_size, kv_heads, d] of kind 0 bfloat16, 1 float32, 2 int8 or 3 E4M3, the latter two with scales [.., block_size, kv_heads]; tables
// [rows, table_width].
extern "C" void qk_gqa_decode(const float* q, const void* keys, const void* values, const int* tables, const int* lengths, const float* sinks, float* out, const float* key_scales,
                              const float* value_scales, int kind, int rows, int kv_heads, int shared, int d, int block_size, int table_width, int window, int threads) {
  const auto run = [&](auto* like) {
    using T = std::remove_pointer_t<decltype(like)>;
    decode<T>(q, {(const T*)keys, key_scales}, {(const T*)values, value_scales}, tables, lengths, sinks, out, rows, kv_heads, shared, d, block_size, table_width, window, threads);
  };
  if (kind == 0) run((Half*)nullptr);
  else if (kind == 1) run((float*)nullptr);
  else if (kind == 2) run((int8_t*)nullptr);
  else run((Fp8*)nullptr);
}
