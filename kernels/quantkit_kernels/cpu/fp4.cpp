// y[M, N] = x[M, K] @ W[N, K]^T for an FP4 weight (E2M1, a scale per 16 along K) and few tokens, in float32.
//
// Sixteen rows of W lie side by side, so that a vector of codes is one place along K of all of them, and one permutation of the sixteen
// values that E2M1 has is its decoding. K/16 = G groups:
//   words   [N/16][G][2][16]  nibble i of word w is the code of k = 16g + 8w + i
//   scales  [N/16][G][16]     5 bits of exponent, 16 more than the power of two, and 3 of mantissa: no scale is subnormal
// Rows have a float32 factor besides.

#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int kRows = 16;
constexpr float kValues[16] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
constexpr int kExponent = (127 - 16) << 23;  // what turns the bits of a scale at the top of a float's mantissa into that float

struct Eight {
  static constexpr int count = 8;
  using Floats = __m256;
  using Words = __m256i;
  Floats values = _mm256_loadu_ps(kValues);
  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Floats load(const float* at) { return _mm256_loadu_ps(at); }
  static void store(float* at, Floats value) { _mm256_storeu_ps(at, value); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Words words(const uint32_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static Words next(Words words) { return _mm256_srli_epi32(words, 4); }
  // A permutation looks at three bits: the fourth is the sign.
  Floats decode(Words words) const {
    const Words sign = _mm256_and_si256(_mm256_slli_epi32(words, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(values, words), _mm256_castsi256_ps(sign));
  }
  static Floats scales(const uint8_t* at) {
    const Words wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(wide, 20), _mm256_set1_epi32(kExponent)));
  }
};

#if defined(__AVX512F__)
struct Sixteen {
  static constexpr int count = 16;
  using Floats = __m512;
  using Words = __m512i;
  Floats values = _mm512_loadu_ps(kValues);
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* at) { return _mm512_loadu_ps(at); }
  static void store(float* at, Floats value) { _mm512_storeu_ps(at, value); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Words words(const uint32_t* at) { return _mm512_loadu_si512(at); }
  static Words next(Words words) { return _mm512_srli_epi32(words, 4); }
  Floats decode(Words words) const { return _mm512_permutexvar_ps(words, values); }
  static Floats scales(const uint8_t* at) {
    const Words wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(wide, 20), _mm512_set1_epi32(kExponent)));
  }
};
using Lanes = Sixteen;
#else
using Lanes = Eight;
#endif

struct Weight {
  const uint32_t* words;
  const uint8_t* scales;
  const float* row_scale;
  int n, k;
};

// M tokens with the sixteen rows of a block.
template <int M> void multiply_block(const Weight& w, const float* x, float* y, int block) {
  const Lanes lanes;
  const int groups = w.k / 16;
  for (int from = 0; from < kRows; from += Lanes::count) {
    typename Lanes::Floats sum[M];
    for (int m = 0; m < M; ++m) sum[m] = Lanes::zero();
    for (int g = 0; g < groups; ++g) {
      const int64_t at = (int64_t)block * groups + g;
      typename Lanes::Floats part[M];
      for (int m = 0; m < M; ++m) part[m] = Lanes::zero();
      for (int j = 0; j < 2; ++j) {
        typename Lanes::Words words = Lanes::words(w.words + (at * 2 + j) * kRows + from);
        for (int i = 0; i < 8; ++i) {
          const typename Lanes::Floats value = lanes.decode(words);
          for (int m = 0; m < M; ++m) part[m] = Lanes::multiply_add(value, Lanes::all(x[(int64_t)m * w.k + g * 16 + j * 8 + i]), part[m]);
          words = Lanes::next(words);
        }
      }
      const typename Lanes::Floats scale = Lanes::scales(w.scales + at * kRows + from);
      for (int m = 0; m < M; ++m) sum[m] = Lanes::multiply_add(part[m], scale, sum[m]);
    }
    const int row = block * kRows + from;
    for (int m = 0; m < M; ++m) Lanes::store(y + (int64_t)m * w.n + row, Lanes::multiply(sum[m], Lanes::load(w.row_scale + row)));
  }
}

template <int M> void multiply(const Weight& w, const float* x, float* y, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int block = 0; block < w.n / kRows; ++block) multiply_block<M>(w, x, y, block);
}

}  // namespace

// x float [m, k], y float [m, n], both contiguous; n and k multiples of 16.
extern "C" void qk_fp4_linear(const void* words, const void* scales, const float* row_scale, const float* x, float* y, int m, int n, int k, int threads) {
  const Weight w = {(const uint32_t*)words, (const uint8_t*)scales, row_scale, n, k};
  for (int done = 0, now; done < m; done += now, x += (int64_t)now * k, y += (int64_t)now * n) {
    now = m - done >= 8 ? 8 : m - done >= 4 ? 4 : m - done >= 2 ? 2 : 1;
    if (now == 8) multiply<8>(w, x, y, threads);
    else if (now == 4) multiply<4>(w, x, y, threads);
    else if (now == 2) multiply<2>(w, x, y, threads);
    else multiply<1>(w, x, y, threads);
  }
}

// The rows `begin`..`end` as numbers, float [end - begin, k].
extern "C" void qk_fp4_expand(const void* words, const void* scales, const float* row_scale, float* out, int begin, int end, int k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int row = begin; row < end; ++row) {
    const Eight lanes;
    const __m256i nibbles = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    float* to = out + (int64_t)(row - begin) * k;
    for (int g = 0; g < k / 16; ++g) {
      const int64_t at = (int64_t)(row / kRows) * (k / 16) + g;
      const union { int32_t bits; float number; } scale = {(((const uint8_t*)scales)[at * kRows + row % kRows] << 20) + kExponent};
      for (int j = 0; j < 2; ++j) {
        const __m256i word = _mm256_set1_epi32(((const int32_t*)words)[(at * 2 + j) * kRows + row % kRows]);
        const __m256 value = lanes.decode(_mm256_srlv_epi32(word, nibbles));
        Eight::store(to + g * 16 + j * 8, Eight::multiply(value, Eight::all(scale.number * row_scale[row])));
      }
    }
  }
}
