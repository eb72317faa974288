// y[M, N] = x[M, K] @ W[N, K]^T for a packed W and few tokens M, dense or for routed experts.
//
// Few tokens make this a problem of memory bandwidth: every weight is read once and multiplied with all the tokens that need it. So W is
// the A operand (16 rows) of mma.sync and the tokens are the B operand (8 columns), and `prepare` stores W in the order in which a warp's
// lanes consume it: 64 rows (a strip) by 64 along K is a run of 2 KB (int8: 4 KB). Each warp has such runs copied into a ring of its own in
// shared memory by the bulk copy engine, one mbarrier per place, so no warp waits for another and up to 190 KB per multiprocessor are on
// their way without a register spent on them. The order of K inside a step is chosen so that a lane's share of x is one or two 16-byte
// loads of the plain row-major activations, through L1.
//
// A block is 8 warps, `wn` of them side by side along N (16 * RT rows each) and the others along K, a chunk of 128 each in turn; blocks may
// split K further (`split`). Partial sums meet in shared memory, and those of several blocks in a workspace that the last block to arrive
// adds up in a fixed order: results do not depend on timing.
//
// Order, g = lane / 4, q = lane % 4, tile t of a strip:
//   4 bit   word j of 4: element e of field h + 2b is W[16t + 8h + g, 32(j/2) + 8q + 4(j%2) + 2b + e]
//   8 bit   byte e of word 4j + h + 2b is W[16t + 8h + g, 16q + 8j + 4b + e]
// INT4: field f of half-word e lies at bits 16e + 3 .. 6 once the word is rotated right by 4f. Scales: [g][t][h] fp16 per group; zero points:
// nibble 2t + h of word g. FP4: fields as `decode_fp4` says; scales [q/2][g][t], byte 2h + (j/2). Every row has a float32 factor besides.
//
// A kernel may start while its predecessor writes its last results (programmatic dependent launch): weights, which nothing computes, are
// requested at once, everything else after griddepcontrol.wait.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "launch.cuh"

// Outside the namespace below, for a C function that takes a type of an unnamed namespace is not exported.
struct Params {
  const uint4* words;         // [experts][N/64][K/64] steps of a strip
  const uint8_t* scales;      // INT4 [experts][N/64][K/group][128 bytes]; FP4 [experts][N/64][K/64][256 bytes]; INT8 none
  const uint8_t* zeros;       // INT4 [experts][N/64][K/group][32 bytes] or null
  const float* row_scale;     // [experts][N]
  const void* x;              // [rows, K] bf16 or fp16; INT8: int8
  const float* x_scale;       // INT8 [rows]
  void* out;                  // kStore [M, N], kSiluMul [pairs, N/2] in T; kWeigh [pairs, N] float
  const int* ids;             // [pairs] expert of each token-expert pair, null for a dense linear; stride in ints
  const float* pair_weights;  // [pairs], kWeigh
  float* partial;             // [tiles][split][rows of a block][tokens of a block]
  int* arrived;               // [tiles], zero between calls
  int ids_stride, pairs, top_k, by_expert;
  int m, n, k, out_n;         // n is padded to whole strips, out_n is what is stored
  int wn, split, epilogue;
};

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSharedBytes = 112 << 10;  // of a block, two to a multiprocessor, less the barriers

enum Format { kInt4 = 0, kFp4 = 1, kInt8 = 2 };
enum Epilogue { kStore = 0, kSiluMul = 1, kWeigh = 2 };

template <class T> struct Pair;
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct Pair<__half> { using type = __half2; };

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init_barrier(uint32_t barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory"); }
__device__ __forceinline__ void show_barriers_to_copies() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_copy(uint32_t barrier, uint32_t phase) {
  asm volatile("{.reg .pred done; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again%=;}"
               :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ bool elected() {
  uint32_t chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen;
}
__device__ __forceinline__ uint4 read16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
// Loads under a predicate, which leave the registers as they are where nothing is wanted.
__device__ __forceinline__ void load_weights(uint4& v, const uint4* p, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)wanted));
}
template <int WORDS> __device__ __forceinline__ void load_words(uint32_t* to, const uint8_t* p, bool wanted) {
  static_assert(WORDS == 4 || WORDS == 2 || WORDS == 1);
  if constexpr (WORDS == 4) {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "l"(p), "r"((int)wanted));
  } else if constexpr (WORDS == 2) {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted ld.global.nc.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(to[0]), "+r"(to[1]) : "l"(p), "r"((int)wanted));
  } else {
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted ld.global.nc.u32 %0, [%1];}" : "+r"(to[0]) : "l"(p), "r"((int)wanted));
  }
}
__device__ __forceinline__ void load_tokens(uint4& v, const char* p, bool wanted) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)wanted) : "memory");
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

template <class T> __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

