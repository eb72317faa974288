// y[M, N] = (codes[M, K] @ W[N, K]^T) * step[M] * scale[N] for an int8 weight: every token's activations become int8 codes, steps of
// max|x| / 127 apart, halves to even. Sums are exact, in 32 bits. A weight is read as its holder lays it out:
//   rows    int8 [N][K], for any processor
//   blocks  int8 [N/B][K/4][B][4], B of 16 to 64 rows: oneDNN's own for VNNI, which multiplies four unsigned bytes by four signed ones and
//           adds them up. The activations' codes are 128 more there, and the sums of the weight's rows take that off

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <memory>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kZeroPoint = 128;  // of unsigned codes
constexpr int kAhead = 4096;     // bytes: what a core fetches unasked ends with the page

template <class To, class From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct Bfloat16 {
  uint16_t half;
  Bfloat16() = default;
  explicit Bfloat16(float value) : half((bits<uint32_t>(value) + 0x7fff + (bits<uint32_t>(value) >> 16 & 1)) >> 16) {}
  operator float() const { return bits<float>((uint32_t)half << 16); }
};

// A token's codes. Returns their step: 1 for zeros, NaN where an activation is not finite.
template <class X, class Code> float quantize(const X* x, Code* codes, int k) {
  constexpr int32_t kInfinity = 0x7f800000, kOffset = std::is_unsigned<Code>::value ? kZeroPoint : 0;
  int32_t most = 0;  // magnitudes are in the order of their bits, NaN above all
  for (int i = 0; i < k; ++i) {
    const int32_t magnitude = bits<int32_t>((float)x[i]) & INT32_MAX;
    most = magnitude > most ? magnitude : most;
  }
  const float share = bits<float>(most) / 127, step = most >= kInfinity ? NAN : share == 0 ? 1.f : share;
  // Added to 1.5 * 2^23 a number is rounded, halves to even, and stands in the lowest bits of the sum.
  constexpr float kRounding = 12582912.f;
  const int32_t rounding = bits<int32_t>(kRounding);
  for (int i = 0; i < k; ++i) {
    const int32_t code = bits<int32_t>((float)x[i] / step + kRounding) - rounding;
    codes[i] = (Code)((code > 127 ? 127 : code < -127 ? -127 : code) + kOffset);  // a subnormal step is no exact 127th
  }
  return step;
}

