// Expands a packed int4 weight: w = (q - 8) * scale + offset in float32, as bfloat16 or float32.
//
// Rows of W lie in blocks of `block`, the last may be smaller. A byte of a whole block holds for one k the codes of rows n and n + block/2,
// of a smaller one those of rows 2n and 2n + 1; the bytes of a k lie side by side.

#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace {

inline void stored(float* to, float value) { *to = value; }
inline void stored(uint16_t* to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  *to = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Of one k: `low` and `high` are where the rows of the lower and the higher codes begin, `step` lies between two bytes' rows.
template <class T> inline void expand(const uint8_t* codes, const float* scale, const float* offset, T* out, int bytes, int high, int step) {
#pragma omp simd
  for (int i = 0; i < bytes; ++i) {
    const int low = i * step;
    stored(out + low, (float)((codes[i] & 15) - 8) * scale[low] + offset[low]);
    stored(out + low + high, (float)((codes[i] >> 4) - 8) * scale[low + high] + offset[low + high]);
  }
}

template <class T>
void expand_rows(const uint8_t* packed, const float* scale, const float* offset, T* out, int start, int stop, int n, int k, int group, int block, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int first = start; first < stop; first += block) {
    const int rows = std::min(block, n - first), bytes = rows / 2;
    const uint8_t* codes = packed + (int64_t)first * k / 2;
    for (int at = 0; at < k; ++at, codes += bytes) {
      const float *own = scale + (int64_t)(at / group) * n + first, *added = offset + (int64_t)(at / group) * n + first;
      T* to = out + (int64_t)at * (stop - start) + (first - start);
      if (rows == block) expand(codes, own, added, to, bytes, block / 2, 1);
      else expand(codes, own, added, to, bytes, 1, 2);
    }
  }
}

}  // namespace

// Rows start .. stop, start a multiple of `block`, of W [n, k] -> out [k, stop - start], bfloat16 where `half`, else float32.
// scale, offset float32 [k / group, n].
extern "C" void qk_int4_expand(const uint8_t* packed, const float* scale, const float* offset, void* out, int half, int start, int stop, int n, int k, int group, int block,
                               int threads) {
  if (half) expand_rows(packed, scale, offset, (uint16_t*)out, start, stop, n, k, group, block, threads);
  else expand_rows(packed, scale, offset, (float*)out, start, stop, n, k, group, block, threads);
}