template <class T> __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  using P = typename Pair<T>::type;
  P r = __hmul2(*reinterpret_cast<P*>(&a), *reinterpret_cast<P*>(&b));
  return *reinterpret_cast<uint32_t*>(&r);
}

// A code at bits 3..6 of 16 (bf16) or 128 (fp16) makes the number 16 + code or 128 + code, exactly. Offset and zero point are subtracted
// from the sums: sum (offset + code) x - (offset + zero) sum x, the last by one more mma with ones for W.
template <class T> struct Magic;
template <> struct Magic<__nv_bfloat16> {
  static constexpr uint32_t value = 0x41804180u, ones = 0x3f803f80u, float_bits = 0x41800000u;
  static constexpr int float_shift = 19;  // of a zero point in a float32 with these bits
};
template <> struct Magic<__half> {
  static constexpr uint32_t value = 0x58005800u, ones = 0x3c003c00u, float_bits = 0x43000000u;
  static constexpr int float_shift = 16;
};

template <class T> __device__ __forceinline__ void decode_int4(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t mask = 0x00780078u, magic = Magic<T>::value;
  a[0] = and_or(word, mask, magic);
  a[1] = and_or(word >> 4, mask, magic);
  a[2] = and_or(word >> 8, mask, magic);
  a[3] = and_or(__funnelshift_r(word, word, 12), mask, magic);
}

// offset + zero point number `index` of a word.
template <class T> __device__ __forceinline__ float zero_of(uint32_t zeros, int index) {
  constexpr int shift = Magic<T>::float_shift;
  const int by = shift - 4 * index;
  return __uint_as_float(and_or(by >= 0 ? zeros << by : zeros >> -by, 15u << shift, Magic<T>::float_bits));
}

// E2M1 (sign, two exponent bits, one mantissa bit) has the bit order of any float: with the sign at bit 15 and the rest at bits 8..6 of a
// bf16 the number is value * 2^-126, which the scale corrects. In each half of a word the fields 0, 1, 2 lie 3 bits apart, ready to be
// shifted and masked. Field 3 of two words shares the bits that are left, 14, 13, 11, 10: the first word has both signs and mantissa bits
// (its own sign, mantissa; the other's sign, mantissa), the second both exponents (the first's, its own).
constexpr uint32_t kFp4Mask = 0x81c081c0u;

__device__ __forceinline__ void decode_fp4(uint32_t first, uint32_t second, uint32_t (&a)[4], uint32_t (&b)[4]) {
  a[0] = first & kFp4Mask;
  a[1] = (first << 3) & kFp4Mask;
  a[2] = (first << 6) & kFp4Mask;
  b[0] = second & kFp4Mask;
  b[1] = (second << 3) & kFp4Mask;
  b[2] = (second << 6) & kFp4Mask;
  const uint32_t left = and_or(first << 1, 0x90009000u, and_or(first >> 7, 0x00480048u, (second >> 6) & 0x01b001b0u));
  a[3] = left & kFp4Mask;
  b[3] = (left << 3) & kFp4Mask;
}

// Byte `index` of four e5m3 scales as a pair of bf16 with 224 added to the exponent, see `pack_fp4` for the bias.
__device__ __forceinline__ uint32_t fp4_scale(uint32_t four, int index) {
  return __byte_perm(four, 0, 0x4040 + 0x0101 * index) * 16 + 0x70007000u;
}

template <int FMT, int G, int RT, int MT, bool BULK> struct Shape {
  static constexpr int pieces = FMT == kInt8 ? 2 : 1;         // 16-byte loads of a lane's share of a tile
  static constexpr int tokens = MT * (FMT == kInt8 ? 1 : 2);  // of its share of x
  static constexpr int factors = FMT == kInt8 ? 1 : G == 32 ? 2 * RT + 2 : G == 64 ? RT + 1 : RT;  // words: scales, then zero points
  static constexpr int blocks = MT <= 2 ? 2 : 1;  // per multiprocessor
  static constexpr int step_bytes = RT * pieces * 512;
  static constexpr int sums_bytes = kWarps * RT * 16 * MT * 8 * 4;
  static constexpr int room = (3 - blocks) * kSharedBytes - sums_bytes;
  static constexpr int slots = !BULK ? 0 : room / (kWarps * step_bytes) < 8 ? room / (kWarps * step_bytes) : 8;  // steps on their way
  static constexpr int bytes = slots * kWarps * step_bytes + sums_bytes + kWarps * slots * 8;
};

