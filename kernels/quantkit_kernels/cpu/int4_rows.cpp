// Few rows of x by an int4 weight that is packed as int4.cpp says: every code is read from memory once,
// decoded in registers and used for all rows, by AVX2, AVX-512, NEON or the compiler's own vectors. Sums of a group are of whole numbers q - 8 by x, in float32; the group's scale and offset come to
// them at its end: y = sum over groups of scale * sum((q - 8) x) + offset * sum(x).

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kChunk = 32;  // of k, by which x is packed; groups are whole chunks
constexpr int kAhead = 4096;  // bytes that are fetched before they are needed
#if defined(__AVX512F__)
constexpr int kTokens = 14, kTokensOfTwo = 6;  // of x, whose sums stay in registers: two vectors each, or four
#else
constexpr int kTokens = 6, kTokensOfTwo = 2;
#endif

struct Weight {
  const uint8_t* packed;
  const void* sides;  // scale and offset [k / group, n, 2], bfloat16 where `half`, else float32
  int half, n, k, group, block;
};

// A Step is what one decoding gives: `depth` of k for kLanes rows from the lower codes of kLanes bytes, and as many from the higher. `bias` is
// what codes are too large by.
struct Floats {
  using Token = float;
  static constexpr int depth = 1;
#if defined(__AVX512F__)
  static constexpr int bias = 0;
  static void decode(const uint8_t* codes, int, Vector& low, Vector& high) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    low = (Vector)_mm512_permutexvar_ps(wide, values);  // which looks at the lowest four bits only
    high = (Vector)_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), values);
  }
#elif defined(__AVX2__)
  static constexpr int bias = 8;
  static void decode(const uint8_t* codes, int, Vector& low, Vector& high) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
    low = (Vector)_mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
    high = (Vector)_mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
  }
#else
  static constexpr int bias = 8;
  static void decode(const uint8_t* codes, int, Vector& low, Vector& high) {
    uint32_t four;
    memcpy(&four, codes, kLanes);
#if defined(__aarch64__)
    const Words wide = (Words)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
    const Words wide = Words{four, four >> 8, four >> 16, four >> 24} & 255;
#endif
    low = __builtin_convertvector((Bits)(wide & 15), Vector);
    high = __builtin_convertvector((Bits)(wide >> 4), Vector);
  }
#endif
  static Vector add(Vector sum, Vector weights, Token x) { return sum + weights * x; }
};

#if defined(__AVX512BF16__)
// Two of k at a time: whole numbers are exact in bfloat16, and so are their products with x, whose sums are float32.
struct Pairs {
  using Token = uint32_t;
  static constexpr int depth = 2, bias = 0;
  static void decode(const uint8_t* codes, int stride, Vector& low, Vector& high) {
    static const uint16_t table[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                       0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i values = _mm512_loadu_si512(table);  // twice, for the lowest five bits are looked at
    const __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes)), second = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + stride)));
    const __m512i both = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
    low = (Vector)_mm512_permutexvar_epi16(both, values);
    high = (Vector)_mm512_permutexvar_epi16(_mm512_srli_epi32(both, 4), values);
  }
  static Vector add(Vector sum, Vector weights, Token x) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)x));
  }
};
#endif

inline void widen(float* to, const float* from) { memcpy(to, from, 4 * kChunk); }
inline void widen(float* to, const Half* from) {
  for (int i = 0; i < kChunk; i += kLanes) store(to + i, load(from + i));
}
inline void widen(uint32_t* to, const Half* from) { memcpy(to, from, 2 * kChunk); }

// x[count, k] -> tokens [k / kChunk][room][kChunk], and sums over groups [k / group][room]; both are zeros before.
template <class Step, class X> void pack(const X* x, int count, int room, const Weight& w, typename Step::Token* tokens, float* sums) {
  constexpr int each = kChunk / Step::depth;
  for (int m = 0; m < count; ++m)
    for (int g = 0; g < w.k / w.group; ++g) {
      const X* from = x + (int64_t)m * w.k + g * w.group;
      Vector sum{};
      for (int i = 0; i < w.group; i += kLanes) sum += load(from + i);
      for (int lane = 0; lane < kLanes; ++lane) sums[g * room + m] += sum[lane];
      for (int i = 0; i < w.group; i += kChunk) widen(tokens + ((int64_t)(g * w.group + i) / kChunk * room + m) * each, from + i);
    }
}

