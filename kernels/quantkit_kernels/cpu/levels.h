// Levels of the grids of weights: integers, E2M1 and e4m3.

#pragma once

#include "vectors.h"

enum Grid { kInteger, kIntegerWithZero, kE2m1, kE4m3 };
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