// Where a warp's weights come from, in two ways that its loop cannot tell apart. A step is asked for a whole turn of the slots ahead.
//
// Through shared memory: a ring of the warp's own, filled by the bulk copy engine. The most bytes on their way.
template <int FMT, int G, int RT, int MT> struct Ring {
  using S = Shape<FMT, G, RT, MT, true>;
  static constexpr int unroll = 2;
  uint32_t data, barriers, slot = 0, phase = 0;
  const char* next;  // the step to be requested next: of this warp and in the right half of its chunk
  int64_t stride;    // from the second half of a chunk to the first of the warp's next

  __device__ __forceinline__ void init(char* shared, int warp) {
    data = shared_address(shared) + warp * S::slots * S::step_bytes;
    barriers = shared_address(shared) + S::slots * kWarps * S::step_bytes + S::sums_bytes + warp * S::slots * 8;
    if (elected()) {
      for (int i = 0; i < S::slots; ++i) init_barrier(barriers + i * 8);
      show_barriers_to_copies();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void start(const Params& p, size_t chunk, int tile, int wk, int steps) {
    next = reinterpret_cast<const char*>(p.words) + chunk * (4096 * S::pieces) + tile * (512 * S::pieces);
    stride = (int64_t)wk * (4096 * S::pieces) - 2048 * S::pieces;
    for (int i = 0; i < min(S::slots, steps); ++i) request(slot + i < S::slots ? slot + i : slot + i - S::slots, i % 2);
  }
  __device__ __forceinline__ void request(uint32_t place, int half) {
    if (elected()) copy_bulk(data + place * S::step_bytes, next, S::step_bytes, barriers + place * 8);
    next += half == 0 ? 2048 * S::pieces : stride;
  }
  __device__ __forceinline__ void take(uint4 (&w)[RT * S::pieces], int) {
    wait_for_copy(barriers + slot * 8, phase);
#pragma unroll
    for (int i = 0; i < RT * S::pieces; ++i) w[i] = read16(data + slot * S::step_bytes + i * 512 + (threadIdx.x & 31) * 16);
  }
  __device__ __forceinline__ void used(int, int, int) {}
  __device__ __forceinline__ void finish(int at, int half, int left) {
    __syncwarp();
    if (left > S::slots) request(slot, (half + S::slots) % 2);
    if (++slot == S::slots) slot = 0, phase ^= 1;
  }
};

// Straight into registers, those of a tile again as soon as they are used up. The shortest way.
template <int FMT, int G, int RT, int MT> struct Direct {
  using S = Shape<FMT, G, RT, MT, false>;
  static constexpr int unroll = MT == 1 && RT == 2 && FMT != kInt8 ? 4 : 2;
  uint4 w[unroll][RT * S::pieces];
  const uint4* words;
  int64_t stride;

  __device__ __forceinline__ void init(char*, int) {}
  __device__ __forceinline__ void start(const Params& p, size_t chunk, int tile, int wk, int steps) {
    words = p.words + chunk * (256 * S::pieces) + tile * (32 * S::pieces) + (threadIdx.x & 31);
    stride = (int64_t)wk * (256 * S::pieces);
#pragma unroll
    for (int at = 0; at < unroll; ++at)
#pragma unroll
      for (int nt = 0; nt < RT; ++nt) request(at, nt, at / 2, at < steps);
  }
  __device__ __forceinline__ void request(int at, int nt, int chunks, bool wanted) {
#pragma unroll
    for (int j = 0; j < S::pieces; ++j)
      load_weights(w[at][nt * S::pieces + j], words + chunks * stride + (at % 2 * 4 + nt) * (32 * S::pieces) + j * 32, wanted);
  }
  __device__ __forceinline__ void take(uint4 (&to)[RT * S::pieces], int at) {
#pragma unroll
    for (int i = 0; i < RT * S::pieces; ++i) to[i] = w[at][i];
  }
  __device__ __forceinline__ void used(int at, int nt, int left) { request(at, nt, unroll / 2, left > unroll); }
  __device__ __forceinline__ void finish(int at, int half, int) {
    if (half == 1) words += stride;
  }
};

// What a lane holds of the two halves of its warp's chunk besides the weights, and where that comes from.
template <int FMT, int G, int RT, int MT> struct Stream {
  using S = Shape<FMT, G, RT, MT, false>;
  uint4 x[2][S::tokens];
  uint32_t f[2][S::factors];
  const uint8_t *scales, *zeros;
  const char* token[MT];
  int wk;  // warps along K: a warp's chunks are this far apart

  __device__ __forceinline__ void point(const Params& p, int expert, int row, int chunk, int warps_along_k) {
    const int lane = threadIdx.x & 31, g = lane >> 2, tile = (row % 64) / 16;
    const size_t at = ((size_t)expert * (p.n / 64) + row / 64) * (p.k / 128) + chunk;
    wk = warps_along_k;
    if constexpr (FMT == kFp4) scales = p.scales + at * 512 + ((lane >> 1) & 1) * 128 + g * 16 + tile * 4;
    if constexpr (FMT == kInt4) {
      scales = p.scales + at * (128 / G) * 128 + g * 16 + tile * 4;
      zeros = p.zeros ? p.zeros + at * (128 / G) * 32 + g * 4 : nullptr;
    }
  }

  // Without stored zero points the middle of the grid stays.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S::factors; ++i) f[half][i] = 0x88888888u;
#pragma unroll
      for (int i = 0; i < S::tokens; ++i) x[half][i] = {};
    }
  }

  // Of half 0 or 1 of the current chunk.
  __device__ __forceinline__ void request_factors(int half, bool wanted) {
    if constexpr (FMT == kInt4 && G == 128) {
      // The group's scales come with its first half, its zero points with its second.
      if (half == 0) load_words<RT>(f[0], scales, wanted);
      else load_words<1>(f[1], zeros, wanted && zeros);
    } else if constexpr (FMT != kInt8) {
      constexpr int groups = G == 32 ? 2 : 1, bytes = FMT == kFp4 ? 256 : 128;
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        load_words<RT>(f[half] + i * RT, scales + (half * groups + i) * bytes, wanted);
        if constexpr (FMT == kInt4) load_words<1>(f[half] + groups * RT + i, zeros + (half * groups + i) * 32, wanted && zeros);
      }
    }
  }
  // Of the current chunk, or of the warp's next.
  __device__ __forceinline__ void request_tokens(int half, int chunks_ahead, bool wanted) {
    const int64_t at = (int64_t)chunks_ahead * wk * (FMT == kInt8 ? 128 : 256) + half * (FMT == kInt8 ? 64 : 128);
#pragma unroll
    for (int i = 0; i < S::tokens; ++i) {
      if constexpr (FMT == kInt8) load_tokens(x[half][i], token[i] + at, wanted);
      else load_tokens(x[half][i], token[i / 2] + at + (i % 2) * 64, wanted);
    }
  }
  // To the warp's next chunk.
  __device__ __forceinline__ void advance() {
    if constexpr (FMT == kFp4) scales += wk * 512;
    if constexpr (FMT == kInt4) {
      scales += wk * (128 / G) * 128;
      if (zeros) zeros += wk * (128 / G) * 32;
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) token[mt] += (int64_t)wk * (FMT == kInt8 ? 128 : 256);
  }
};

