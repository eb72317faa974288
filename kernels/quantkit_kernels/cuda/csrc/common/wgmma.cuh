// wgmma with 64 rows of weights, tokens in shared memory and sums in registers.
//
// Weights decoded to 16 bits are in registers: a warpgroup's four warps hold 16 rows each, in the order of mma.sync's A operand. Those of
// int8 are in shared memory as packed.cuh says, from an address that is a multiple of 512; one instruction takes 32 of a row's 64 bytes.
// Tokens lie in shared memory as rows of 128 bytes along K, 16-byte chunk c of row t at place c ^ (t % 8), from an address that is a multiple
// of 1024; one instruction takes 32 bytes of each row. Latents that attention multiplies lie so, too, and are A.
// Sums: d[4 * i + 2 * h + e] of lane 4g + q in warp w is of row 16w + 8h + g and token 8i + 2q + e.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace {

// Before the first wgmma and whenever registers that one reads were written since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// After the last wait, else the compiler may copy sums before it.
template <class Acc, int MANY> __device__ __forceinline__ void wgmma_done(Acc (&d)[MANY]) {
#pragma unroll
  for (int i = 0; i < MANY; ++i) {
    if constexpr (std::is_same_v<Acc, int>) asm volatile("" : "+r"(d[i])::"memory");
    else asm volatile("" : "+f"(d[i])::"memory");
  }
}

// The descriptor that an instruction takes of tokens at `address`: rows of 128 bytes with the swizzle above, 1024 bytes to the next eight.
__device__ __forceinline__ uint64_t tokens_at(uint32_t address) { return (1ull << 62) | (64ull << 32) | (1ull << 16) | (address >> 4); }

// The same so many bytes further on.
__device__ __forceinline__ uint64_t tokens_after(uint64_t tokens, uint32_t bytes) { return (tokens & ~0xffffffffull) | ((uint32_t)tokens + (bytes >> 4)); }

// The same about a strip's stage of int8 weights at `address`, instruction j of 4: rows of 64 bytes, 512 to the next eight, 4096 to the next
// 64 along K.
__device__ __forceinline__ uint64_t weights_at(uint32_t address, int j) {
  return ((2ull << 62) | (32ull << 32) | (1ull << 16) | (address >> 4)) + j / 2 * 256 + j % 2 * 2;
}

#define QK_SUMS_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define QK_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define QK_SUMS_12(c, i) QK_SUMS_8(c, i), c(d[i + 8]), c(d[i + 9]), c(d[i + 10]), c(d[i + 11])
#define QK_SUMS_16(c, i) QK_SUMS_8(c, i), QK_SUMS_8(c, i + 8)
#define QK_SUMS_24(c, i) QK_SUMS_12(c, i), QK_SUMS_12(c, i + 12)
#define QK_SUMS_32(c, i) QK_SUMS_16(c, i), QK_SUMS_16(c, i + 16)
#define QK_SUMS_48(c, i) QK_SUMS_32(c, i), QK_SUMS_16(c, i + 32)
#define QK_SUMS_64(c, i) QK_SUMS_32(c, i), QK_SUMS_32(c, i + 32)
#define QK_SUMS_80(c, i) QK_SUMS_64(c, i), QK_SUMS_16(c, i + 64)
#define QK_SUMS_128(c, i) QK_SUMS_64(c, i), QK_SUMS_64(c, i + 64)
#define QK_NAMES_12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define QK_NAMES_24 QK_NAMES_12 ",%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define QK_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define QK_NAMES_32 QK_NAMES_16 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QK_NAMES_48 QK_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define QK_NAMES_64 QK_NAMES_48 "," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QK_NAMES_80 QK_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define QK_NAMES_128 QK_NAMES_80 "," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The operands after so many sums.
#define QK_AFTER_12 "{%12,%13,%14,%15}, %16"
#define QK_AFTER_24 "{%24,%25,%26,%27}, %28"
#define QK_AFTER_16 "{%16,%17,%18,%19}, %20"
#define QK_AFTER_32 "{%32,%33,%34,%35}, %36"
#define QK_AFTER_48 "{%48,%49,%50,%51}, %52"
#define QK_AFTER_64 "{%64,%65,%66,%67}, %68"
#define QK_AFTER_80 "{%80,%81,%82,%83}, %84"
#define QK_AFTER_128 "{%128,%129,%130,%131}, %132"
#define QK_BOTH_8 "%8, %9"
#define QK_BOTH_12 "%12, %13"
#define QK_BOTH_24 "%24, %25"
#define QK_BOTH_16 "%16, %17"
#define QK_BOTH_32 "%32, %33"
#define QK_BOTH_48 "%48, %49"
#define QK_BOTH_64 "%64, %65"
#define QK_BOTH_80 "%80, %81"
#define QK_BOTH_128 "%128, %129"
#define QK_WGMMA(shape_and_types, sums)                                                                                                   \
  asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned." shape_and_types " {" QK_NAMES_##sums               \
               "}, " QK_AFTER_##sums ", add, 1, 1, 0;}"                                                                                   \
               : QK_SUMS_##sums("+f", 0)                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens))
