// What int8's units share: a token's codes and their step, a weight's layouts, and products of both.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

constexpr int kZeroPoint = 128;  // of unsigned codes
constexpr int kAhead = 6144;     // bytes: what a core fetches unasked ends with the page

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

// A token's codes, zeros after the k-th up to `width`. Returns their step: 1 for zeros, NaN where an activation is not finite.
template <class X, class Code> float quantize(const X* x, Code* codes, int k, int width) {
  constexpr int32_t kInfinity = 0x7f800000, kOffset = std::is_unsigned<Code>::value ? kZeroPoint : 0;
  int32_t most = 0;  // magnitudes are in the order of their bits, NaN above all
  for (int i = 0; i < k; ++i) {
    const int32_t magnitude = bits<int32_t>((float)x[i]) & INT32_MAX;
    most = magnitude > most ? magnitude : most;
  }
  const float share = bits<float>(most) / 127, step = most >= kInfinity ? NAN : share == 0 ? 1.f : share;
  // Added to 1.5 * 2^23 a number is rounded, halves to even, and is in the lowest bits of the sum.
  constexpr float kRounding = 12582912.f;
  const int32_t rounding = bits<int32_t>(kRounding);
  for (int i = 0; i < k; ++i) {
    const int32_t code = bits<int32_t>((float)x[i] / step + kRounding) - rounding;
    codes[i] = (Code)((code > 127 ? 127 : code < -127 ? -127 : code) + kOffset);  // a subnormal step is no exact 127th
  }
  std::fill(codes + k, codes + width, Code(0));
  return step;
}