// Sums of a warp: of whole products, and for INT4 of the current group.
template <int FMT, class T, int G, int RT, int MT> struct Sums {
  using S = Shape<FMT, G, RT, MT, false>;
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  static constexpr int parts = FMT == kInt4 ? RT : 1;
  Acc acc[RT][MT][4];
  float part[parts][MT][4], sum[MT][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < RT; ++i)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][mt][c] = 0;
    clear_group();
  }
  __device__ __forceinline__ void clear_group() {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[mt][c] = 0.f;
#pragma unroll
        for (int i = 0; i < parts; ++i) part[i][mt][c] = 0.f;
      }
  }
  // acc += scale * (part - zero * sum), for `zeros` of the warp's first tile onwards.
  __device__ __forceinline__ void end_group(const uint32_t* scale, uint32_t zeros) {
#pragma unroll
    for (int nt = 0; nt < RT; ++nt) {
      const float2 s = __half22float2(*reinterpret_cast<const __half2*>(&scale[nt]));
      const float lo = zero_of<T>(zeros, 2 * nt), hi = zero_of<T>(zeros, 2 * nt + 1);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[nt][mt][c] += (c < 2 ? s.x : s.y) * (part[nt][mt][c] - (c < 2 ? lo : hi) * sum[mt][c]);
    }
    clear_group();
  }

  // A[j] of words 2i + j of a tile's share, which span 32 along K.
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], const uint4& words, int i, uint32_t four) {
    if constexpr (FMT == kFp4) {
      const uint32_t lo = fp4_scale(four, i), hi = fp4_scale(four, 2 + i);
      decode_fp4(word_of(words, 2 * i), word_of(words, 2 * i + 1), a[0], a[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) a[j][k] = multiply2<T>(a[j][k], k % 2 ? hi : lo);
    } else {
      decode_int4<T>(word_of(words, 2 * i), a[0]);
      decode_int4<T>(word_of(words, 2 * i + 1), a[1]);
    }
  }

  // Two tiles at a time over 32 along K, so that products do not wait for one another; with the first two tiles the sums of x.
  __device__ __forceinline__ void two_tiles(const Stream<FMT, G, RT, MT>& s, const uint4 (&w)[2], int half, int nt, int i) {
    const uint4(&x)[S::tokens] = s.x[half];
    const uint32_t ones[4] = {Magic<T>::ones, Magic<T>::ones, Magic<T>::ones, Magic<T>::ones};
    uint32_t a[2][2][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) decode(a[t], w[t], i, FMT == kFp4 ? s.f[half][nt + t] : 0);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const uint32_t b0 = word_of(x[2 * mt + i], 2 * j), b1 = word_of(x[2 * mt + i], 2 * j + 1);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if constexpr (FMT == kFp4) mma<T>(acc[nt + t][mt], a[t][j], b0, b1);
          else mma<T>(part[nt + t][mt], a[t][j], b0, b1);
        }
        if (FMT == kInt4 && nt == 0) mma<T>(sum[mt], ones, b0, b1);
      }
  }

  // One step of 64 out of slot `at`; `left` steps of the warp are not done yet.
  template <class Weights> __device__ __forceinline__ void step(const Stream<FMT, G, RT, MT>& s, Weights& weights, int at, int half, int left, int tile) {
    const int shift = RT == 4 ? 0 : 8 * tile;
    uint4 w[RT * S::pieces];
    weights.take(w, at);
    if constexpr (FMT == kInt8) {
#pragma unroll
      for (int nt = 0; nt < RT; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) mma_s8(acc[nt][mt], w[nt * 2 + j], word_of(s.x[half][mt], 2 * j), word_of(s.x[half][mt], 2 * j + 1));
        weights.used(at, nt, left);
      }
    } else {
      constexpr int turns = FMT == kInt4 && G == 32 ? 2 : 1;  // of the tiles: each group of 32 by itself, or all of the step
#pragma unroll
      for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int nt = 0; nt < RT; nt += 2) {
          const uint4 two[2] = {w[nt], w[nt + 1]};
#pragma unroll
          for (int i = turn; i < turn + 3 - turns; ++i) two_tiles(s, two, half, nt, i);
          if (turn == turns - 1) weights.used(at, nt, left), weights.used(at, nt + 1, left);
        }
        if constexpr (FMT == kInt4 && G == 32) end_group(s.f[half] + turn * RT, s.f[half][2 * RT + turn] >> shift);
      }
      if constexpr (FMT == kInt4 && G == 128) {
        if (half == 1) end_group(s.f[0], s.f[1][0] >> shift);
      }
      if constexpr (FMT == kInt4 && G == 64) end_group(s.f[half], s.f[half][RT] >> shift);
    }
  }
};

