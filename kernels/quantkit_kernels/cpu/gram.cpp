// Sums of x x^T over tokens, lower half: bfloat16 operands, which a processor with AVX512_BF16 multiplies twice as fast, and float32 sums.

#include <immintrin.h>
#include <stdint.h>

#include <algorithm>

namespace {

constexpr int kGroup = 64;  // channels that lie side by side, a pair of tokens in each word
constexpr int kVectors = kGroup / 16, kRows = 4;
constexpr int kPairs = 64;  // whose words of two groups stay in the first cache

inline __mmask16 first(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// One word of each of 16 channels: `one` in the lower half, `other` in the upper.
inline __m512i paired(__m512 one, __m512 other) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one)), high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(other));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// a, b: words of `pairs` pairs of tokens of two groups; out[kGroup][stride] += their products, for so many rows and columns.
void add_products(const uint32_t* a, const uint32_t* b, float* out, int64_t stride, int pairs, int rows, int columns) {
  for (int row = 0; row < rows; row += kRows) {
    __m512 sums[kRows][kVectors] = {};
    for (int p = 0; p < pairs; ++p) {
      const uint32_t *from = a + p * kGroup + row, *with = b + p * kGroup;
      __m512bh vectors[kVectors];
      for (int v = 0; v < kVectors; ++v) vectors[v] = (__m512bh)_mm512_loadu_si512(with + 16 * v);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)_mm512_set1_epi32(from[r]), vectors[v]);
    }
    for (int r = 0; r < std::min(kRows, rows - row); ++r)
      for (int v = 0; v < kVectors; ++v) {
        float* to = out + (row + r) * stride + 16 * v;
        const __mmask16 there = first(columns - 16 * v);
        _mm512_mask_storeu_ps(to, there, _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), sums[r][v]));
      }
  }
}

}  // namespace

// x[tokens, channels], a row `stride` numbers after the other -> words[groups][pairs of tokens][kGroup], 0 where there is nothing.
extern "C" void qk_gram_words(const float* x, uint32_t* words, int tokens, int channels, int stride, int threads) {
  const int pairs = (tokens + 1) / 2, groups = (channels + kGroup - 1) / kGroup;
#pragma omp parallel for num_threads(threads)
  for (int group = 0; group < groups; ++group)
    for (int p = 0; p < pairs; ++p) {
      const float* row = x + (int64_t)2 * p * stride + group * kGroup;
      const bool alone = 2 * p + 1 == tokens;
      for (int v = 0; v < kVectors; ++v) {
        const __mmask16 there = first(channels - group * kGroup - 16 * v);
        const __m512 one = _mm512_maskz_loadu_ps(there, row + 16 * v), other = _mm512_maskz_loadu_ps(alone ? 0 : there, row + stride + 16 * v);
        _mm512_storeu_si512(words + ((int64_t)group * pairs + p) * kGroup + 16 * v, paired(one, other));
      }
    }
}

// out[channels, channels] += the products of these words, in rows from `start` (a multiple of kGroup) to `stop`, up to each one's group.
extern "C" void qk_gram_add(const uint32_t* words, float* out, int pairs, int channels, int start, int stop, int threads) {
  const int begin = start / kGroup, end = (stop + kGroup - 1) / kGroup;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int group = end - 1; group >= begin; --group)
    for (int other = 0; other <= group; ++other)
      for (int p = 0; p < pairs; p += kPairs)
        add_products(words + ((int64_t)group * pairs + p) * kGroup, words + ((int64_t)other * pairs + p) * kGroup,
                     out + (int64_t)group * kGroup * channels + other * kGroup, channels, std::min(kPairs, pairs - p),
                     std::min(kGroup, stop - group * kGroup), std::min(kGroup, channels - other * kGroup));
}