#if defined(__AVX2__)
// Products of bytes, added in pairs, would saturate in 16 bits: both sides are that wide before.
struct Lanes {
  using Code = int16_t;  // of a token
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
#elif defined(__ARM_FEATURE_DOTPROD)
// Four products of bytes are added in 32 bits at once.
struct Lanes {
  using Code = int8_t;
  static constexpr int count = 16;
  using Codes = int8x16_t;
  using Sums = int32x4_t;
  static Codes load(const int8_t* at) { return vld1q_s8(at); }
  static Sums multiply_add(Codes a, Codes b, Sums sums) { return vdotq_s32(sums, a, b); }
  static int32_t total(Sums sums) { return vaddvq_s32(sums); }
};
#else
// Arrays, in the vectors that the compiler finds for them.
struct Lanes {
  using Code = int16_t;
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
  int n, k;  // k: of a row as it lies
};

inline int in_fours(int k) { return (k + 3) / 4 * 4; }

// M tokens with `rows` rows from `row` on, of which the weight may not have the last; their sums into `found`.
struct Rows {
  using Code = Lanes::Code;
  static constexpr int rows = 4, offset = 0, tokens = 4;
  template <int M> static void sum(const Weight& w, const Code* x, int row, int32_t (*found)[rows]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (M > 1) return sum_pairs<M>(w, x, row, found);
#endif
    constexpr int some = M < 3 ? rows : rows / 2;  // as many as AVX2 has registers for
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

#if defined(__ARM_FEATURE_MATMUL_INT8)
  // Two tokens by two rows in an instruction (i8mm). The last of an odd number of tokens is its own pair.
  template <int M> static void sum_pairs(const Weight& w, const Code* x, int row, int32_t (*found)[rows]) {
    constexpr int pairs = (M + 1) / 2, eight = 8;
    const int8_t *codes[rows], *tokens[2 * pairs];
    for (int r = 0; r < rows; ++r) codes[r] = w.codes + (int64_t)std::min(row + r, w.n - 1) * w.k;
    for (int m = 0; m < 2 * pairs; ++m) tokens[m] = x + (int64_t)std::min(m, M - 1) * w.k;
    int32x4_t sums[pairs][rows / 2] = {};
    int i = 0;
    for (; i + eight <= w.k; i += eight) {
      int8x16_t two[pairs];
      for (int p = 0; p < pairs; ++p) two[p] = vcombine_s8(vld1_s8(tokens[2 * p] + i), vld1_s8(tokens[2 * p + 1] + i));
      for (int r = 0; r < rows / 2; ++r) {
        const int8x16_t weights = vcombine_s8(vld1_s8(codes[2 * r] + i), vld1_s8(codes[2 * r + 1] + i));
        for (int p = 0; p < pairs; ++p) sums[p][r] = vmmlaq_s32(sums[p][r], two[p], weights);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < rows; ++r) {
        found[m][r] = sums[m / 2][r / 2][m % 2 * 2 + r % 2];
        for (int at = i; at < w.k; ++at) found[m][r] += tokens[m][at] * codes[r][at];
      }
  }
#endif
};

#if defined(__AVX512VNNI__)
template <int Vectors> struct Blocks {
  using Code = uint8_t;
  static constexpr int rows = 16 * Vectors, offset = kZeroPoint, tokens = 6;  // 24 sums of 32 registers
  template <int M> static void sum(const Weight& w, const Code* x, int row, int32_t (*found)[rows]) {
    __m512i sums[M][Vectors];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < Vectors; ++v) sums[m][v] = _mm512_setzero_si512();
    const int8_t* codes = w.codes + (int64_t)row * w.k;
    for (int i = 0; i < w.k; i += 4, codes += 4 * rows) {
      __m512i weights[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        _mm_prefetch(reinterpret_cast<const char*>(codes + v * 64 + kAhead), _MM_HINT_T1);  // into L2, which waits for more lines at once
        weights[v] = _mm512_loadu_si512(codes + v * 64);
        asm("" : "+v"(weights[v]));  // in a register, or GCC loads it for every token
      }
      for (int m = 0; m < M; ++m) {
        int32_t four;
        memcpy(&four, x + (int64_t)m * w.k + i, 4);
        for (int v = 0; v < Vectors; ++v) sums[m][v] = _mm512_dpbusd_epi32(sums[m][v], _mm512_set1_epi32(four), weights[v]);
      }
    }
    // Unrolled, or GCC 12 copies every sum at every step.
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) _mm512_storeu_si512(found[m] + v * 16, sums[m][v]);
  }
};
#endif


// What sums of one token represent: sum * scale * step, of rows `row` on, in float32.
template <class Layout> inline void scaled(const Weight& w, const int32_t* sums, float step, int row, int count, float* values) {
  for (int r = 0; r < count; ++r) {
    const int32_t sum = Layout::offset ? sums[r] - Layout::offset * w.sums[row + r] : sums[r];
    values[r] = (float)sum * w.scale[row + r] * step;  // rounded as oneDNN's product of many tokens is
  }
}

// `some` tokens, M at most, by the rows of one step of the layout, from `row` on.
template <class Layout, int M = Layout::tokens>
void multiply_tokens(int some, const Weight& w, const typename Layout::Code* x, const float* step, int row, float (*values)[Layout::rows]) {
  if constexpr (M > 1)
    if (some < M) return multiply_tokens<Layout, M - 1>(some, w, x, step, row, values);
  int32_t found[M][Layout::rows];
  Layout::template sum<M>(w, x, row, found);
  const int count = std::min(w.n - row, Layout::rows);
  for (int m = 0; m < M; ++m) {
    if (count == Layout::rows) scaled<Layout>(w, found[m], step[m], row, Layout::rows, values[m]);
    else scaled<Layout>(w, found[m], step[m], row, count, values[m]);
  }
}

// m tokens' codes [m, k] by such rows: `write(token, row, count, values)` gets what each token gives. Tokens go in groups as even as can be: their
// sums stay in registers, and the rows, read by the first, in a cache.
template <class Layout, class Write>
inline void multiply_block(const Weight& w, const typename Layout::Code* x, const float* step, int m, int row, const Write& write) {
  const int groups = (m + Layout::tokens - 1) / Layout::tokens, count = std::min(w.n - row, Layout::rows);
  float values[Layout::tokens][Layout::rows];
  for (int group = 0; group < groups; ++group) {
    const int first = (int64_t)m * group / groups, last = (int64_t)m * (group + 1) / groups;
    multiply_tokens<Layout>(last - first, w, x + (int64_t)first * w.k, step + first, row, values);
    for (int token = first; token < last; ++token) write(token, row, count, values[token - first]);
  }
}

#if defined(__AVX512VNNI__)
// `use` of the layout whose blocks have so many rows: 16, 32, 48 or 64.
template <class Use> inline void by_blocks(int rows, const Use& use) {
  if (rows == 64) use(Blocks<4>());
  else if (rows == 48) use(Blocks<3>());
  else if (rows == 32) use(Blocks<2>());
  else use(Blocks<1>());
}
#endif

}  // namespace