// Which pairs are of one expert: writes those numbered first .. first + room - 1 into `list`, in order, and returns how many there are.
// The list is complete after the block's next barrier.
__device__ int list_pairs(const Params& p, int expert, int first, int room, int* list) {
  __shared__ int counts[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (p.pairs + kThreads - 1) / kThreads * 32, begin = warp * each, end = min(p.pairs, begin + each);
  const auto ballot_of = [&](int base) {
    return __ballot_sync(0xffffffffu, base + lane < end && p.ids[(size_t)(base + lane) * p.ids_stride] == expert);
  };
  int count = 0;
#pragma unroll 4
  for (int base = begin; base < end; base += 32) count += __popc(ballot_of(base));
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int place = -first, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) place += counts[w];
    total += counts[w];
  }
  for (int base = begin; base < end && count > 0; base += 32) {
    const unsigned ballot = ballot_of(base);
    const int mine = place + __popc(ballot & ((1u << lane) - 1));
    if ((ballot >> lane & 1) && mine >= 0 && mine < room) list[mine] = base + lane;
    place += __popc(ballot);
  }
  return total;
}

template <class T> __device__ __forceinline__ void store(void* out, size_t at, float value) { reinterpret_cast<T*>(out)[at] = T(value); }

// Sums over warps along K are in `red` [warp along K][rows of the block][tokens]; what they become is the epilogue's business.
template <int FMT, class T, int RT, int MT, class Acc>
__device__ void finish_tile(const Params& p, Acc* red, int block_n, int part, int expert, int tile_id, const int* tokens, int count) {
  constexpr int tokens_per_tile = 8 * MT;
  const int rows = p.wn * RT * 16, wk = kWarps / p.wn, outputs = rows * tokens_per_tile;
  __shared__ int last;
  // The sum over this block's warps goes to the first warp's place.
  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    Acc sum = 0;
    for (int w = 0; w < wk; ++w) sum += red[w * outputs + i];
    red[i] = sum;
  }
  __syncthreads();
  if (p.split > 1) {
    Acc* mine = reinterpret_cast<Acc*>(p.partial) + ((size_t)tile_id * p.split + part) * outputs;
    for (int i = threadIdx.x; i < outputs; i += kThreads) __stcg(mine + i, red[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + tile_id, 1) == p.split - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const Acc* all = reinterpret_cast<const Acc*>(p.partial) + (size_t)tile_id * p.split * outputs;
    for (int i = threadIdx.x; i < outputs; i += kThreads) {
      Acc sum = 0;
      for (int s = 0; s < p.split; ++s) sum += __ldcg(all + (size_t)s * outputs + i);
      red[i] = sum;
    }
    if (threadIdx.x == 0) p.arrived[tile_id] = 0;
    __syncthreads();
  }
  const float* row_scale = p.row_scale + (size_t)expert * p.n + (size_t)block_n * rows;
  const int produced = p.epilogue == kSiluMul ? rows / 2 : rows;
  for (int i = threadIdx.x; i < produced * count; i += kThreads) {
    const int r = i % produced, t = i / produced, token = tokens[t];
    const float x_scale = FMT == kInt8 ? p.x_scale[p.epilogue == kSiluMul ? token / p.top_k : token] : 1.f;
    const int feature = block_n * produced + r;
    if (feature >= p.out_n) continue;
    if (p.epilogue == kSiluMul) {
      // Rows come as 8 of gate, 8 of up.
      const int gate = (r / 8) * 16 + r % 8;
      const float a = float(red[gate * tokens_per_tile + t]) * row_scale[gate] * x_scale;
      const float b = float(red[(gate + 8) * tokens_per_tile + t]) * row_scale[gate + 8] * x_scale;
      store<T>(p.out, (size_t)token * p.out_n + feature, a / (1.f + __expf(-a)) * b);
    } else {
      const float y = float(red[r * tokens_per_tile + t]) * row_scale[r] * x_scale;
      if (p.epilogue == kWeigh) reinterpret_cast<float*>(p.out)[(size_t)token * p.out_n + feature] = y * p.pair_weights[token];
      else store<T>(p.out, (size_t)token * p.out_n + feature, y);
    }
  }
}