#if defined(__AVX2__)
// Products of bytes, added in pairs, would saturate in 16 bits: both sides are that wide before.
struct Lanes {
  static constexpr int count = 16;
  using Codes = __m256i;
  using Sums = __m256i;
  static Codes load(const int16_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static Codes load(const int8_t* at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
  static Sums multiply_add(Codes a, Codes b, Sums sums) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
  static int32_t total(Sums sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
};
#else
// Arrays, in the vectors that the compiler finds for them.
struct Lanes {
  static constexpr int count = 16;
  struct Codes { int16_t at[count]; };
  struct Sums { int32_t at[count]; };
  template <class Code> static Codes load(const Code* from) {
    Codes codes;
    for (int i = 0; i < count; ++i) codes.at[i] = from[i];
    return codes;
  }
  static Sums multiply_add(Codes a, Codes b, Sums sums) {
    for (int i = 0; i < count; ++i) sums.at[i] += a.at[i] * b.at[i];
    return sums;
  }
  static int32_t total(Sums sums) {
    int32_t total = 0;
    for (int i = 0; i < count; ++i) total += sums.at[i];
    return total;
  }
};
#endif

struct Weight {
  const int8_t* codes;
  const float* scale;
  const int32_t* sums;  // of rows, where it lies in blocks
  int n, k;
};

// M tokens with `rows` rows from `row` on, of which the weight may not have the last; their sums into `found`.
struct Rows {
  using Code = int16_t;
  static constexpr int rows = 4, offset = 0;
  template <int M> static void sum(const Weight& w, const Code* x, int row, int32_t (*found)[rows]) {
    constexpr int some = M < 4 ? rows : rows / 2;  // as many as AVX2 has registers for
    for (int from = 0; from < rows; from += some) {
      const int8_t* codes[some];
      for (int r = 0; r < some; ++r) codes[r] = w.codes + (int64_t)(row + from + r < w.n ? row + from + r : w.n - 1) * w.k;
      Lanes::Sums sums[M][some] = {};
      int i = 0;
      for (; i + Lanes::count <= w.k; i += Lanes::count) {
        Lanes::Codes tokens[M];
        for (int m = 0; m < M; ++m) tokens[m] = Lanes::load(x + (int64_t)m * w.k + i);
        for (int r = 0; r < some; ++r) {
          const Lanes::Codes weights = Lanes::load(codes[r] + i);
          for (int m = 0; m < M; ++m) sums[m][r] = Lanes::multiply_add(tokens[m], weights, sums[m][r]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int r = 0; r < some; ++r) found[m][from + r] = Lanes::total(sums[m][r]);
      for (; i < w.k; ++i)
        for (int m = 0; m < M; ++m)
          for (int r = 0; r < some; ++r) found[m][from + r] += x[(int64_t)m * w.k + i] * codes[r][i];
    }
  }
};

#if defined(__AVX512VNNI__)
template <int Vectors> struct Blocks {
  using Code = uint8_t;
  static constexpr int rows = 16 * Vectors, offset = kZeroPoint;
  template <int M> static void sum(const Weight& w, const Code* x, int row, int32_t (*found)[rows]) {
    __m512i sums[M][Vectors];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < Vectors; ++v) sums[m][v] = _mm512_setzero_si512();
    const int8_t* codes = w.codes + (int64_t)row * w.k;
    for (int i = 0; i < w.k; i += 4, codes += 4 * rows) {
      __m512i weights[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        _mm_prefetch(reinterpret_cast<const char*>(codes + v * 64 + kAhead), _MM_HINT_T0);
        weights[v] = _mm512_loadu_si512(codes + v * 64);
      }
      for (int m = 0; m < M; ++m) {
        int32_t four;
        memcpy(&four, x + (int64_t)m * w.k + i, 4);
        for (int v = 0; v < Vectors; ++v) sums[m][v] = _mm512_dpbusd_epi32(sums[m][v], _mm512_set1_epi32(four), weights[v]);
      }
    }
    // Unrolled, or GCC 12 copies every sum at every step.
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) _mm512_storeu_si512(found[m] + v * 16, sums[m][v]);
  }
};
#endif

template <int M, class Layout, class Y> void multiply_rows(const Weight& w, const typename Layout::Code* x, const float* step, Y* y, int row) {
  int32_t found[M][Layout::rows];
  Layout::template sum<M>(w, x, row, found);
  const int count = w.n - row < Layout::rows ? w.n - row : Layout::rows;
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < count; ++r) {
      const int32_t sum = Layout::offset ? found[m][r] - Layout::offset * w.sums[row + r] : found[m][r];
      y[(int64_t)m * w.n + row + r] = Y((float)((double)sum * step[m] * w.scale[row + r]));
    }
}

template <class Layout, class X> void multiply(const Weight& w, const X* x, X* y, int m, int threads) {
  using Code = typename Layout::Code;
  const std::unique_ptr<Code[]> codes(new Code[(int64_t)m * w.k]);
  const std::unique_ptr<float[]> step(new float[m]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int token = 0; token < m; ++token) step[token] = quantize(x + (int64_t)token * w.k, &codes[(int64_t)token * w.k], w.k);
#pragma omp for schedule(static)
    for (int row = 0; row < w.n; row += Layout::rows)
      for (int token = 0, now; token < m; token += now) {
        const Code* from = &codes[(int64_t)token * w.k];
        X* to = y + (int64_t)token * w.n;
        now = m - token >= 4 ? 4 : m - token >= 2 ? 2 : 1;
        if (now == 4) multiply_rows<4, Layout>(w, from, &step[token], to, row);
        else if (now == 2) multiply_rows<2, Layout>(w, from, &step[token], to, row);
        else multiply_rows<1, Layout>(w, from, &step[token], to, row);
      }
  }
}

template <class X> void quantize_tokens(const X* x, uint8_t* codes, float* step, int m, int k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int token = 0; token < m; ++token) step[token] = quantize(x + (int64_t)token * k, codes + (int64_t)token * k, k);
}

}  // namespace

// x [m, k] and y [m, n] in bfloat16 or float, contiguous.
extern "C" void qk_int8_rows(const void* codes, const float* scale, const void* x, void* y, int m, int n, int k, int bfloat16, int threads) {
  const Weight w = {(const int8_t*)codes, scale, nullptr, n, k};
  if (bfloat16) multiply<Rows>(w, (const Bfloat16*)x, (Bfloat16*)y, m, threads);
  else multiply<Rows>(w, (const float*)x, (float*)y, m, threads);
}

#if defined(__AVX512VNNI__)
// The same for blocks of 16 to 64 rows; k is a multiple of 4.
extern "C" void qk_int8_blocks(
    const void* codes, const float* scale, const int32_t* sums, const void* x, void* y, int m, int n, int k, int rows, int bfloat16, int threads) {
  const Weight w = {(const int8_t*)codes, scale, sums, n, k};
  const auto run = [&](auto layout) {
    using Layout = decltype(layout);
    if (bfloat16) multiply<Layout>(w, (const Bfloat16*)x, (Bfloat16*)y, m, threads);
    else multiply<Layout>(w, (const float*)x, (float*)y, m, threads);
  };
  if (rows == 64) run(Blocks<4>());
  else if (rows == 48) run(Blocks<3>());
  else if (rows == 32) run(Blocks<2>());
  else run(Blocks<1>());
}
#endif

// x [m, k] -> unsigned codes [m, k] and step [m].
extern "C" void qk_int8_quantize(const void* x, uint8_t* codes, float* step, int m, int k, int bfloat16, int threads) {
  if (bfloat16) quantize_tokens((const Bfloat16*)x, codes, step, m, k, threads);
  else quantize_tokens((const float*)x, codes, step, m, k, threads);
}