#define QK_WGMMA_OF(n, sums)                                                                                                              \
  template <class T> __device__ __forceinline__ void wgmma(float (&d)[sums], const uint32_t (&a)[4], uint64_t tokens) {                   \
    if constexpr (std::is_same_v<T, __half>) QK_WGMMA("m64n" #n "k16.f32.f16.f16", sums);                                                 \
    else QK_WGMMA("m64n" #n "k16.f32.bf16.bf16", sums);                                                                                   \
  }                                                                                                                                       \
  __device__ __forceinline__ void wgmma_int8(int (&d)[sums], uint64_t weights, uint64_t tokens) {                                         \
    asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" QK_NAMES_##sums         \
                 "}, " QK_BOTH_##sums ", add;}" : QK_SUMS_##sums("+r", 0) : "l"(weights), "l"(tokens));                                   \
  }

// d += a * tokens, 24 to 256 of them, for 16 along K in T, or for 32 in int8.
QK_WGMMA_OF(24, 12)
QK_WGMMA_OF(32, 16)
QK_WGMMA_OF(48, 24)
QK_WGMMA_OF(64, 32)
QK_WGMMA_OF(96, 48)
QK_WGMMA_OF(128, 64)
QK_WGMMA_OF(160, 80)
QK_WGMMA_OF(256, 128)

#define QK_WGMMA_SHARED(shape_and_types, sums, transposed)                                                                                    \
  asm volatile("{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned." shape_and_types " {" QK_NAMES_##sums               \
               "}, " QK_BOTH_##sums ", add, 1, 1, " transposed ", 0;}" : QK_SUMS_##sums("+f", 0) : "l"(a), "l"(tokens))
#define QK_WGMMA_SHARED_OF(n, sums)                                                                                                       \
  template <class T, bool TRANSPOSED> __device__ __forceinline__ void wgmma_shared(float (&d)[sums], uint64_t a, uint64_t tokens) {           \
    if constexpr (std::is_same_v<T, __half> && TRANSPOSED) QK_WGMMA_SHARED("m64n" #n "k16.f32.f16.f16", sums, "1");                           \
    else if constexpr (std::is_same_v<T, __half>) QK_WGMMA_SHARED("m64n" #n "k16.f32.f16.f16", sums, "0");                                \
    else if constexpr (TRANSPOSED) QK_WGMMA_SHARED("m64n" #n "k16.f32.bf16.bf16", sums, "1");                                                 \
    else QK_WGMMA_SHARED("m64n" #n "k16.f32.bf16.bf16", sums, "0");                                                                       \
  }

// d += a * tokens, both in shared memory: `a` as tokens lie, 64 rows of it, or TRANSPOSED, 16 rows along K of 64 values each.
QK_WGMMA_SHARED_OF(16, 8)
QK_WGMMA_SHARED_OF(32, 16)

#undef QK_WGMMA_SHARED_OF
#undef QK_WGMMA_SHARED
#undef QK_NAMES_8
#undef QK_BOTH_8
#undef QK_WGMMA_OF
#undef QK_WGMMA
#undef QK_AFTER_12
#undef QK_AFTER_16
#undef QK_AFTER_24
#undef QK_BOTH_12
#undef QK_BOTH_16
#undef QK_BOTH_24
#undef QK_NAMES_12
#undef QK_NAMES_16
#undef QK_NAMES_24
#undef QK_AFTER_32
#undef QK_BOTH_32
#undef QK_NAMES_32
#undef QK_AFTER_48
#undef QK_AFTER_64
#undef QK_BOTH_48
#undef QK_BOTH_64
#undef QK_NAMES_48
#undef QK_NAMES_64
#undef QK_AFTER_80
#undef QK_AFTER_128
#undef QK_BOTH_80
#undef QK_BOTH_128
#undef QK_NAMES_80
#undef QK_NAMES_128
#undef QK_SUMS_8
#undef QK_SUMS_12
#undef QK_SUMS_16
#undef QK_SUMS_24
#undef QK_SUMS_32
#undef QK_SUMS_48
#undef QK_SUMS_64
#undef QK_SUMS_80
#undef QK_SUMS_128

}  // namespace