template <int FMT, class T, int G, int RT, int MT, bool BULK>
__global__ void __launch_bounds__(kThreads, Shape<FMT, G, RT, MT, BULK>::blocks) stream_gemm(const Params p) {
  using S = Shape<FMT, G, RT, MT, BULK>;
  using Weights = std::conditional_t<BULK, Ring<FMT, G, RT, MT>, Direct<FMT, G, RT, MT>>;
  using Acc = typename Sums<FMT, T, G, RT, MT>::Acc;
  constexpr int tokens_per_tile = 8 * MT;
  extern __shared__ __align__(128) char shared[];
  __shared__ int list[tokens_per_tile];
  Acc* red = reinterpret_cast<Acc*>(shared + S::slots * kWarps * S::step_bytes);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, q = lane & 3;
  const int block_n = blockIdx.x / p.split, part = blockIdx.x % p.split;
  const int warp_n = warp % p.wn, warp_k = warp / p.wn, wk = kWarps / p.wn;
  const int row = (block_n * p.wn + warp_n) * RT * 16, tile = (row % 64) / 16;
  const int all_chunks = p.k / 128, begin = all_chunks * part / p.split + warp_k, end = all_chunks * (part + 1) / p.split;
  const int chunks = begin < end ? (end - begin + wk - 1) / wk : 0;
  const size_t row_bytes = (size_t)p.k * (FMT == kInt8 ? 1 : 2);

  Weights weights;
  weights.init(shared, warp);

  int expert = 0, first = 0, total;
  // The routing of a layer's second product was there before its first began.
  const bool wait_late = !p.ids || p.epilogue == kWeigh;
  if (p.ids) {
    if (!wait_late) wait_for_predecessor();
    expert = p.by_expert ? blockIdx.y : p.ids[(size_t)blockIdx.y * p.ids_stride];
    total = list_pairs(p, expert, 0, tokens_per_tile, list);
    __syncthreads();
    // Without a block per expert there is one per pair, and an expert belongs to its first pair.
    if (total == 0 || (!p.by_expert && list[0] != (int)blockIdx.y)) return;
  } else {
    first = blockIdx.y * tokens_per_tile;
    total = min(p.m, first + tokens_per_tile);
    if (threadIdx.x < tokens_per_tile) list[threadIdx.x] = first + threadIdx.x;
  }

  for (;;) {
    weights.start(p, ((size_t)expert * (p.n / 64) + row / 64) * (p.k / 128) + begin, tile, wk, 2 * chunks);
    Stream<FMT, G, RT, MT> stream;
    stream.clear();
    stream.point(p, expert, row, begin, wk);
    stream.request_factors(0, chunks > 0), stream.request_factors(1, chunks > 0);
    if (wait_late) wait_for_predecessor();
    __syncthreads();
    const int count = min(tokens_per_tile, total - first);
    // A column of the product depends on its own token only, so places without a token repeat the first and are not stored.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int token = list[mt * 8 + g < count ? mt * 8 + g : 0];
      stream.token[mt] = reinterpret_cast<const char*>(p.x) + row_bytes * (p.epilogue == kSiluMul ? token / p.top_k : token) + q * 16 +
                         (size_t)begin * 128 * (FMT == kInt8 ? 1 : 2);
    }
    stream.request_tokens(0, 0, chunks > 0), stream.request_tokens(1, 0, chunks > 0);

    Sums<FMT, T, G, RT, MT> sums;
    sums.clear();
    // The way out between the two halves of a chunk is never taken, but the compiler, which cannot know, leaves each half's loads in it
    // instead of gathering them at the end of the chunk.
    int steps = 2 * chunks;
    asm volatile("" : "+r"(steps));
    for (int i = 0; i < steps; i += Weights::unroll) {
#pragma unroll
      for (int at = 0; at < Weights::unroll; ++at) {
        const int half = at % 2, left = steps - i - at;
        if (left <= 0) break;
        sums.step(stream, weights, at, half, left, tile);
        stream.request_tokens(half, 1, left > 2);
        weights.finish(at, half, left);
        if (half == 1) {
          stream.advance();
          stream.request_factors(0, left > 2), stream.request_factors(1, left > 2);
        }
      }
    }
    let_successor_start();
    // red[warp_k][row of the block][token]
    Acc* mine = red + ((size_t)warp_k * p.wn + warp_n) * RT * 16 * tokens_per_tile;
#pragma unroll
    for (int nt = 0; nt < RT; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) mine[(nt * 16 + (c / 2) * 8 + g) * tokens_per_tile + mt * 8 + q * 2 + c % 2] = sums.acc[nt][mt][c];
    __syncthreads();
    const int tile_id = blockIdx.y * (gridDim.x / p.split) + block_n;
    finish_tile<FMT, T, RT, MT, Acc>(p, red, block_n, part, expert, tile_id, list, count);
    first += tokens_per_tile;
    if (first >= total) return;
    __syncthreads();
    list_pairs(p, expert, first, tokens_per_tile, list);
    __syncthreads();
  }
}