// Scale and offset of rows first, first + step, ..; codes that are too large by `bias` are made up for in the offset. Rows beyond n are 0.
template <int Bias> inline void sides(const Weight& w, int group, int first, int step, Vector& scale, Vector& offset) {
  const int64_t at = ((int64_t)group * w.n + first) * 2;
  const int count = std::min(kLanes, (w.n - first + step - 1) / step);
  scale = Vector{}, offset = Vector{};
#if defined(__AVX512F__)
  if (w.half && step == 1 && count == kLanes) {
    const __m512i both = _mm512_loadu_si512((const uint16_t*)w.sides + at);
    scale = (Vector)_mm512_slli_epi32(both, 16);
    offset = (Vector)_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000));
    if (Bias) offset -= scale * (float)Bias;
    return;
  }
#endif
  for (int i = 0; i < count; ++i) {
    float both[2];
    if (w.half) {
      uint32_t bits[2];
      for (int side = 0; side < 2; ++side) bits[side] = (uint32_t)((const uint16_t*)w.sides)[at + 2 * i * step + side] << 16;
      memcpy(both, bits, 8);
    } else memcpy(both, (const float*)w.sides + at + 2 * i * step, 8);
    scale[i] = both[0], offset[i] = both[1];
  }
  if (Bias) offset -= scale * (float)Bias;
}

// A unit of weights: kLanes bytes of every k, `stride` apart, of which only `bytes` are there where it is not whole. `low` is the first of the
// lower codes' rows, `high` that of the higher, `step` lies from one row to the next.
struct Unit {
  const uint8_t* codes;
  int stride, bytes, low, high, step;
};

// Tokens of a tile, of which M are multiplied; `room` is how many lie side by side. y [.., n] of those that are there.
template <class Token> struct Tile {
  const Token* tokens;
  const float* sums;
  int room, count;
};

// M tokens by Units of weights side by side.
template <class Step, int M, int Units, bool Whole> void multiply(const Weight& w, const Unit& unit, const Tile<typename Step::Token>& tile, Vector (*total)[2 * Units]) {
  constexpr int vectors = 2 * Units, each = kChunk / Step::depth;
  const uint8_t* codes = unit.codes;
  const typename Step::Token* x = tile.tokens;
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < vectors; ++v) total[m][v] = Vector{};
  for (int g = 0; g < w.k / w.group; ++g) {
    Vector sum[M][vectors];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[m][v] = Vector{};
    for (int chunk = 0; chunk < w.group; chunk += kChunk, x += tile.room * each)
#pragma GCC unroll 1
      for (int i = 0; i < each; ++i, codes += Step::depth * unit.stride) {
        __builtin_prefetch(codes + kAhead);
        Vector weights[vectors];
        if (Whole) {
#pragma GCC unroll 2
          for (int u = 0; u < Units; ++u) Step::decode(codes + u * kLanes, unit.stride, weights[2 * u], weights[2 * u + 1]);
        } else {
          uint8_t some[2 * kLanes] = {};
          for (int d = 0; d < Step::depth; ++d) memcpy(some + d * kLanes, codes + d * unit.stride, unit.bytes);
          Step::decode(some, kLanes, weights[0], weights[1]);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v) sum[m][v] = Step::add(sum[m][v], weights[v], x[m * each + i]);
      }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Vector scale, offset;
      sides<Step::bias>(w, g, (v % 2 ? unit.high : unit.low) + v / 2 * kLanes, unit.step, scale, offset);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m][v] += sum[m][v] * scale + offset * tile.sums[g * tile.room + m];
    }
  }
}

// M tokens by all units of a whole block.
template <class Step, int M, class Y> void multiply_block(const Weight& w, int first, const Tile<typename Step::Token>& tile, Y* y) {
  constexpr int units = M <= kTokensOfTwo ? 2 : 1;
  const int bytes = w.block / 2;
  Vector total[M][2 * units];
  for (int byte = 0; byte < bytes; byte += units * kLanes) {
    const Unit unit = {w.packed + (int64_t)first * w.k / 2 + byte, bytes, kLanes, first + byte, first + byte + bytes, 1};
    multiply<Step, M, units, true>(w, unit, tile, total);
    for (int m = 0; m < tile.count; ++m)
      for (int v = 0; v < 2 * units; ++v) store(y + (int64_t)m * w.n + (v % 2 ? unit.high : unit.low) + v / 2 * kLanes, total[m][v]);
  }
}

