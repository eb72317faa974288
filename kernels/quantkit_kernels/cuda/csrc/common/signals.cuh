// Sums that blocks hand over to one another through memory, each its own signal.
//
// Where a sum will be lies kNothing until it is there, and who reads it leaves kNothing again. So no block waits until its sums are in memory
// before it signals them, and none reads them after it was signalled. Who waits must be started after the others, or be there with all of them.

#pragma once

#include <stdint.h>

#include <type_traits>

namespace {

// As a float -0, in whose place 0 is handed over; as an int further below zero than any sum of products of int8.
constexpr uint32_t kNothing = 0x80000000u;

__device__ __forceinline__ void hand_over(float* to, float sum) {
  const uint32_t bits = __float_as_uint(sum);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(bits == kNothing ? 0u : bits) : "memory");
}
__device__ __forceinline__ void hand_over(int* to, int sum) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(sum) : "memory"); }

// The total of `count` sums, at most MOST, that lie `stride` apart, when all are there: in their order.
template <int MOST = 8, class Acc> __device__ __forceinline__ Acc take_over(Acc* from, size_t stride, int count) {
  Acc total = 0;
  for (int first = 0; first < count; first += MOST) {
    uint32_t bits[MOST];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int j = 0; j < MOST; ++j)
        if (first + j < count) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits[j]) : "l"(from + (first + j) * stride) : "memory");
#pragma unroll
      for (int j = 0; j < MOST; ++j) there &= first + j >= count || bits[j] != kNothing;
    } while (!there);
#pragma unroll
    for (int j = 0; j < MOST; ++j) {
      if (first + j >= count) continue;
      total += std::is_same_v<Acc, int> ? (Acc)(int)bits[j] : (Acc)__uint_as_float(bits[j]);
      reinterpret_cast<uint32_t*>(from)[(first + j) * stride] = kNothing;
    }
  }
  return total;
}

}  // namespace