// W[N, K] in T from the 4-bit layout, for products with so many tokens that torch's own matmul is faster. One warp per tile of 16 x 64.
template <int FMT, class T, int G> __global__ void expand(const Params p, T* out) {
  const int steps = p.k / 64, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const size_t index = (size_t)blockIdx.x * (blockDim.x / 32) + (threadIdx.x >> 5);
  const int t = index % 4, kt = index / 4 % steps, row = (int)(index / 4 / steps) * 64 + t * 16;
  if (row >= p.n) return;
  const uint4 words = __ldg(p.words + index * 32 + lane);
  const float row_lo = p.row_scale[row + g], row_hi = p.row_scale[row + 8 + g];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[2][4];
    float lo, hi, zero_lo = 0.f, zero_hi = 0.f;
    if constexpr (FMT == kFp4) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(p.scales + index / 4 * 256 + (q >> 1) * 128 + g * 16 + t * 4);
      decode_fp4(word_of(words, 2 * i), word_of(words, 2 * i + 1), a[0], a[1]);
      const uint32_t bits_lo = fp4_scale(four, i), bits_hi = fp4_scale(four, 2 + i);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int f = 0; f < 4; ++f) a[j][f] = multiply2<T>(a[j][f], f % 2 ? bits_hi : bits_lo);
      lo = row_lo, hi = row_hi;
    } else {
      const size_t group = G == 32 ? index / 4 * 2 + i : G == 64 ? index / 4 : index / 8;
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(p.scales + group * 128 + g * 16 + t * 4));
      const uint32_t zeros = (p.zeros ? *reinterpret_cast<const uint32_t*>(p.zeros + group * 32 + g * 4) : 0x88888888u) >> (8 * t);
      zero_lo = zero_of<T>(zeros, 0), zero_hi = zero_of<T>(zeros, 1);
      lo = scale.x * row_lo, hi = scale.y * row_hi;
      decode_int4<T>(word_of(words, 2 * i), a[0]);
      decode_int4<T>(word_of(words, 2 * i + 1), a[1]);
    }
    T rows[2][8];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const T* pair = reinterpret_cast<const T*>(&a[j][f]);
#pragma unroll
        for (int e = 0; e < 2; ++e) rows[f % 2][4 * j + 2 * (f / 2) + e] = T((float(pair[e]) - (f % 2 ? zero_hi : zero_lo)) * (f % 2 ? hi : lo));
      }
    const size_t at = (size_t)(row + g) * p.k + kt * 64 + 32 * i + 8 * q;
    if (row + g < p.out_n) *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<uint4*>(rows[0]);
    if (row + 8 + g < p.out_n) *reinterpret_cast<uint4*>(out + at + (size_t)8 * p.k) = *reinterpret_cast<uint4*>(rows[1]);
  }
}

// out[t] = sum over a token's pairs, which kWeigh has already weighed.
template <class T> __global__ void sum_pairs(const float* pairs, T* out, int top_k, int hidden) {
  wait_for_predecessor();
  let_successor_start();
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (at >= hidden) return;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  const float* from = pairs + (size_t)blockIdx.x * top_k * hidden + at;
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    const float4 one = *reinterpret_cast<const float4*>(from + (size_t)k * hidden);
    sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
  }
  T* to = out + (size_t)blockIdx.x * hidden + at;
  to[0] = T(sum.x), to[1] = T(sum.y), to[2] = T(sum.z), to[3] = T(sum.w);
}