// One token after the other by the last block, of fewer rows, which lie in another order.
template <class Step, class Y> void multiply_last(const Weight& w, int first, Tile<typename Step::Token> tile, Y* y) {
  const int bytes = (w.n - first) / 2;
  const uint8_t* codes = w.packed + (int64_t)first * w.k / 2;
  for (int m = 0; m < tile.count; ++m, tile.tokens += kChunk / Step::depth, ++tile.sums)
    for (int byte = 0; byte < bytes; byte += kLanes) {
      const Unit unit = {codes + byte, bytes, std::min(kLanes, bytes - byte), first + 2 * byte, first + 2 * byte + 1, 2};
      Vector total[1][2];
      multiply<Step, 1, 1, false>(w, unit, tile, total);
      for (int v = 0; v < 2; ++v) {
        Y some[kLanes];
        store(some, total[0][v]);
        for (int i = 0; i < unit.bytes; ++i) y[(int64_t)m * w.n + (v ? unit.high : unit.low) + 2 * i] = some[i];
      }
    }
}

// For how many tokens there is code; others are made up with zeros.
constexpr int kSizes[] = {1, 2, 3, 4, 6, 8, 10, 12, 14};
inline int room(int count) { return *std::lower_bound(std::begin(kSizes), std::end(kSizes), count); }

template <class Step, int Size = 0, class Y> void multiply_tile(const Weight& w, int first, const Tile<typename Step::Token>& tile, Y* y) {
  if constexpr (Size < (int)std::size(kSizes) && kSizes[Size] <= kTokens) {
    if (tile.room == kSizes[Size]) multiply_block<Step, kSizes[Size]>(w, first, tile, y);
    else multiply_tile<Step, Size + 1>(w, first, tile, y);
  }
}

template <class Step, class X> void rows(const Weight& w, const X* x, X* y, int m, int threads) {
  using Token = typename Step::Token;
  const int count = (m + kTokens - 1) / kTokens, groups = w.k / w.group, most = room((m + count - 1) / count);
  std::vector<Token> tokens((size_t)count * most * w.k / Step::depth);
  std::vector<float> sums((size_t)count * most * groups);
  std::vector<Tile<Token>> tiles(count);
  const auto begin = [&](int tile) { return (int64_t)m * tile / count; };
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int i = 0; i < count; ++i) {
      Token* own = tokens.data() + (size_t)i * most * w.k / Step::depth;
      float* added = sums.data() + (size_t)i * most * groups;
      const int size = int(begin(i + 1) - begin(i));
      tiles[i] = {own, added, room(size), size};
      pack<Step>(x + begin(i) * w.k, size, tiles[i].room, w, own, added);
    }
#pragma omp for schedule(static)
    for (int first = 0; first < w.n; first += w.block)
      for (int i = 0; i < count; ++i)
        if (w.n - first >= w.block) multiply_tile<Step>(w, first, tiles[i], y + begin(i) * w.n);
        else multiply_last<Step>(w, first, tiles[i], y + begin(i) * w.n);
  }
}

}  // namespace

// x[m, k] -> y[m, n], both bfloat16 where `half`, else float32; sides [k / group, n, 2] are scale and offset, bfloat16 where `half_sides`, else
// float32. n is a multiple of 16, group of 32.
extern "C" void qk_int4_rows(const uint8_t* packed, const void* sides, const void* x, void* y, int half, int half_sides, int m, int n, int k, int group, int block, int threads) {
  const Weight w = {packed, sides, half_sides, n, k, group, block};
#if defined(__AVX512BF16__)
  if (half) return rows<Pairs>(w, (const Half*)x, (Half*)y, m, threads);
#else
  if (half) return rows<Floats>(w, (const Half*)x, (Half*)y, m, threads);
#endif
  rows<Floats>(w, (const float*)x, (float*)y, m, threads);
}
