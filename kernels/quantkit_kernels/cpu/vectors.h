// Vectors of float32 as long as the processor's registers, by the compiler's own types.

#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
// As they lie in memory:
typedef float Loose __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

struct Half { uint16_t bits; };  // bfloat16

inline Vector load(const float* from) { return *(const Loose*)from; }
inline Vector load(const Half* from) { return (Vector)(__builtin_convertvector(*(const LooseHalves*)from, Words) << 16); }
// Codes become numbers. Without intrinsics GCC converts a vector of bytes one by one.
inline Vector load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  int32_t four;
  memcpy(&four, from, kLanes);
#if defined(__aarch64__)
  return (Vector)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
  return __builtin_convertvector(Bits{four << 24, four << 16, four << 8, four} >> 24, Vector);
#endif
#endif
}
inline void store(float* to, Vector value) { *(Loose*)to = value; }
// Rounded to the nearest, ties to even; NaN stays one.
inline void store(Half* to, Vector value) {
  const Words bits = (Words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(LooseHalves*)to = __builtin_convertvector(value == value ? rounded : (bits >> 16) | 0x40, LooseHalves);
}

// `use(at, count)` of whole vectors of a row, and of what is left.
template <class Use> inline void by_vectors(int width, Use use) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) use(i, kLanes);
  if (i < width) use(i, width - i);
}

template <class T> inline Vector some(const T* from, int count) {
  if (count == kLanes) return load(from);
  T room[kLanes] = {};
  std::copy_n(from, count, room);
  return load(room);
}

template <class T> inline void put(T* to, Vector value, int count) {
  if (count == kLanes) return store(to, value);
  T room[kLanes];
  store(room, value);
  std::copy_n(room, count, to);
}

// a * b + c, rounded once where the processor can. A compiler that is left to choose does so loop by loop (GCC 13 avoids chains of FMA), and
// a row's bits would depend on how many rows there are.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// e^x of x <= 0, to 2 units in the last place; numbers below -87 count as -87, NaN stays.
inline Vector exponential(Vector x) {
  x = x < -87.f ? Vector{} - 87.f : x;
  const Vector shifted = x * 1.44269504f + 12582912.f, n = shifted - 12582912.f;  // 1.5 * 2^23 rounds to whole numbers
  const Vector f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = f * 1.98756915e-4f + 1.39819995e-3f;
  p = p * f + 8.33345191e-3f;
  p = p * f + 4.16657959e-2f;
  p = p * f + 1.66666655e-1f;
  p = p * f + 5.00000012e-1f;
  return (Vector)((Bits)(p * f * f + f + 1.f) + ((Bits)shifted << 23));
}

// The sum of each of four vectors.
inline void totals(const Vector* four, float* found) {
#if defined(__AVX512F__)
  const auto halves = [](Vector a, Vector b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44), _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
  };
  const __m512 low = halves(four[0], four[1]), high = halves(four[2], four[3]);
  __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));  // four lanes of each side by side
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
  float all[kLanes];
  memcpy(all, &sum, sizeof sum);
  for (int i = 0; i < 4; ++i) found[i] = all[4 * i];
#else
  for (int i = 0; i < 4; ++i) {
    found[i] = 0;
    for (int lane = 0; lane < kLanes; ++lane) found[i] += four[i][lane];
  }
#endif
}