// Symmetric int8 per row: scale = max|x| / 127, or 1 for a row of zeros. One block per row; K is a multiple of 8.
template <class T> __global__ void quantize_rows(const T* x, int8_t* codes, float* scale, int k) {
  __shared__ float warp_max[32];
  wait_for_predecessor();
  let_successor_start();
  const T* row = x + (size_t)blockIdx.x * k;
  float largest = 0;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(float(e[j])));
  }
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
  if ((threadIdx.x & 31) == 0) warp_max[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) largest = fmaxf(largest, warp_max[w]);
  const float step = largest == 0 ? 1.f : largest / 127.f;
  if (threadIdx.x == 0) scale[blockIdx.x] = step;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
    int8_t c[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) c[j] = (int8_t)max(-127, min(127, __float2int_rn(__fdiv_rn(float(e[j]), step))));
    *reinterpret_cast<uint2*>(codes + (size_t)blockIdx.x * k + i) = *reinterpret_cast<uint2*>(c);
  }
}

template <int FMT, class T, int G, int RT, int MT, bool BULK> int launch(const Params& p, int grid_y, void* stream) {
  auto kernel = stream_gemm<FMT, T, G, RT, MT, BULK>;
  constexpr int bytes = Shape<FMT, G, RT, MT, BULK>::bytes;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return (int)allowed;
  return start(kernel, dim3(p.n / (p.wn * RT * 16) * p.split, grid_y), kThreads, bytes, stream, p);
}

template <int FMT, class T, int G> int launch(const Params& p, int token_tiles, int row_tiles, int bulk, int grid_y, void* stream) {
  if (token_tiles == 4) return launch<FMT, T, G, 4, 4, true>(p, grid_y, stream);
  if (token_tiles == 2) return row_tiles == 4 ? launch<FMT, T, G, 4, 2, true>(p, grid_y, stream) : launch<FMT, T, G, 2, 2, true>(p, grid_y, stream);
  if (bulk) return row_tiles == 4 ? launch<FMT, T, G, 4, 1, true>(p, grid_y, stream) : launch<FMT, T, G, 2, 1, true>(p, grid_y, stream);
  return row_tiles == 4 ? launch<FMT, T, G, 4, 1, false>(p, grid_y, stream) : launch<FMT, T, G, 2, 1, false>(p, grid_y, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16. token_tiles 1, 2 or 4; row_tiles 2 or 4, and 4 with four token tiles. Returns a cudaError_t.
extern "C" int qk_stream_gemm(const Params* p, int format, int dtype, int group, int token_tiles, int row_tiles, int bulk, int grid_y, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, token_tiles, row_tiles, bulk, grid_y, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (format == kInt8) return dtype == 0 ? run(launch<kInt8, bf16, 0>) : run(launch<kInt8, __half, 0>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}

extern "C" int qk_expand(const Params* p, int format, int dtype, int group, void* out, void* stream) {
  const int blocks = p->n / 64 * (p->k / 64) / 2;
  const auto run = [&](auto kernel, auto* to) {
    kernel<<<blocks, 256, 0, (cudaStream_t)stream>>>(*p, to);
    return (int)cudaGetLastError();
  };
  if (format == kFp4) return run(expand<kFp4, bf16, 16>, (bf16*)out);
  if (group == 32) return dtype == 0 ? run(expand<kInt4, bf16, 32>, (bf16*)out) : run(expand<kInt4, __half, 32>, (__half*)out);
  if (group == 64) return dtype == 0 ? run(expand<kInt4, bf16, 64>, (bf16*)out) : run(expand<kInt4, __half, 64>, (__half*)out);
  return dtype == 0 ? run(expand<kInt4, bf16, 128>, (bf16*)out) : run(expand<kInt4, __half, 128>, (__half*)out);
}

extern "C" int qk_sum_pairs(const float* pairs, void* out, int dtype, int tokens, int top_k, int hidden, void* stream) {
  const dim3 grid(tokens, (hidden / 4 + 255) / 256);
  if (dtype == 0) return start(sum_pairs<bf16>, grid, 256, 0, stream, pairs, (bf16*)out, top_k, hidden);
  return start(sum_pairs<__half>, grid, 256, 0, stream, pairs, (__half*)out, top_k, hidden);
}

extern "C" int qk_quantize_rows(const void* x, void* codes, float* scale, int dtype, int rows, int k, void* stream) {
  const int threads = k >= 8192 ? 1024 : 512;
  if (dtype == 0) return start(quantize_rows<bf16>, rows, threads, 0, stream, (const bf16*)x, (int8_t*)codes, scale, k);
  return start(quantize_rows<__half>, rows, threads, 0, stream, (const __half*)x, (int8_t*)codes, scale, k);
}
